"""Series whose source is broken: values that stand still, counters that jump back, series that stop while others go on.

How long a series stands still in health is learnt per series: with repeats of probability p, a run of L repeats has probability p^L
(runs test; Wald and Wolfowitz 1940). A series that hardly ever moves has p near 1, so no run of it means anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.state import Array
from detectors.threshold.lines import row_blocks

F32 = NDArray[np.float32]
_BLOCK_SERIES = 32_768
_GAIN = np.float32(0.002)
_UNSURE = np.float32(0.02)
"""A repeat is taken to be at least this likely."""
_LEAST_RUN = 30.0
_LEAST_RISES, _FALLS_FORGOTTEN = 20.0, np.float32(0.9999)
_FALL_OF_A_COUNTER = 0.5
_TINY = np.float32(1e-30)


@dataclass(frozen=True)
class Broken:
    """Series found broken at a tick: `stuck`, `absent` and `reset` hold (row, column) pairs, the scores are −log10 p."""

    stuck: NDArray[np.int64]
    stuck_score: F32
    absent: NDArray[np.int64]
    absent_score: F32
    reset: NDArray[np.int64]


class Stillness(msgspec.Struct):
    """What is usual for rows × columns series: `repeats` and `gaps` are shares of ticks, `run` and `away` the present runs in ticks.

    `judged` counts the ticks behind `repeats`. `rises` and `falls` count moves up and down (falls are slowly forgotten): a series that
    only ever rose is a counter.
    """

    last: Array
    run: Array
    repeats: Array
    judged: Array
    away: Array
    gaps: Array
    rises: Array
    falls: Array

    @classmethod
    def of(cls, rows: int, columns: int) -> Stillness:
        """State of series of which nothing is known yet."""

        def filled(value: float) -> F32:
            return np.full((rows, columns), value, np.float32)

        return cls(filled(np.nan), filled(0), filled(1.0), filled(0), filled(0), filled(1.0), filled(0), filled(0))

    def step(self, values: F32, risk: float) -> Broken:
        """Take a tick in (rows × columns, NaN = missing) and say what is broken at this risk per run."""
        rows, columns = self.last.shape
        resets = [self._block(values[at], at) for at in row_blocks(rows, columns, _BLOCK_SERIES)]
        stuck, stuck_score = self._unlikely(self.run, self.repeats, risk)
        absent, absent_score = self._unlikely(self.away, self.gaps, risk)
        reset = np.concatenate(resets) if resets else np.zeros((0, 2), np.int64)
        return Broken(stuck, stuck_score, absent, absent_score, reset)

    def _block(self, values: F32, at: slice) -> NDArray[np.int64]:
        last = self.last[at]
        known = np.isfinite(values)
        change = values - last
        moved_up, moved_down = change > 0, change < 0
        same = change == 0
        self.run[at] *= ~(moved_up | moved_down)
        self.run[at] += same
        judged = same | moved_up | moved_down
        self.judged[at] += judged
        gain = judged * np.maximum(_GAIN, np.float32(1.0) / (self.judged[at] + np.float32(1.0)))
        self.repeats[at] += gain * (same - self.repeats[at])
        self.away[at] = (self.away[at] + 1) * ~known
        self.gaps[at] += _GAIN * (~known - self.gaps[at])
        resets = self._resets(values, last, moved_up, moved_down, at)
        np.copyto(last, values, where=known)
        return resets

    def _resets(
        self, values: F32, last: F32, up: NDArray[np.bool_], down: NDArray[np.bool_], at: slice
    ) -> NDArray[np.int64]:
        rises, falls = self.rises[at], self.falls[at]
        deep = down & (values < _FALL_OF_A_COUNTER * last) & (rises >= _LEAST_RISES) & (falls < 1.0)
        rises += up
        falls *= _FALLS_FORGOTTEN
        falls += down
        if not deep.any():
            return np.zeros((0, 2), np.int64)
        falls[deep] -= 1.0
        found = np.argwhere(deep)
        found[:, 0] += at.start
        return found

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return sum(getattr(self, name).nbytes for name in self.__struct_fields__)

    def grown(self, rows: int, columns: int) -> Stillness:
        """The same with more series, of which nothing is known yet."""
        fresh = Stillness.of(rows, columns)
        old_rows, old_columns = self.last.shape
        for name in self.__struct_fields__:
            getattr(fresh, name)[:old_rows, :old_columns] = getattr(self, name)
        return fresh

    def kept(self, rows: NDArray[np.bool_]) -> Stillness:
        """The same with these rows only."""
        return Stillness(*(getattr(self, name)[rows] for name in self.__struct_fields__))

    @staticmethod
    def _unlikely(run: F32, share: F32, risk: float) -> tuple[NDArray[np.int64], F32]:
        """Series in a run that is less likely than `risk`, with −log10 of its probability."""
        long = np.argwhere(run >= _LEAST_RUN)
        row, column = long[:, 0], long[:, 1]
        usual = np.clip(share[row, column], _UNSURE, 1.0)
        score = -run[row, column] * np.log10(usual)
        found = score > -np.log10(risk)
        return long[found], np.asarray(score[found], np.float32)
