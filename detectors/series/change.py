"""Change points in the location of a series: the best segmentation under a penalty, and a past moved to today's level. Pure functions."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from detectors.robust import median_of_known

F64 = NDArray[np.float64]
_GAUSS_OF_MEDIAN = 1.4826
_SURE = 4.0
"""Standard errors of a step beside a slope."""


def noise_scale(values: F64) -> float:
    """Standard deviation of the noise about a level that may jump now and then: from the median difference of neighbours. Absent values
    (NaN) are left out; 0 for a constant or too short series.

    Examples
    --------
    >>> round(noise_scale(np.array([0.0, 1.0, 0.0, 1.0, 50.0, 51.0, 50.0, 51.0])), 3)
    1.048
    """
    steps = np.abs(np.diff(values[np.isfinite(values)]))
    return float(_GAUSS_OF_MEDIAN * np.median(steps) / math.sqrt(2.0)) if len(steps) else 0.0


def bounded(values: F64, scale: float, limit: float = 3.0, width: int = 5) -> F64:
    """Values in units of `scale`, each at most `limit` away from the median of the `width` around it: spikes lose their weight, levels
    keep theirs."""
    known = values[np.isfinite(values)] / max(scale, 1e-12)
    if len(known) < width:
        return np.asarray(known)
    padded = np.pad(known, width // 2, mode="edge")
    middle = np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)
    return np.asarray(np.clip(known, middle - limit, middle + limit))


def segment(values: F64, penalty: float, least: int = 2) -> list[int]:
    """Starts of the segments (without 0) that minimise the squared deviations from segment means plus `penalty` per change: exact.

    Killick's PELT (2012): dynamic programming over the last change, without candidates that can never win again
    (a beaten one stays until a segment can begin where it was beaten).

    Parameters
    ----------
    values
        Without NaN, in units of their noise; 2 to 4 times the logarithm of the length is the usual penalty.
    least
        Least length of a segment.

    Examples
    --------
    >>> segment(np.array([0.0, 0.1, 0.0, 5.0, 5.1, 5.0]), penalty=2.0)
    [3]
    """
    count = len(values)
    total, squares = np.concatenate([[0.0], np.cumsum(values)]), np.concatenate([[0.0], np.cumsum(values * values)])
    best = np.full(count + 1, np.inf)
    best[0], before = -penalty, np.zeros(count + 1, dtype=np.int64)
    candidates, until = np.array([0]), np.array([count + 1])
    for end in range(least, count + 1):
        length = end - candidates
        cost = squares[end] - squares[candidates] - (total[end] - total[candidates]) ** 2 / length
        value = best[candidates] + cost
        chosen = int(np.argmin(value))
        best[end], before[end] = value[chosen] + penalty, candidates[chosen]
        until = np.where(value > best[end] + 1e-9, np.minimum(until, end + least), until)
        candidates, until = candidates[until > end + 1], until[until > end + 1]
        if end - least + 1 >= least:
            candidates, until = np.append(candidates, end - least + 1), np.append(until, count + 1)
    return _starts(before, count)


def _starts(before: NDArray[np.int64], count: int) -> list[int]:
    found, end = [], count
    while end > 0 and before[end] > 0:
        found.append(int(before[end]))
        end = int(before[end])
    return found[::-1]


def memory(values: F64) -> float:
    """Correlation of neighbouring values about a level that may jump now and then, 0 to 0.9: from how their differences follow each other.

    In a series with memory r (autoregressive of order one) neighbouring differences have the correlation (r - 1) / 2.

    Examples
    --------
    >>> noise = np.random.default_rng(1).normal(size=4000)
    >>> memory(noise) < 0.1, round(memory(np.convolve(noise, 0.8 ** np.arange(40))), 1)
    (True, 0.8)
    """
    steps = np.diff(values[np.isfinite(values)])
    if len(steps) < 3:
        return 0.0
    most = 3.0 * _GAUSS_OF_MEDIAN * float(np.median(np.abs(steps)))
    steps = np.clip(steps, -most, most)
    follow = float((steps[1:] * steps[:-1]).mean()) / max(float((steps * steps).mean()), 1e-300)
    return min(max(1.0 + 2.0 * follow, 0.0), 0.9)


def change_points(values: F64, penalty: float | None = None, least: int = 4) -> list[int]:
    """Where the level of a raw series changes, noise and spikes taken care of; positions among the known values.

    The usual penalty, three times the logarithm of the length, is that of independent noise. What wanders by itself pays as much more as
    its sums vary more: (1 + r) / (1 - r) times, r being its `memory` (what happens without: Shi et al., "Changepoint detection: an
    analysis of the Central England temperature series", Journal of Climate 2022).

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> change_points(np.concatenate([rng.normal(0, 1, 50), rng.normal(6, 1, 50)]))
    [50]
    """
    known = values[np.isfinite(values)]
    scale = noise_scale(known)
    if len(known) < 2 * least or scale <= 0:
        return []
    if penalty is None:
        follow = memory(known)
        penalty = 3.0 * math.log(len(known)) * (1.0 + follow) / (1.0 - follow)
    return segment(bounded(known, scale), penalty, least)


def levelled(values: F64, season: F64, block: int = 6, least: int = 2) -> F64:
    """`values` with all that came before a step moved to the level after it: what a trend and a season may be learnt from.

    A line through a step has a slope that is none, and a spread that is the step. Steps are looked for in medians of `block` points with
    the season taken off, `least` medians to a level; what a slope explains is none.

    Parameters
    ----------
    values
        Points at equal distances, NaN where absent.
    season
        The season at each of them, 0 where it has none.

    Examples
    --------
    >>> level = np.repeat([1.0, 5.0], 60) + np.random.default_rng(2).normal(0.0, 0.1, 120)
    >>> levelled(level, np.zeros(120)).reshape(2, 60).mean(axis=1).round(1).tolist()
    [5.0, 5.0]
    """
    count = len(values) // block
    first = len(values) - count * block
    middles = median_of_known((values - season)[first:].reshape(count, block).T) if count else np.zeros(0)
    places = np.flatnonzero(np.isfinite(middles))
    middles, moved = middles[places], values.copy()
    changes = change_points(middles, least=least)
    for before, change, after in zip([0, *changes], changes, [*changes[1:], len(middles)], strict=False):
        moved[: first + block * places[change]] += _jump(middles[before:after], change - before)
    return moved


def _jump(values: F64, at: int) -> float:
    """Height of the step at a place of a line with that step; 0 where the line does without."""
    count = len(values)
    design = np.stack([np.ones(count), np.linspace(-1.0, 1.0, count), np.arange(count) >= at], axis=1)
    found = np.linalg.lstsq(design, values, rcond=None)[0]
    left = float(((values - design @ found) ** 2).sum()) / max(count - 3, 1)
    error = math.sqrt(left * float(np.linalg.inv(design.T @ design)[2, 2]))
    return float(found[2]) if abs(found[2]) > _SURE * error else 0.0
