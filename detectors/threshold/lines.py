"""A line for every series, online: usual place and spread, extreme-value tails and shifts of rows × columns series in one pass.

This is the scorer without frames, names or verdicts. Rows are things (nodes, devices) that have a load and a phase, columns their
metrics; a set of unrelated series is one column. Work is done in blocks of rows that fit the cache, in place, without temporaries that
grow with the number of series; only points beyond the 98 % quantile of their series (some percent) are looked at one by one, as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.state import Array, decode_state, encode_state
from detectors.threshold.places import CLIP, Ages, Places
from detectors.threshold.shifts import SLACK, Shifts
from detectors.threshold.tails import SHARE, Tails

F32 = NDArray[np.float32]
_BLOCK_SERIES = 49_152
"""Series per block: about ten float32 arrays of them stay within a core's second-level cache."""
_OPEN_WEIGHT = 0.2
_SHIFT_RISK = 1e-3
"""A point has to last for several ticks, a shift does not: its risk is this share of a point's."""
_SAID, _SILENT = 1, 2
_SHIFT_WARM = 10
"""Shifts need a place that is surer than points do: this many times the warm-up, also after work began or ended."""
_USUAL_OF_LIKE = 0.9
_LEVEL_SCORE = float(-np.log10(2.0 * SHARE))


@dataclass(frozen=True)
class LineSettings:
    """Settings of `Lines`.

    Attributes
    ----------
    risk
        Probability that a healthy point of a series passes its line, both sides together.
    warm_ticks
        Values of a series before it has a line.
    persist_ticks, calm_ticks
        Ticks in a row beyond the line before a series opens, and within it before it closes.
    forgetting
        Weight of a tick in the usual place and spread; an open series learns at a fifth of it, so that a lasting shift becomes usual.
    least_height
        Spreads that a point must be out at least, whatever its tail says.
    """

    risk: float = 1e-5
    warm_ticks: int = 30
    persist_ticks: int = 5
    calm_ticks: int = 5
    forgetting: float = 0.01
    least_height: float = 4.0


class LinesState(msgspec.Struct):
    """Everything that `Lines` knows; arrays have rows × columns (see the parts for theirs).

    `shifted` is 1 for series said to have shifted, 2 for those that were out, whose shift need not be said again, until the walk is 0.
    `idle` tells which rows rest (phase 0), `turning` for how many ticks they have done otherwise, `unsure` for how many no shift of
    theirs is judged.
    """

    places: Places
    tails: Tails
    shifts: Shifts
    weight: Array
    streak: Array
    calm: Array
    open: Array
    shifted: Array
    age: Array
    idle: Array
    turning: Array
    unsure: Array


@dataclass(frozen=True)
class Points:
    """Single points of a tick: all arrays have one entry per point.

    `side` is 0 above and 1 below, `height` in spreads, `score` −log10 of the probability of a point as far out.
    """

    row: NDArray[np.int64]
    column: NDArray[np.int64]
    side: NDArray[np.int64]
    height: F32
    score: F32


@dataclass(frozen=True)
class Readings:
    """What a tick showed.

    Attributes
    ----------
    beyond
        Points beyond their line.
    starts, ends
        (row, column) pairs whose series has been beyond its line for `persist_ticks` (again each tick until `Lines.open_at`), and
        those that closed.
    shifts, settled
        (row, column) pairs that are within their line but have lain to one side of their usual place for too long, and those that do
        so no more (the place followed, or they came back).
    scores, shift_scores
        Rows × columns, −log10 of the tail probability of the point and of the CUSUM; NaN where a series has no line yet or no value.
        None unless asked for.
    """

    beyond: Points
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    shifts: NDArray[np.int64]
    settled: NDArray[np.int64]
    scores: F32 | None = None
    shift_scores: F32 | None = None


class Lines:
    """Scorer of rows × columns series.

    Parameters
    ----------
    rows, columns
        Size; see `grow` and `keep`.
    floor
        Least spread, per column or for all, in units of the values. `relative` is the least spread as a share of the usual size.
    follows
        1 per column that load may explain, else 0.
    phases
        Number of phases that have a place of their own.
    alike
        Rows of a column are like things and share the law of their tail while they are young.
    """

    def __init__(self, rows: int, columns: int = 1, settings: LineSettings | None = None, *, floor: F32 | float = 1e-6,
                 relative: F32 | float = 0.0, follows: F32 | None = None, phases: int = 1, alike: bool = False) -> None:  # fmt: skip
        self.settings = settings or LineSettings()
        self.set_columns(columns, floor, relative, follows)
        self.state = LinesState(
            Places.of(rows, columns, phases, max(1.0 / self.settings.forgetting, float(_SHIFT_WARM * self.settings.warm_ticks))),
            Tails.of(rows, columns, alike), Shifts.of(rows, columns),
            np.full((rows, columns), self.settings.forgetting, np.float32), np.zeros((rows, columns), np.uint16),
            np.zeros((rows, columns), np.uint16), np.zeros((rows, columns), np.bool_),
            np.zeros((rows, columns), np.uint8), np.zeros(rows, np.float32), np.ones(rows, np.bool_), np.zeros(rows, np.int32),
            np.zeros(rows, np.int32),
        )  # fmt: skip
        self._scratch: list[F32] = []
        self._ages: tuple[LinesState | None, Ages] = (None, Ages())

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, columns."""
        rows, columns = self.state.places.spread.shape
        return int(rows), int(columns)

    def set_columns(self, columns: int, floor: F32 | float, relative: F32 | float, follows: F32 | None) -> None:
        """Say what the columns are (see the class)."""
        self._floor = np.broadcast_to(np.asarray(floor, np.float32), columns)
        self._relative = np.broadcast_to(np.asarray(relative, np.float32), columns)
        self._follows = None if follows is None else np.asarray(follows, np.float32)
        self._broad: tuple[F32, F32] | None = None

    def step(self, values: F32, load: F32 | None = None, phase: Array | None = None, common: F32 | None = None,
             dense: bool = False) -> Readings:  # fmt: skip
        """Judge one tick by what was known before it, then learn from it.

        Parameters
        ----------
        values
            Rows × columns (or rows, with one column), NaN = missing.
        load, phase
            Per row; None or NaN = not known, phase 0.
        common
            Rows × columns: what like series do at this moment beyond what is expected of them; a point is out only by what neither its
            history nor this explains.
        dense
            Also give the scores of all series.
        """
        rows, columns = self.shape
        grid = np.asarray(values, np.float32).reshape(rows, columns)
        phases = np.zeros(rows, np.int64) if phase is None else np.asarray(phase, np.int64)
        loads = None if load is None else np.asarray(load, np.float32)
        scores = np.full((2, rows, columns), np.nan, np.float32) if dense else None
        self._drifting: list[NDArray[np.int64]] = []
        self._follow_activity(phases)
        if self._ages[0] is not self.state:
            self._ages = self.state, Ages()
        found = [
            self._block(grid, loads, phases, common, at, scores) for at in row_blocks(rows, columns, _BLOCK_SERIES)
        ]
        beyond = self._outside(_joined(found))
        starts, ends = self._streaks(beyond, grid)
        shifts, settled = self._shifts()
        self.state.age += 1
        self.state.shifts.pass_tick()
        self._ages[1].tick += 1
        return Readings(
            beyond,
            starts,
            ends,
            shifts,
            settled,
            None if scores is None else scores[0],
            None if scores is None else scores[1],
        )

    def expected(
        self, at: Array, load: F32 | None = None, phase: Array | None = None, columns: Array | None = None
    ) -> F32:
        """Where the series of rows `at` (and, if given, of some columns) should lie now, rows × columns."""
        phases = np.zeros(len(at), np.int64) if phase is None else np.asarray(phase, np.int64)
        loads = None if load is None else np.asarray(load, np.float32)
        follows = self._follows if self._follows is None or columns is None else self._follows[columns]
        return self.state.places.expected(at, phases, loads, follows, columns)

    def breadth(self, at: Array, columns: Array | None = None) -> F32:
        """Spread of the series of rows `at` (and, if given, of some columns), with its floors, rows × columns."""
        pick, some = (at, slice(None)) if columns is None else (np.ix_(at, columns), columns)
        least = np.maximum(self.state.places.size[pick] * self._relative[some], self._floor[some])
        return np.asarray(np.maximum(least, self.state.places.spread[pick]), np.float32)

    def warm(self) -> NDArray[np.bool_]:
        """Which series have a line, rows × columns."""
        return np.asarray(self.state.places.seen >= self.settings.warm_ticks)

    def heights(self, row: Array, column: Array) -> tuple[Array, Array]:
        """The lines of single series above and below what is expected, in spreads."""
        risk, least = self.settings.risk, self.settings.least_height
        up = self.state.tails.height(np.zeros_like(row), row, column, risk)
        down = self.state.tails.height(np.ones_like(row), row, column, risk)
        return np.maximum(up, least), np.maximum(down, least)

    def shift_line(self, rows: Array, column: int) -> F32:
        """The walks at which series of a column count as shifted."""
        return np.asarray(self.state.shifts.mean[rows, column] * np.float32(-np.log(_SHIFT_RISK * self.settings.risk)))

    def apart_without_load(self, pairs: NDArray[np.int64], values: F32, phase: Array) -> NDArray[np.bool_]:
        """Which of these shifts, (row, column), lie to their side of the place itself, whatever the load: it may excuse, never accuse.

        A slope that was learnt while jobs ran and rested says that a series must move with its node's load; when something else takes the
        processor it need not, and has not shifted. `values` are all of the tick, `phase` is per row.
        """
        row, column = pairs[:, 0], pairs[:, 1]
        _, below = self.state.shifts.score_of(row, column)
        places = self.state.places
        place = places.place[row, np.clip(phase[row], 0, places.place.shape[1] - 1), column]
        least = np.maximum(places.size[row, column] * self._relative[column], self._floor[column])
        away = (values[row, column] - place) / np.maximum(least, places.spread[row, column])
        return np.asarray(~(np.where(below, -away, away) <= SLACK))

    def keep_silent(self, pairs: NDArray[np.int64]) -> None:
        """Say that these shifts, (row, column), need not be said, nor that they are over."""
        self.state.shifted[pairs[:, 0], pairs[:, 1]] = _SILENT

    def spread(self, row: int) -> F32:
        """Spread of the series of one row, with its floors."""
        out = np.empty((1, self.shape[1]), np.float32)
        self.state.places.breadth(slice(row, row + 1), self._floor, self._relative, out)
        return out.reshape(-1)

    def open_at(self, row: int, column: int) -> None:
        """Say that a series counts as beyond its line until it was calm for a while; it learns slowly meanwhile."""
        self.state.open[row, column] = True
        if not self.state.shifted[row, column]:
            self.state.shifted[row, column] = _SILENT
        self.state.weight[row, column] = self.settings.forgetting * _OPEN_WEIGHT

    def snapshot(self) -> bytes:
        """Complete state."""
        return encode_state(self.state)

    def restore(self, payload: bytes) -> None:
        """Take over a snapshot of a scorer with the same settings."""
        self.state = decode_state(payload, LinesState)

    @property
    def state_bytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for part in (self.state, self.state.places, self.state.tails, self.state.shifts)
                   for array in msgspec.structs.asdict(part).values() if isinstance(array, np.ndarray)) + sum(
                   array.nbytes for array in self._scratch)  # fmt: skip

    # --- one block of rows ---------------------------------------------------------------------------------------------------

    def _buffers(self, shape: tuple[int, int]) -> list[F32]:
        if not self._scratch or self._scratch[0].shape[0] < shape[0] or self._scratch[0].shape[1] != shape[1]:
            self._scratch = [np.empty(shape, np.float32) for _ in range(7)]
        return [array[: shape[0]] for array in self._scratch]

    def _wide(self, rows: int) -> tuple[F32, F32]:
        """Least spreads, and those as a share of the size, repeated for each row: a row that numpy repeats costs three times as much."""
        if self._broad is None or len(self._broad[0]) < rows:
            self._broad = np.tile(self._floor, (rows, 1)), np.tile(self._relative, (rows, 1))
        return self._broad[0][:rows], self._broad[1][:rows]

    def _block(
        self, grid: F32, loads: F32 | None, phases: Array, common: F32 | None, at: slice, scores: F32 | None
    ) -> Points:
        state, places = self.state, self.state.places
        values, phase, load = grid[at], phases[at], None if loads is None else loads[at]
        residual, spread, height, mask, clipped, one, two = self._buffers((values.shape[0], values.shape[1]))
        places.expect(at, phase, load, self._follows, one, two, self._ages[1])
        np.subtract(values, one, out=residual)
        known = _blank(residual, mask)
        places.breadth(at, *self._wide(values.shape[0]), spread)
        unexplained = residual if common is None else _unexplained(residual, common[at], height, one, two)
        np.divide(unexplained, spread, out=height)
        points = self._points(at, height, known, two, scores is not None)
        np.clip(height, np.float32(-CLIP), np.float32(CLIP), out=one)
        statistic = state.shifts.step(at, one, known, state.age[at], clipped, two)
        far = state.shifts.beyond(at, statistic, _SHIFT_RISK * self.settings.risk, two)
        self._drifting.append(np.flatnonzero(far) + at.start * values.shape[1])
        if scores is not None:
            self._dense(at, height, known, statistic, points, scores)
        np.multiply(spread, np.float32(CLIP), out=spread)
        np.minimum(residual, spread, out=clipped)
        np.maximum(clipped, np.negative(spread, out=spread), out=clipped)
        if known is not None:
            values = np.where(known > 0, values, np.float32(0.0))
        places.learn(
            at, values, residual, clipped, known, state.weight[at], self.settings.forgetting, phase, load, (one, two),
            self._ages[1],
        )  # fmt: skip
        return points

    def _points(self, at: slice, height: F32, known: F32 | None, scratch: F32, dense: bool) -> Points:
        """Points of the block beyond their tail's threshold (`dense`) or far enough out to be beyond their line; the tails learn."""
        tails, seen, age = self.state.tails, self.state.places.seen[at], self.state.age[at]
        warm = self.settings.warm_ticks
        young = not seen.size or not self._ages[1].reached(("seen", at.start, 0), seen, warm)
        over = height > tails.level[0, at]
        over |= np.negative(height, out=scratch) > tails.level[1, at]
        counts = np.multiply(1.0 if known is None else known, seen >= warm, out=scratch) if young else known
        tails.sink(at, age, counts)
        places = np.flatnonzero(over)
        if counts is not None:
            places = places[counts.reshape(-1).take(places) > 0]
        row, column = np.divmod(places, height.shape[1])
        signed = height.reshape(-1).take(places)
        side, size, ages = (signed < 0).astype(np.int64), np.abs(signed), age[row]
        row = row + at.start
        far = np.arange(len(size)) if dense else np.flatnonzero(size >= self.settings.least_height)
        score = tails.score(side[far], row[far], column[far], size[far]).astype(np.float32)
        points = Points(row[far], column[far], side[far], size[far], score)
        out = np.zeros(len(size), np.bool_)
        out[far] = (score > -np.log10(self.settings.risk)) & (size[far] >= self.settings.least_height)
        self._learn_tails(side, row, column, size, out, ages)
        return points

    def _learn_tails(self, side: Array, row: Array, column: Array, size: F32, out: Array, age: F32) -> None:
        """A point beyond the line counts as lying on it, and only the first of its streak: a fault must not widen its own line."""
        state, at = self.state, row * self.shape[1] + column
        use = ~state.open.reshape(-1).take(at) & (~out | (state.streak.reshape(-1).take(at) == 0))
        side, row, column, size, out = side[use], row[use], column[use], size[use], out[use]
        if out.any():
            line = state.tails.height(side[out], row[out], column[out], self.settings.risk)
            size[out] = np.minimum(size[out], np.maximum(line, self.settings.least_height))
        excess = np.maximum(size - state.tails.levels(side, row, column), 0.0)
        state.tails.add(side, row, column, excess.astype(np.float32), age[use])

    def _dense(self, at: slice, height: F32, known: F32 | None, statistic: F32, points: Points, scores: F32) -> None:
        tails, start = self.state.tails, at.start or 0
        level = np.where(height > 0, tails.level[0, at], tails.level[1, at])
        body = np.abs(height) * (_LEVEL_SCORE / level)
        body[points.row - start, points.column] = points.score
        none = self.state.places.seen[at] < self.settings.warm_ticks
        if known is not None:
            none |= known == 0
        scores[0, at] = np.where(none, np.nan, body)
        scores[1, at] = np.where(none, np.nan, self.state.shifts.scores(at, statistic, np.empty_like(statistic)))

    def _outside(self, points: Points) -> Points:
        out = (points.score > -np.log10(self.settings.risk)) & (points.height >= self.settings.least_height)
        return Points(points.row[out], points.column[out], points.side[out], points.height[out], points.score[out])

    # --- streaks -------------------------------------------------------------------------------------------------------------

    def _streaks(self, beyond: Points, grid: F32) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        state, settings = self.state, self.settings
        columns = self.shape[1]
        out_now = beyond.row * columns + beyond.column
        streak, calm, is_open = state.streak.reshape(-1), state.calm.reshape(-1), state.open.reshape(-1)
        watched = np.union1d(out_now, np.flatnonzero((streak != 0) | is_open))
        out = np.isin(watched, out_now, assume_unique=True)
        known = np.isfinite(grid.reshape(-1)[watched])
        before, quiet = streak[watched], calm[watched]
        streak[watched] = np.where(out, np.minimum(before, 65_000) + 1, np.where(known, 0, before))
        calm[watched] = np.where(out, 0, np.minimum(quiet, 65_000) + known)
        starts = watched[(streak[watched] >= settings.persist_ticks) & ~is_open[watched]]
        ends = watched[is_open[watched] & (calm[watched] >= settings.calm_ticks)]
        is_open[ends] = False
        state.weight.reshape(-1)[ends] = settings.forgetting
        return np.column_stack(np.divmod(starts, columns)), np.column_stack(np.divmod(ends, columns))

    def _follow_activity(self, phases: Array) -> None:
        """Shifts are judged against a place that is sure. Where work begins or ends, place and slope on load are learnt anew for a while,
        and what lies to one side of them meanwhile says so of them."""
        state, other = self.state, (phases == 0) != self.state.idle
        if state.unsure.any():
            state.shifts.walk[:, state.unsure == 1] = 0.0
            np.maximum(state.unsure - 1, 0, out=state.unsure)
        if not other.any() and not state.turning.any():
            return
        # a node that is late is not idle
        state.turning = np.where(other, state.turning + 1, 0).astype(np.int32)
        turned = state.turning >= self.settings.persist_ticks
        state.idle ^= turned
        state.unsure[turned], state.turning[turned] = _SHIFT_WARM * self.settings.warm_ticks, 0

    def _shifts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shifts that begin and end; a series whose points are out says so already."""
        state, columns = self.state, self.shape[1]
        far = np.concatenate(self._drifting) if self._drifting else np.zeros(0, np.int64)
        row, column = np.divmod(far, columns)
        old = state.places.seen[row, column] >= _SHIFT_WARM * self.settings.warm_ticks
        old &= state.unsure[row] == 0
        new = old & (state.shifted[row, column] == 0) & ~state.open[row, column] & (state.streak[row, column] == 0)
        if new.any():
            new[new] = self._far_from_usual(row[new], column[new])
        state.shifted[row[new], column[new]] = _SAID
        held = np.column_stack(np.divmod(np.flatnonzero(state.shifted), columns))
        back = held[(state.shifts.walk[:, held[:, 0], held[:, 1]] == 0).all(axis=0)]
        said = state.shifted[back[:, 0], back[:, 1]] == _SAID
        state.shifted[back[:, 0], back[:, 1]] = 0
        return np.column_stack((row[new], column[new])), back[said]

    def _far_from_usual(self, row: Array, column: Array) -> NDArray[np.bool_]:
        """Which walks are too long for the series' memory and for like series: what is usual of slow ones shows late, then in some."""
        shifts, lengths = self.state.shifts, np.float32(-np.log(_SHIFT_RISK * self.settings.risk))
        walk = shifts.walk[:, row, column].max(axis=0)
        far = walk > shifts.usual(row, column) * lengths
        for number in np.unique(column[far]).tolist() if self.state.tails.alike else ():
            like = np.float32(np.quantile(shifts.mean[:, number], _USUAL_OF_LIKE))
            far &= (column != number) | (walk > like * lengths)
        return np.asarray(far)

    # --- size ----------------------------------------------------------------------------------------------------------------

    def grow(self, rows: int, columns: int) -> None:
        """Add series of which nothing is known yet, up to this size; say what new columns are by `set_columns`."""
        old_rows, old_columns = self.shape
        fresh = Lines(
            rows, columns, self.settings, phases=self.state.places.place.shape[1], alike=self.state.tails.alike
        )
        for target, source in zip(_parts(fresh.state), _parts(self.state), strict=True):
            for name in source.__struct_fields__:
                old, new = getattr(source, name), getattr(target, name)
                if isinstance(old, np.ndarray):
                    _paste(name, new, old, old_rows, old_columns)
        fresh.state.shifts.tick = self.state.shifts.tick
        self.state, self._scratch, self._ages = fresh.state, [], (None, Ages())

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Forget all rows but these."""
        for part in _parts(self.state):
            for name in part.__struct_fields__:
                old = getattr(part, name)
                if isinstance(old, np.ndarray) and name != "pooled":
                    axis = 1 if isinstance(part, Tails) or name == "walk" else 0
                    setattr(part, name, np.ascontiguousarray(np.compress(rows, old, axis=axis)))
        self._scratch, self._ages = [], (None, Ages())


def row_blocks(rows: int, columns: int, series: int) -> list[slice]:
    """Slices of rows with about `series` series each.

    Examples
    --------
    >>> row_blocks(5, 10, 20)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, series // max(columns, 1))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _parts(state: LinesState) -> tuple[msgspec.Struct, ...]:
    return state, state.places, state.tails, state.shifts


def _paste(name: str, new: Array, old: Array, rows: int, columns: int) -> None:
    """Put what is known into the larger array: sides lead in tails and walks, pooled laws have no rows, loads and ages no columns."""
    if name == "pooled":
        new[:, :, :columns] = old
    elif name in {"level", "batch", "filled", "l1", "l2", "fits", "walk"}:
        new[:, :rows, :columns] = old
    elif name in {"place", "placed"}:
        new[:rows, :, :columns] = old
    elif old.ndim == 1:
        new[:rows] = old
    else:
        new[:rows, :columns] = old


def _blank(residual: F32, mask: F32) -> F32 | None:
    """Put 0 where a residual is not known; `mask` with 1 where it is, None when all are."""
    finite = np.isfinite(residual)
    if finite.all():
        return None
    np.copyto(mask, finite)
    np.copyto(residual, np.float32(0.0), where=~finite)
    return mask


def _unexplained(residual: F32, common: F32, out: F32, one: F32, two: F32) -> F32:
    """What neither history nor peers explain: the smaller of both residuals, 0 when they disagree in direction."""
    np.subtract(residual, common, out=one)
    np.minimum(residual, one, out=two)
    np.maximum(residual, one, out=one)
    np.maximum(two, np.float32(0.0), out=out)
    np.minimum(one, np.float32(0.0), out=one)
    return np.add(out, one, out=out)


def _joined(found: list[Points]) -> Points:
    if not found:
        none = np.zeros(0, np.int64)
        return Points(none, none, none, np.zeros(0, np.float32), np.zeros(0, np.float32))
    return Points(*(np.concatenate([getattr(part, name) for part in found])
                    for name in ("row", "column", "side", "height", "score")))  # fmt: skip
