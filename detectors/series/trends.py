"""Trends and their evidence: robust slopes of levels, exact tests of counts, growth of rates. Pure functions; NaN means unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from detectors.robust import median_of_known

F64 = NDArray[np.float64]
GAUSS_OF_MEDIAN = 1.4826


def paired_slope(values: NDArray[Any]) -> F64:
    """Robust slope per column step of each row: Theil and Sen's median of slopes, over the pairs half a row apart.

    A quarter of the points may be arbitrary. Rows with fewer than a quarter of their pairs known have the slope NaN.

    Examples
    --------
    >>> paired_slope(np.array([[0.0, 2.0, 4.0, 6.0, 99.0, 10.0]]))
    array([2.])
    """
    half = values.shape[1] // 2
    rises = np.asarray(values[:, half:] - values[:, :-half], dtype=np.float64) / half
    whole = np.isfinite(rises).all(axis=1)
    slope = np.full(len(rises), np.nan)
    slope[whole] = np.median(rises[whole], axis=1)
    gappy = rises[~whole]
    enough = np.isfinite(gappy).sum(axis=1) * 4 >= rises.shape[1]
    slope[~whole] = np.where(enough, median_of_known(gappy.T), np.nan)
    return slope


def risen(values: NDArray[Any]) -> F64:
    """Rise of each row from its first quarter to its last, in medians, scaled to what a line rises over the whole row.

    A rise in the middle of a row, with rest before and after, counts a third more than it is; in `paired_slope` it counts double.

    Examples
    --------
    >>> risen(np.array([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [0.0, 0.0, 0.0, 0.0, 6.0, 6.0, 6.0, 6.0]]))
    array([8., 8.])
    """
    quarter = values.shape[1] // 4
    return np.asarray(4.0 / 3.0 * (median_of_known(values[:, -quarter:].T) - median_of_known(values[:, :quarter].T)))


def largest_jump(values: NDArray[Any]) -> F64:
    """Largest rise over two neighbouring columns of each row: a step has its whole height there, a trend little."""
    rises = np.asarray(values[:, 2:] - values[:, :-2], dtype=np.float64)
    return np.asarray(np.where(np.isfinite(rises), rises, 0.0).max(axis=1, initial=0.0))


def is_step(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows (boolean) that one step describes better than a curve: a level that changed once heads nowhere.

    Two levels and the place of the change have three parameters, as a parabola has; the smaller sum of squares is believed. Dips of one or
    two columns are taken out before.

    Examples
    --------
    >>> ramp = np.linspace(0.0, 6.0, 24)
    >>> is_step(np.stack([ramp, 6.0 * (ramp > 4.0), ramp**3])).tolist()
    [False, True, False]
    """
    return np.array([_is_step(row[np.isfinite(row)].astype(np.float64)) for row in values], dtype=np.bool_)


def _is_step(known: F64) -> bool:
    if len(known) < 8:
        return False
    level = np.median(np.lib.stride_tricks.sliding_window_view(known, 5), axis=1)
    level = level - level.mean()
    time = np.linspace(-1.0, 1.0, len(level))
    curve = float(((level - np.polyval(np.polyfit(time, level, 2), time)) ** 2).sum())
    count, before = np.arange(1, len(level)), np.cumsum(level)[:-1]
    explained = before**2 / count + before**2 / (len(level) - count)
    return float((level**2).sum() - explained.max()) < curve


def excess_p(recent: NDArray[Any], recent_s: NDArray[Any], past: NDArray[Any], past_s: NDArray[Any]) -> F64:
    """Probability of `recent` or more events in `recent_s` when the rate is that of `past` events in `past_s`: exact.

    Given the sum, the recent share of two Poisson counts of equal rate is binomial. Without exposure in the past nothing is known: 1.

    Examples
    --------
    >>> float(excess_p(np.array([3.0]), np.array([1.0]), np.array([0.0]), np.array([1.0]))[0])
    0.125
    """
    share = recent_s / np.maximum(recent_s + past_s, 1e-12)
    tail = special.betainc(np.maximum(recent, 1e-9), past + 1.0, share)
    return np.asarray(np.where((recent > 0) & (past_s > 0), tail, 1.0))


def gamma_of_rates(events: F64, seconds: F64) -> tuple[float, float]:
    """Shape and exposure (seconds) of a gamma distribution with the mean and spread of these series' rates; (0, 0) for fewer than three.

    The spread is what Poisson noise leaves unexplained; with none left, the exposure is that of all series together.
    """
    known = seconds > 0
    if known.sum() < 3 or not events[known].sum():
        return (0.0, 0.0) if known.sum() < 3 else (0.0, float(seconds[known].sum()))
    rates = events[known] / seconds[known]
    mean = float(events[known].sum() / seconds[known].sum())
    left = float(np.var(rates, ddof=1)) - mean / float(np.mean(seconds[known]))
    exposure_s = min(mean / left if left > 0 else np.inf, float(seconds[known].sum()))
    return mean * exposure_s, exposure_s


def dispersion(counts: NDArray[Any]) -> F64:
    """Variance over mean of the counts of each row, at least 1: how much burstier than Poisson they are."""
    known = np.isfinite(counts)
    number = np.maximum(known.sum(axis=1), 1)
    mean = np.where(known, counts, 0.0).sum(axis=1) / number
    spread = np.where(known, (counts - mean[:, None]) ** 2, 0.0).sum(axis=1) / np.maximum(number - 1, 1)
    return np.asarray(np.maximum(1.0, spread / np.maximum(mean, 1e-12)))


@dataclass(frozen=True)
class Growth:
    """A rate that grows as exp: `now` per bucket at the end, `rate` per bucket, `z` of the growth against none."""

    now: float
    rate: float
    z: float


def growth(counts: F64) -> Growth:
    """Poisson regression of counts on time; the error is widened by the dispersion about the fit.

    Parameters
    ----------
    counts
        Events per bucket, oldest first; NaN buckets are left out.
    """
    known = np.isfinite(counts)
    seen, time = counts[known], np.arange(len(counts), dtype=np.float64)[known] - (len(counts) - 1)
    if len(seen) < 4 or seen.sum() <= 0:
        return Growth(0.0, 0.0, 0.0)
    design = np.column_stack([np.ones_like(time), time])
    beta = np.array([np.log(seen.mean()), 0.0])
    for _ in range(25):
        fitted = np.exp(np.clip(design @ beta, -30.0, 30.0))
        curve = design.T @ (design * fitted[:, None]) + np.diag([1e-9, 1e-9])
        step = np.clip(np.linalg.solve(curve, design.T @ (seen - fitted)), -2.0, 2.0)
        beta = beta + step
        if np.abs(step).max() < 1e-8:
            break
    fitted = np.exp(np.clip(design @ beta, -30.0, 30.0))
    chi = float(((seen - fitted) ** 2 / np.maximum(fitted, 1e-9)).sum() / max(1, len(seen) - 2))
    error = float(np.sqrt(np.linalg.inv(curve)[1, 1] * max(1.0, chi)))
    return Growth(float(np.exp(np.clip(beta[0], -30.0, 30.0))), float(beta[1]), float(beta[1] / max(error, 1e-12)))


def gauss_line(risk: float) -> float:
    """How many standard deviations a Gaussian passes on one side with probability `risk`.

    Examples
    --------
    >>> round(gauss_line(1e-9), 2)
    6.0
    """
    return float(-special.ndtri(risk))
