"""Level shifts and drifts of many series at once: two-sided CUSUM of clipped standardised residuals, calibrated on itself.

The statistic is Page's ("Continuous inspection schemes", Biometrika 1954), reflected at zero; with the slowly following place it is the
Page-Hinkley test. Its stationary tail is exponential (Lundberg's inequality for reflected random walks; Asmussen, "Applied probability
and queues"), at a rate that depends on the series' own noise and autocorrelation. So the mean of the statistic is tracked instead of
assuming independent Gaussian noise, and a risk gives the line: no series-specific constant.

A slow series (a load average, a temperature) wanders, and comes back, a few times an hour: its usual statistic shows after many of these.
Its memory shows within minutes, and says how large the statistic will be: with a correlation of r from tick to tick the variance of sums,
and with it the mean of the statistic, is (1 + r) / (1 - r) times that of independent noise. The larger of what was seen and what the memory
makes likely counts, so the echo of work that has ended is no shift.
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
_LOOK_EVERY, _WINDOW_LOOKS = 4, 25
"""Pairs of neighbouring ticks are looked at every so many ticks, and the memory is that of so many of them."""
_MEMORY_GAIN, _MOST_MEMORY = np.float32(0.1), np.float32(0.99)
_MOST = np.float32(128.0)
"""The walk goes no further, so that it comes back soon after a long shift."""
LN10 = float(np.log(10.0))

F32 = NDArray[np.float32]


class Shifts(msgspec.Struct):
    """Statistic above (axis 0: 0) and below (1) for rows × columns series, and the mean it usually has.

    `memory` is the correlation of neighbouring residuals over the windows that closed: what happens now does not excuse itself. `before`
    is the first of a pair, `power` and `pairs` are the sums of squares and of products in the present window, which `tick` goes through.
    """

    walk: Array
    mean: Array
    memory: Array
    before: Array
    power: Array
    pairs: Array
    tick: int = 0

    @classmethod
    def of(cls, rows: int, columns: int) -> Shifts:
        """Statistics of series of which nothing is known yet."""
        memory, before, power, pairs = (np.zeros((rows, columns), np.float32) for _ in range(4))
        mean = np.full((rows, columns), _PRIOR_MEAN, np.float32)
        return cls(np.zeros((2, rows, columns), np.float32), mean, memory, before, power, pairs)

    def step(self, at: slice, standard: F32, known: F32 | None, age: F32, out: F32, scratch: F32) -> F32:
        """Take a tick of standardised residuals (0 where not known) into rows `at`; the larger statistic goes into `out`.

        `age` is that of each row in ticks: the usual statistic of young ones is learnt faster.
        """
        self._remember(at, standard, age, scratch)
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

    def pass_tick(self) -> None:
        """All rows have had their tick."""
        self.tick = (self.tick + 1) % (_LOOK_EVERY * _WINDOW_LOOKS)

    def _remember(self, at: slice, standard: F32, age: F32, scratch: F32) -> None:
        """Look at a pair of ticks now and then."""
        phase = self.tick % _LOOK_EVERY
        if phase == 0:
            np.copyto(self.before[at], standard)
        elif phase == 1:
            power, pairs = self.power[at], self.pairs[at]
            np.add(power, np.multiply(standard, standard, out=scratch), out=power)
            np.add(pairs, np.multiply(standard, self.before[at], out=scratch), out=pairs)
            if self.tick // _LOOK_EVERY == _WINDOW_LOOKS - 1:
                self._close(self.memory[at], power, pairs, age, scratch)

    def _close(self, memory: F32, power: F32, pairs: F32, age: F32, scratch: F32) -> None:
        windows = np.maximum(age, 1.0) / np.float32(_LOOK_EVERY * _WINDOW_LOOKS)
        np.divide(pairs, np.maximum(power, np.float32(1e-6), out=scratch), out=scratch)
        np.subtract(np.clip(scratch, np.float32(0.0), _MOST_MEMORY, out=scratch), memory, out=scratch)
        np.multiply(
            scratch, per_row(np.clip(1.0 / windows, _MEMORY_GAIN, np.float32(1.0)).astype(np.float32)), out=scratch
        )
        np.add(memory, scratch, out=memory)
        power[...], pairs[...] = 0.0, 0.0

    def usual(self, row: Array, column: Array) -> F32:
        """The statistic that single series usually have: what was seen, or what their memory makes likely."""
        memory = self.memory[row, column]
        return np.asarray(np.maximum(self.mean[row, column], _LEAST_MEAN * (1.0 + memory) / (1.0 - memory)), np.float32)

    def scores(self, at: slice, statistic: F32, out: F32) -> F32:
        """−log10 of the probability of a statistic as large, for all series of rows `at`."""
        np.divide(statistic, self.mean[at], out=out)
        return np.multiply(out, np.float32(1.0 / LN10), out=out)

    def beyond(self, at: slice, statistic: F32, risk: float, scratch: F32) -> NDArray[np.bool_]:
        """Which statistics of rows `at` are less likely than `risk` by what was seen; of these `usual` may say otherwise."""
        return np.asarray(statistic > np.multiply(self.mean[at], np.float32(-np.log(risk)), out=scratch))

    def score_of(self, row: Array, column: Array) -> tuple[Array, Array]:
        """Score and side (0 above, 1 below) of single series."""
        up, down = self.walk[0, row, column], self.walk[1, row, column]
        side = (down > up).astype(np.int64)
        return np.maximum(up, down) / (self.usual(row, column) * np.float32(LN10)), side


def statistic_at(score: float, mean: NDArray[Any]) -> NDArray[Any]:
    """The statistic that has this score; inverse of `Shifts.scores`.

    Examples
    --------
    >>> statistic_at(2.0, np.array([1.0])).round(3).tolist()
    [4.605]
    """
    return np.asarray(score * LN10 * mean)
