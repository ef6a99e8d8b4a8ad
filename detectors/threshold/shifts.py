"""Level shifts and drifts of many series at once: two-sided CUSUM of clipped standardised residuals, calibrated on itself.

The statistic is Page's ("Continuous inspection schemes", Biometrika 1954), reflected at zero; with the slowly following place it is the
Page-Hinkley test. Its stationary tail is exponential (Lundberg's inequality for reflected random walks; Asmussen, "Applied probability
and queues"), at a rate that depends on the series' own noise and autocorrelation. So the mean of the statistic is tracked instead of
assuming independent Gaussian noise, and a risk gives the line: no series-specific constant.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.state import Array
from detectors.threshold.places import per_row

SLACK = 0.5
"""Drift of the walk in spreads per tick: half the smallest shift that is worth finding soon."""
_PRIOR_MEAN, _LEAST_MEAN = 2.0, 0.75
_GAIN, _YOUNG_TICKS = np.float32(0.001), np.float32(20.0)
_WINSOR = np.float32(3.0)
"""A statistic counts as at most three usual ones: a shift must not pass for usual while it is found."""
_MOST = np.float32(128.0)
"""The walk goes no further, so that it comes back soon after a long shift."""
LN10 = float(np.log(10.0))

F32 = NDArray[np.float32]


class Shifts(msgspec.Struct):
    """Statistic above (axis 0: 0) and below (1) for rows × columns series, and the mean it usually has."""

    walk: Array
    mean: Array

    @classmethod
    def of(cls, rows: int, columns: int) -> Shifts:
        """Statistics of series of which nothing is known yet."""
        return cls(np.zeros((2, rows, columns), np.float32), np.full((rows, columns), _PRIOR_MEAN, np.float32))

    def step(self, at: slice, standard: F32, known: F32 | None, age: F32, out: F32, scratch: F32) -> F32:
        """Take a tick of standardised residuals (0 where not known) into rows `at`; the larger statistic goes into `out`.

        `age` is that of each row in ticks: the usual statistic of young ones is learnt faster.
        """
        slack = np.float32(SLACK) if known is None else np.multiply(known, np.float32(SLACK), out=scratch)
        up, down, mean = self.walk[0, at], self.walk[1, at], self.mean[at]
        np.add(up, standard, out=up)
        np.subtract(up, slack, out=up)
        np.clip(up, np.float32(0.0), _MOST, out=up)
        np.subtract(down, standard, out=down)
        np.subtract(down, slack, out=down)
        np.clip(down, np.float32(0.0), _MOST, out=down)
        np.maximum(up, down, out=out)
        np.minimum(out, np.multiply(mean, _WINSOR, out=scratch), out=scratch)
        np.subtract(scratch, mean, out=scratch)
        np.multiply(scratch, per_row(np.maximum(_GAIN, 1.0 / (age + _YOUNG_TICKS))), out=scratch)
        np.add(mean, scratch, out=mean)
        np.maximum(mean, np.float32(_LEAST_MEAN), out=mean)
        return out

    def scores(self, at: slice, statistic: F32, out: F32) -> F32:
        """−log10 of the probability of a statistic as large, for all series of rows `at`."""
        np.divide(statistic, self.mean[at], out=out)
        return np.multiply(out, np.float32(1.0 / LN10), out=out)

    def beyond(self, at: slice, statistic: F32, risk: float, scratch: F32) -> NDArray[np.bool_]:
        """Which statistics of rows `at` are less likely than `risk`."""
        return np.asarray(statistic > np.multiply(self.mean[at], np.float32(-np.log(risk)), out=scratch))

    def score_of(self, row: Array, column: Array) -> tuple[Array, Array]:
        """Score and side (0 above, 1 below) of single series."""
        up, down = self.walk[0, row, column], self.walk[1, row, column]
        side = (down > up).astype(np.int64)
        return np.maximum(up, down) / (self.mean[row, column] * np.float32(LN10)), side


def statistic_at(score: float, mean: NDArray[Any]) -> NDArray[Any]:
    """The statistic that has this score; inverse of `Shifts.scores`.

    Examples
    --------
    >>> statistic_at(2.0, np.array([1.0])).round(3).tolist()
    [4.605]
    """
    return np.asarray(score * LN10 * mean)
