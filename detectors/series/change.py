"""Change points in the location of a series: the best segmentation under a penalty, and shifts as they happen. Pure functions.

Both take values in units of their noise (see `noise_scale`), bounded so that a single spike is no segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

F64 = NDArray[np.float64]
_GAUSS_OF_MEDIAN = 1.4826


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


def change_points(values: F64, penalty: float | None = None, least: int = 4) -> list[int]:
    """Where the level of a raw series changes, noise and spikes taken care of; positions among the known values.

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
    return segment(bounded(known, scale), 3.0 * math.log(len(known)) if penalty is None else penalty, least)


@dataclass
class OnlineShift:
    """Bayesian online change points of the location (Adams and MacKay, 2007): Gaussian noise of deviation 1, levels drawn from a wide
    Gaussian, changes at a constant rate.

    Parameters
    ----------
    hazard
        Probability of a change at each value.
    wide
        Standard deviation of levels about 0.
    longest
        Run lengths kept; the rest of the probability stays in the longest.
    """

    hazard: float = 0.01
    wide: float = 10.0
    longest: int = 256

    def __post_init__(self) -> None:
        self.log_run = np.zeros(1)
        self.sums = np.zeros(1)
        self.lengths = np.zeros(1)

    def step(self, value: float) -> F64:
        """Take a value; probability of each run length 0, 1, 2... *before* it (0: the value begins a new level). NaN changes nothing."""
        if not math.isfinite(value):
            return np.asarray(np.exp(self.log_run))
        precision = 1.0 / self.wide**2 + self.lengths
        mean, variance = self.sums / precision, 1.0 + 1.0 / precision
        fits = -0.5 * (math.log(2 * math.pi) + np.log(variance) + (value - mean) ** 2 / variance)
        joint = self.log_run + fits
        joint -= special.logsumexp(joint)
        posterior = np.exp(joint)
        change = math.log(self.hazard)
        self.log_run = np.concatenate([[change], joint + math.log1p(-self.hazard)])
        self.sums = np.concatenate([[0.0], self.sums + value])
        self.lengths = np.concatenate([[0.0], self.lengths + 1.0])
        self._shorten()
        return np.asarray(posterior)

    def _shorten(self) -> None:
        if len(self.log_run) <= self.longest:
            return
        self.log_run[-2] = np.logaddexp(self.log_run[-2], self.log_run[-1])
        self.log_run, self.sums, self.lengths = self.log_run[:-1], self.sums[:-1], self.lengths[:-1]


def shift_probability(values: F64, since: int, hazard: float = 0.01) -> float:
    """Probability that the level changed within the last `since` values (in units of their noise).

    Examples
    --------
    >>> shift_probability(np.array([0.0] * 20 + [5.0] * 3), since=4) > 0.99
    True
    """
    online, posterior = OnlineShift(hazard), np.ones(1)
    for value in values.tolist():
        posterior = online.step(value)
    return float(posterior[:since].sum())
