"""Series whose source is broken: values that stand still, counters that jump back, series that stop while others go on.

How long a series stands still in health is learnt per series: with repeats of probability p, a run of L repeats has probability p^L
(runs test; Wald and Wolfowitz 1940), p being that of a repeat after a repeat where those are likelier: a temperature in whole degrees
stands for a minute at a time. A series that hardly ever moves has p near 1, so no run of it means anything.
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
_REMEMBERED = np.float32(2000.0)
"""Counts are halved when there are so many looks: what is usual may change."""
_UNSURE = np.float32(0.02)
"""A repeat is taken to be at least this likely."""
_LEAST_RUN = 10.0
_DOUBTS = np.float32(4.0)
"""So many repeats are taken to have been followed by another as often as the fourth root says of how often there are any: a series that
repeats itself at all may come in steps."""
_LONGER = np.float32(2.5)
"""A run must be so many times as long as any before it: runs of what drifts slowly are longer than independent repeats are."""
_MOST_OF_COLUMN = 0.98
LOOK_EVERY = 4
"""Ticks between two looks at a series; a quarter of the rows is looked at each tick."""
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
    """What is usual for rows × columns series, in looks: how often each was `judged` and repeated itself (`repeats`), how often its row
    had `looks` and it was missing (`gaps`), its present runs of either (`run`, `away`), moves up and down (`rises`, `falls`; the latter
    slowly forgotten): a series that only ever rose is a counter. `begun` and `left` count the runs of repeats and of absence,
    `longest` is the longest run of repeats that ended.
    """

    last: Array
    run: Array
    repeats: Array
    judged: Array
    away: Array
    gaps: Array
    looks: Array
    rises: Array
    falls: Array
    begun: Array
    left: Array
    longest: Array

    @classmethod
    def of(cls, rows: int, columns: int) -> Stillness:
        """State of series of which nothing is known yet."""

        def filled(value: float) -> F32:
            return np.full((rows, columns), value, np.float32)

        return cls(filled(np.nan), *(filled(0) for _ in range(11)))

    def due(self, tick: int) -> slice:
        """Rows that are looked at in a tick."""
        rows, part = self.last.shape[0], tick % LOOK_EVERY
        return slice(rows * part // LOOK_EVERY, rows * (part + 1) // LOOK_EVERY)

    def step(self, values: F32, risk: float, due: slice) -> Broken:
        """Look at rows `due` of a tick (rows × columns, NaN = missing) and say what is broken in them at this risk per run."""
        blocks = row_blocks(due.stop - due.start, self.last.shape[1], _BLOCK_SERIES)
        ranges = [slice(due.start + at.start, due.start + at.stop) for at in blocks]
        resets = [self._block(values[at], at) for at in ranges]
        stuck, stuck_score = self._unlikely(due, risk, self.run, self.repeats, self.begun, self.judged)
        long = self._longer_than_any(stuck)
        stuck, stuck_score = stuck[long], stuck_score[long]
        absent, absent_score = self._unlikely(due, risk, self.away, self.gaps, self.left, self.looks)
        reset = np.concatenate(resets) if resets else np.zeros((0, 2), np.int64)
        return Broken(stuck, stuck_score, absent, absent_score, reset)

    def _block(self, values: F32, at: slice) -> NDArray[np.int64]:
        last = self.last[at]
        known = np.isfinite(values)
        change = values - last
        moved_up, moved_down = change > 0, change < 0
        same = change == 0
        moved = moved_up | moved_down
        run, away, judged, looks = self.run[at], self.away[at], self.judged[at], self.looks[at]
        longest = self.longest[at]
        np.maximum(longest, run, out=longest, where=moved)
        np.copyto(run, np.float32(0.0), where=moved)
        # adding flags to numbers converts them anew each time
        repeated = same.astype(np.float32)
        self.begun[at] += repeated * (run == 0)
        run += repeated
        self.repeats[at] += repeated
        judged += (same | moved).astype(np.float32)
        if known.all():
            away[:] = 0.0
        else:
            missing = ~known
            self.left[at] += missing & (away == 0)
            away += np.float32(1.0)
            np.copyto(away, np.float32(0.0), where=known)
            self.gaps[at] += missing
        looks += np.float32(1.0)
        _halved(judged, self.repeats[at], self.begun[at], longest)
        _halved(looks, self.gaps[at], self.left[at])
        resets = self._resets(values, last, moved_up, moved_down, at)
        np.copyto(last, values, where=known)
        return resets

    def _resets(
        self, values: F32, last: F32, up: NDArray[np.bool_], down: NDArray[np.bool_], at: slice
    ) -> NDArray[np.int64]:
        rises, falls = self.rises[at], self.falls[at]
        deep = down & (values < _FALL_OF_A_COUNTER * last) & (rises >= _LEAST_RISES) & (falls < 1.0)
        rises += up.astype(np.float32)
        falls *= _FALLS_FORGOTTEN
        falls += down.astype(np.float32)
        if not deep.any():
            return np.zeros((0, 2), np.int64)
        falls[deep] -= 1.0
        found = np.argwhere(deep)
        found[:, 0] += at.start
        return found

    def _longer_than_any(self, pairs: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which runs of repeats are far longer than those that ended, of the series and of most in its column."""
        row, column = pairs[:, 0], pairs[:, 1]
        usual = self.longest[row, column]
        for number in np.unique(column).tolist():
            like = np.quantile(self.longest[:, number], _MOST_OF_COLUMN)
            usual[column == number] = np.maximum(usual[column == number], like)
        return np.asarray(self.run[row, column] >= _LONGER * usual)

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
    def _unlikely(
        due: slice, risk: float, run: F32, times: F32, runs: F32, looks: F32
    ) -> tuple[NDArray[np.int64], F32]:
        """Series in a run that is less likely than `risk`, with −log10 of its probability; the run itself says nothing of what is usual.

        `times` says how often a series was in a run in so many `looks`, `runs` how many runs that were.
        """
        # a series that was in its run whenever it was looked at has no other usual: no run of it means anything
        now = run[due]
        row, column = np.divmod(np.flatnonzero((now >= _LEAST_RUN) & (now < looks[due])), run.shape[1])
        row += due.start
        length = run[row, column]
        before = np.maximum(times[row, column] - length, 0.0)
        usual = (before + 1.0) / (np.maximum(looks[row, column] - length, 0.0) + 1.0)
        again = np.maximum(before - np.maximum(runs[row, column] - 1.0, 0.0), 0.0)
        assumed = np.where(before > 0, np.sqrt(np.sqrt(usual)), usual)
        lasting = (again + _DOUBTS * assumed) / (before + _DOUBTS)
        score = -length * np.log10(np.clip(np.maximum(usual, lasting), _UNSURE, 1.0))
        found = score > -np.log10(risk)
        return np.column_stack((row[found], column[found])), np.asarray(score[found], np.float32)


def _halved(looks: F32, *counts: F32) -> None:
    """Halve the counts of series that were looked at often enough, in place."""
    if looks.size and looks.max() > _REMEMBERED:
        many = looks > _REMEMBERED
        for count in (looks, *counts):
            count[many] *= np.float32(0.5)
