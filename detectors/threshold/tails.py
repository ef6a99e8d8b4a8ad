"""Extreme-value tails of many series at once: generalised Pareto excesses over a tracked quantile, fitted by L-moments.

Above a high quantile of (almost) any stationary series the excesses are generalised Pareto (Pickands 1975), which is how SPOT turns a
risk into a line (Siffer et al., "Anomaly detection in streams with extreme value theory", KDD 2017). SPOT fits by Grimshaw's trick, a
root search per series; here the fit is by probability-weighted moments (Hosking and Wallis, "Parameter and quantile estimation for the
generalized Pareto distribution", Technometrics 1987): closed form, so that thousands of series are refitted in one call, and unbiased
on small samples, so that batches of 16 excesses are averaged over time and over like series (Hosking and Wallis, "Regional frequency
analysis", 1997) instead of being kept.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.state import Array
from detectors.threshold.places import per_row

SHARE = 0.02
"""Share of points on either side of a series that lie beyond its tail's threshold (SPOT's 98 % quantile)."""
BATCH = 16
"""Excesses per fit."""
START_LEVEL, LEAST_LEVEL = 3.0, 1.0
_PRIOR_L1, _YOUNG_RATIO, _PRIOR_RATIO = 0.78, 0.506, 0.571
"""A tail of scale 0.7 in spreads. It is taken as nearly exponential while nothing is known, so that a young series has a line of some
use, and its shape is drawn towards 0.25 when the first excesses are: what few excesses say of a heavy tail is too little."""
_PRIOR_BATCHES, _RATIO_BATCHES = 1.0, 5.0
"""Weight of what is assumed, in batches: the size of excesses shows soon, the shape (ratio of L-moments) late."""
_MOST_BATCHES, _YOUNG_POOL = 64.0, 4.0
_SHAPE_LOW, _SHAPE_HIGH = 1e-3, 0.5
_LEVEL_GAIN, _YOUNG_GAIN, _YOUNG_TICKS = 0.02, 0.12, 500.0

F32 = NDArray[np.float32]


def l_moments(excesses: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """First two L-moments of each row, unbiased.

    Parameters
    ----------
    excesses
        series × n, all known, any order.

    Examples
    --------
    >>> l_moments(np.array([[1.0, 2.0, 3.0]]))
    (array([2.]), array([0.66666667]))
    """
    count = excesses.shape[1]
    ordered = np.sort(excesses, axis=1)
    first = ordered.mean(axis=1)
    weights = (2.0 * np.arange(count) / (count - 1) - 1.0).astype(ordered.dtype) / count
    return first, (ordered * weights).sum(axis=1)


def pareto_of(l1: NDArray[Any], l2: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scale and shape of the generalised Pareto law with these L-moments (shape > 0: heavy).

    The shape is kept between 0 and 0.5: a tail that ended so far is no promise that it ends.

    Examples
    --------
    >>> scale, shape = pareto_of(np.array([2.0]), np.array([1.2]))
    >>> scale.round(3).tolist(), shape.round(3).tolist()
    ([1.333], [0.333])
    """
    shape = np.clip(2.0 - l1 / np.maximum(l2, 1e-9), _SHAPE_LOW, _SHAPE_HIGH)
    return np.maximum(l1 * (1.0 - shape), 1e-6), shape


def survival(excess: NDArray[Any], scale: NDArray[Any], shape: NDArray[Any]) -> NDArray[Any]:
    """Log10 of the probability that an excess is larger than `excess` (≥ 0)."""
    return np.asarray(-np.log1p(shape * excess / scale) / (shape * np.log(10.0)))


def excess_at(log10_probability: NDArray[Any] | float, scale: NDArray[Any], shape: NDArray[Any]) -> NDArray[Any]:
    """Inverse of `survival`."""
    return np.asarray(scale / shape * np.expm1(-np.log(10.0) * shape * log10_probability))


class Tails(msgspec.Struct):
    """Both tails of rows × columns series, in units of their spread.

    Axis 0 is the side: 0 above, 1 below. `level` is the tracked quantile, `batch` holds excesses until there are `BATCH`, `l1` and `l2`
    the L-moments so far over `fits` batches, `pooled` the same over all rows of a column (with `alike`: rows of a column are like things,
    and a series with few excesses borrows from the others; without, it starts from a fixed law).
    """

    level: Array
    batch: Array
    filled: Array
    l1: Array
    l2: Array
    fits: Array
    pooled: Array
    alike: bool = False

    @classmethod
    def of(cls, rows: int, columns: int, alike: bool = False) -> Tails:
        """Tails of series of which nothing is known yet."""
        shape = (2, rows, columns)
        return cls(
            np.full(shape, START_LEVEL, np.float32), np.zeros((*shape, BATCH), np.float32), np.zeros(shape, np.uint8),
            np.full(shape, _PRIOR_L1, np.float32),
            np.full(shape, _PRIOR_L1 * _PRIOR_RATIO, np.float32), np.zeros(shape, np.float32), start_pool(columns),
            alike,
        )  # fmt: skip

    def sink(self, at: slice, age: F32, known: F32 | None) -> None:
        """Let the levels of rows `at` fall as they do when nothing is beyond them; `age` in ticks per row, `known` 0 or 1 per series."""
        decay = per_row(1.0 - gain_at(age) * np.float32(SHARE))
        for level in (self.level[0, at], self.level[1, at]):
            np.multiply(level, decay if known is None else 1.0 - (1.0 - decay) * known, out=level)
            np.maximum(level, np.float32(LEAST_LEVEL), out=level)

    def score(self, side: Array, row: Array, column: Array, height: Array) -> Array:
        """−log10 of the probability of a point as far out as `height` (spreads, at or above the level), both sides counted."""
        scale, shape = self.law(side, row, column)
        excess = np.maximum(height - self.levels(side, row, column), 0.0)
        return np.asarray(-np.log10(2.0 * SHARE) - survival(excess, scale, shape))

    def height(self, side: Array, row: Array, column: Array, risk: float) -> Array:
        """How far out (spreads) a point of the given risk lies; the line."""
        scale, shape = self.law(side, row, column)
        return np.asarray(
            self.levels(side, row, column) + excess_at(min(np.log10(risk / (2.0 * SHARE)), 0.0), scale, shape)
        )

    def levels(self, side: Array, row: Array, column: Array) -> Array:
        """The tracked quantiles of single series."""
        return np.asarray(self.level.reshape(-1).take(self._flat(side, row, column)))

    def _flat(self, side: Array, row: Array, column: Array) -> Array:
        """Numbers of single series and sides in the flattened arrays: one index is several times as quick as three."""
        _, rows, columns = self.level.shape
        return np.asarray((side * rows + row) * columns + column)

    def law(self, side: Array, row: Array, column: Array) -> tuple[Array, Array]:
        """Scale and shape in use: the series' own, drawn towards those of its column while it has few excesses."""
        at, column = self._flat(side, row, column), side * self.pooled.shape[2] + column
        fits, own1, own2 = (array.reshape(-1).take(at) for array in (self.fits, self.l1, self.l2))
        pool1, pool2, batches = (pooled.reshape(-1).take(column) for pooled in self.pooled)
        l1 = (fits * own1 + _PRIOR_BATCHES * pool1) / (fits + _PRIOR_BATCHES)
        young = (fits == 0) & (batches <= _YOUNG_POOL)
        assumed = np.where(young, _YOUNG_RATIO, pool2 / pool1)
        ratio = (fits * own2 / np.maximum(own1, 1e-9) + _RATIO_BATCHES * assumed) / (fits + _RATIO_BATCHES)
        return pareto_of(l1, ratio * l1)

    def add(self, side: Array, row: Array, column: Array, excess: Array, age: F32) -> None:
        """Take excesses in (each series and side at most once a call), raise their levels, refit the series whose batch is full."""
        at, level, filled = self._flat(side, row, column), self.level.reshape(-1), self.filled.reshape(-1)
        level[at] = level.take(at) * (1.0 + gain_at(age))
        slot = filled.take(at)
        self.batch.reshape(-1)[at * BATCH + slot] = excess
        filled[at] = slot + np.uint8(1)
        full = np.flatnonzero(slot == BATCH - 1)
        if len(full):
            self._fit(side[full], row[full], column[full])

    def _fit(self, side: Array, row: Array, column: Array) -> None:
        first, second = l_moments(self.batch[side, row, column])
        fits = self.fits[side, row, column]
        weight = 1.0 / (np.minimum(fits, np.float32(_MOST_BATCHES - 1)) + 1.0)
        self.l1[side, row, column] += weight * (first - self.l1[side, row, column])
        self.l2[side, row, column] += weight * (second - self.l2[side, row, column])
        self.fits[side, row, column] = fits + np.float32(1)
        self.filled[side, row, column] = 0
        if self.alike:
            self._pool(side, column, first, second)

    def _pool(self, side: Array, column: Array, first: Array, second: Array) -> None:
        """Average the new fits into their columns'; weights as if they had come one after another."""
        width = self.pooled.shape[2]
        place = side.astype(np.int64) * width + column
        for number, moment in enumerate((first, second)):
            count = np.bincount(place, minlength=2 * width).reshape(2, width)
            total = np.bincount(place, weights=moment, minlength=2 * width).reshape(2, width)
            before = np.minimum(self.pooled[2], 4 * _MOST_BATCHES)
            self.pooled[number] = (self.pooled[number] * before + total) / np.maximum(before + count, 1e-9)
        self.pooled[2] += count


def start_pool(columns: int) -> NDArray[np.float64]:
    """What is assumed of the tails of a column: (L1, L2, batches) × side × column."""
    pool = np.empty((3, 2, columns))
    pool[0], pool[1], pool[2] = _PRIOR_L1, _PRIOR_L1 * _PRIOR_RATIO, 1.0
    return pool


def gain_at(age: F32) -> F32:
    """How fast a level moves, relative per tick: faster while the series is young."""
    return np.where(age < _YOUNG_TICKS, np.float32(_YOUNG_GAIN), np.float32(_LEVEL_GAIN)).astype(np.float32)
