"""Usual place and spread of many series at once: robust, with forgetting, given each row's phase and load.

The place is a stochastic M-estimate: an exponentially forgetting mean of residuals clipped at three spreads (Huber 1964; the recursive
form is that of Martin and Masreliez, "Robust estimation via stochastic approximation", 1975), one per phase. The spread is the forgetting
mean absolute deviation of the same residuals. What the load explains is taken out first by a forgetting least-squares slope.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.state import Array

PHASES = 3
"""Bins of a row's activity: idle or starting, training, anything else (evaluation, save)."""
CLIP = 3.0
"""Residuals beyond so many spreads count as this many."""
_MEAN_DEVIATION_TO_SIGMA = 1.2533
_YOUNG = 4.0
_LOAD_GAIN, _RIDGE, _LEAST_LOAD_VARIANCE = 0.01, 0.1, 1e-3
_SLOPE_TICKS = 50.0
"""A slope is learnt as if so many ticks had shown none: what the first ticks say of it is mostly noise."""
_SIZE_FORGOTTEN = 1e-3

F32 = NDArray[np.float32]


class Ages:
    """Whether counts that grow by one a tick at most have all reached a number: arrays are asked only when the answer may have changed."""

    def __init__(self) -> None:
        self.tick = 0
        self._least: dict[tuple[str, int, int], tuple[float, int]] = {}
        self._same: dict[tuple[str, int, int], tuple[int, float]] = {}

    def reached(self, what: tuple[str, int, int], times: F32, number: float) -> bool:
        """Whether all of `times` are `number` or more. `what` names them: which counts, first row, phase."""
        least, at = self._least.get(what, (-1.0, self.tick))
        if least >= number:
            return True
        if least >= 0 and least + (self.tick - at) < number:
            return False
        least = float(times.min()) if times.size else np.inf
        self._least[what] = least, self.tick
        return least >= number

    def same(self, what: tuple[str, int, int], times: F32) -> float | None:
        """The one count that all of `times` have, None when they differ; looked for only where `counted` did not say it a tick ago."""
        tick, count = self._same.get(what, (-1, 0.0))
        if tick == self.tick:
            return count
        return float(times[0, 0]) if times.size and times.min() == times.max() else None

    def counted(self, what: tuple[str, int, int], count: float) -> None:
        """Note the one count that these have from the next tick on."""
        self._same[what] = self.tick + 1, count


class Places(msgspec.Struct):
    """Place, spread and slope of rows × columns series, float32.

    `place` and `placed` (how often, up to `most`, where counts no longer matter) are rows × phases × columns. `size` is the largest place
    of late; `cov` and, per row, `load_var` and `load_mean` give the slope on load.
    """

    place: Array
    placed: Array
    spread: Array
    seen: Array
    size: Array
    cov: Array
    load_var: Array
    load_mean: Array
    load_seen: Array
    most: float = 1000.0

    @classmethod
    def of(cls, rows: int, columns: int, phases: int = PHASES, most: float = 1000.0) -> Places:
        """Places of series of which nothing is known yet."""

        def zeros(*shape: int) -> F32:
            return np.zeros(shape, np.float32)

        return cls(
            zeros(rows, phases, columns), zeros(rows, phases, columns), zeros(rows, columns), zeros(rows, columns),
            zeros(rows, columns), zeros(rows, columns), zeros(rows), zeros(rows), zeros(rows), most,
        )  # fmt: skip

    def expected(
        self, at: Array, phase: Array, load: F32 | None, follows: F32 | None, columns: Array | None = None
    ) -> F32:
        """Where some rows (by number), of all or some columns, should lie: as `expect`, without moving anything. `follows` is of these
        columns."""
        of: tuple[Any, ...] = (at,)
        phases = np.clip(phase, 0, self.place.shape[1] - 1)
        row: tuple[Any, ...] = (at, phases)
        if columns is not None:
            of, row = (at[:, None], columns), (at[:, None], phases[:, None], columns)
        out, placed = np.asarray(self.place[row], np.float32), self.placed[row]
        if placed.size and float(placed.min()) < 1.0:
            self._from_other_phases(at, (placed == 0.0) & (self.seen[of] > 0.0), out, columns)
        if load is None:
            return out
        moved = self.cov[of] * self._load_factor(at, load)[:, None]
        if follows is not None and not follows.all():
            np.multiply(moved, follows, out=moved)
        return np.asarray(np.add(out, moved, out=out))

    def expect(self, at: slice, phase: Array, load: F32 | None, follows: F32 | None, out: F32, scratch: F32,
               ages: Ages | None = None) -> F32:  # fmt: skip
        """Where rows `at` should lie, into `out`.

        Parameters
        ----------
        phase, load
            Per row; load NaN or None = not known, nothing is explained by it.
        follows
            1 per column that load may explain, 0 otherwise; None = all.
        ages
            What is remembered of how old rows `at` are, if they are always the same.
        """
        place, placed = _picked(self.place[at], phase), _picked(self.placed[at], phase)
        if not _reached(ages, _placed_in(at, phase), placed, 1.0):
            np.copyto(out, place)
            self._from_other_phases(at, (placed == 0.0) & (self.seen[at] > 0.0), out)
            place = out
        if load is not None:
            np.multiply(self.cov[at], self._load_factor(at, load)[:, None], out=scratch)
            if follows is not None and not follows.all():
                np.multiply(scratch, follows, out=scratch)
            return np.add(place, scratch, out=out)
        if place is not out:
            np.copyto(out, place)
        return out

    def _load_factor(self, at: slice | Array, load: F32) -> F32:
        factor = _known(load - self.load_mean[at]) / np.maximum(self.load_var[at], _LEAST_LOAD_VARIANCE)
        return np.asarray(factor, np.float32)

    def _from_other_phases(
        self, at: slice | Array, unplaced: NDArray[np.bool_], out: F32, columns: Array | None = None
    ) -> None:
        """A phase never seen is expected to be like the others, weighted by how often they were. Series that never reported have no other
        (their place is 0 as it is), and there are many: they need not be `unplaced`."""
        row, column = np.nonzero(unplaced)
        rows = row + (at.start or 0) if isinstance(at, slice) else at[row]
        of = column if columns is None else columns[column]
        times = self.placed[rows, :, of]
        out[row, column] = (self.place[rows, :, of] * times).sum(axis=1) / np.maximum(times.sum(axis=1), 1e-9)

    def breadth(self, at: slice, floor: F32, relative: F32, out: F32) -> F32:
        """Spread of rows `at` with its floors, into `out`: no series is steadier than its unit (`floor`, per column) or size allows."""
        np.multiply(self.size[at], relative, out=out)
        np.maximum(out, floor, out=out)
        return np.maximum(out, self.spread[at], out=out)

    def learn(self, at: slice, values: F32, residual: F32, clipped: F32, known: F32 | None, weight: F32, usual_weight: float,
              phase: Array, load: F32 | None, scratch: tuple[F32, F32], ages: Ages | None = None) -> None:  # fmt: skip
        """Move rows `at` towards the newest values.

        Parameters
        ----------
        values, residual, clipped
            Newest values, what is left of them, and the latter within ± `CLIP` spreads; 0 where not known.
        known
            1 or 0 per series, None = all known; `weight` is the gain per series once it is old, `usual_weight` that of most.
        """
        gain, step = scratch
        seen, rows = self.seen[at], at.start or 0
        if not _reached(ages, ("seen", rows, 0), seen, _YOUNG):
            np.copyto(clipped, residual, where=seen < _YOUNG)
        place, placed = _picked(self.place[at], phase), _picked(self.placed[at], phase)
        key = _placed_in(at, phase)
        old = _reached(ages, key, placed, self.most)
        same = None if old or known is not None else _same(ages, key, placed)
        usual = self._aged_gain(placed, weight, usual_weight, known, gain, old, same)
        np.multiply(usual, clipped, out=step)
        if key is None or (usual is gain and not _reached(ages, key, placed, 1.0)):
            np.add(place, step, out=step)
            np.copyto(step, values, where=placed == 0.0)
            _put(self.place[at], phase, step)
            place = step
        else:
            np.add(place, step, out=place)
        size = self.size[at]
        np.multiply(size, np.float32(1.0 - _SIZE_FORGOTTEN), out=size)
        np.maximum(size, np.abs(place, out=step), out=size)
        if usual is gain:
            self._count(placed, known, step, same, ages, key)
            if key is None:
                _put(self.placed[at], phase, placed)
        self._learn_spread(at, clipped, known, weight, usual_weight, (gain, step), ages, same)
        if load is not None:
            self._learn_load(at, clipped, load, step)

    def _learn_spread(self, at: slice, clipped: F32, known: F32 | None, weight: F32, usual_weight: float, scratch: tuple[F32, F32],
                      ages: Ages | None, gained: float | None) -> None:  # fmt: skip
        """Move the spreads of rows `at`. `gained` is the count that the gain in `scratch` is that of, if it is that of one."""
        (gain, step), seen, spread, key = scratch, self.seen[at], self.spread[at], ("seen", at.start or 0, 0)
        old, known_once = _reached(ages, key, seen, self.most), _reached(ages, key, seen, 1.0)
        same = None if old or known is not None else _same(ages, key, seen)
        usual = (
            gain
            if same is not None and same == gained
            else self._aged_gain(seen, weight, usual_weight, known, gain, old, same)
        )
        np.multiply(np.abs(clipped, out=step), np.float32(_MEAN_DEVIATION_TO_SIGMA), out=step)
        np.subtract(step, spread, out=step)
        np.multiply(step, usual, out=step)
        if usual is gain and not known_once:
            np.copyto(step, np.float32(0.0), where=seen < 1.0)
        np.add(spread, step, out=spread)
        if usual is gain:
            self._count(seen, known, step, same, ages, key)

    def _aged_gain(self, times: F32, weight: F32, usual_weight: float, known: F32 | None, out: F32, old: bool,
                   same: float | None) -> F32:  # fmt: skip
        """weight · max(1, 1 / (usual weight · (times + 1))) where known: a plain mean at first, forgetting later.

        In `out`, or `weight` itself when all series are known and `old`. `same` is the one count that all have, if they are known and do.
        """
        if known is None and old:
            return weight
        if same is not None:
            one = np.array([same], np.float32)
            return np.multiply(weight, _aging(one, usual_weight, one), out=out)
        np.multiply(_aging(times, usual_weight, out), weight, out=out)
        return out if known is None else np.multiply(out, known, out=out)

    def _count(self, times: F32, known: F32 | None, out: F32, same: float | None, ages: Ages | None,
               key: tuple[str, int, int] | None) -> None:  # fmt: skip
        """Add what was known to `times`, in place; `same` is the one count that they have, if they do."""
        if same is None:
            np.add(times, np.float32(1.0) if known is None else known, out=out)
            np.minimum(out, np.float32(self.most), out=times)
            return
        count = min(same + 1.0, self.most)
        times[...] = count
        if ages is not None and key is not None:
            ages.counted(key, count)

    def _learn_load(self, at: slice, clipped: F32, load: F32, step: F32) -> None:
        shift = _known(load - self.load_mean[at])
        self.load_seen[at] += np.isfinite(load)
        pace = np.maximum(np.float32(_LOAD_GAIN), 1.0 / (self.load_seen[at] + 1.0)).astype(np.float32)
        slow = np.maximum(np.float32(_LOAD_GAIN), 1.0 / (self.load_seen[at] + _SLOPE_TICKS)).astype(np.float32)
        cov = self.cov[at]
        np.multiply(clipped, (shift * slow)[:, None], out=step)
        np.multiply(cov, per_row((1.0 - _RIDGE * slow).astype(np.float32)), out=cov)
        np.add(cov, step, out=cov)
        self.load_var[at] += pace * (shift * shift - self.load_var[at])
        self.load_mean[at] += pace * shift


def _aging(times: F32, usual_weight: float, out: F32) -> F32:
    """max(1, 1 / (usual weight · (times + 1))), into `out`."""
    np.add(times, np.float32(1.0), out=out)
    np.multiply(out, np.float32(usual_weight), out=out)
    np.reciprocal(out, out=out)
    return np.maximum(out, np.float32(1.0), out=out)


def _same(ages: Ages | None, what: tuple[str, int, int] | None, times: F32) -> float | None:
    """The one count that all of `times` have; None when they differ, or are not remembered."""
    return None if ages is None or what is None else ages.same(what, times)


def _placed_in(at: slice, phase: Array) -> tuple[str, int, int] | None:
    """Name of the counts of rows `at` in their phase; None when they are in several."""
    return ("placed", at.start or 0, int(phase[0])) if len(phase) and (phase == phase[0]).all() else None


def _reached(ages: Ages | None, what: tuple[str, int, int] | None, times: F32, number: float) -> bool:
    if ages is not None and what is not None:
        return ages.reached(what, times, number)
    return not times.size or float(times.min()) >= number


def per_row(values: F32) -> F32:
    """A value of each row as a column, or the one that all have: a factor that is one number costs a third of a column of them."""
    return values[:1] if len(values) and values.min() == values.max() else values[:, None]


def _known(values: F32) -> F32:
    """Values, 0 where they are not known."""
    return np.where(np.isfinite(values), values, np.float32(0.0))


def _picked(cube: F32, phase: Array) -> F32:
    """Rows × columns of each row's phase out of rows × phases × columns; a view when all rows are in the same phase."""
    if len(phase) and (phase == phase[0]).all():
        return cube[:, min(max(int(phase[0]), 0), cube.shape[1] - 1)]
    return np.asarray(_flat(cube).take(_numbers(cube, phase), axis=0), np.float32)


def _put(cube: F32, phase: Array, values: F32) -> None:
    """Inverse of `_picked`."""
    if len(phase) and (phase == phase[0]).all():
        np.copyto(cube[:, min(max(int(phase[0]), 0), cube.shape[1] - 1)], values)
    else:
        _flat(cube)[_numbers(cube, phase)] = values


def _flat(cube: F32) -> F32:
    """Rows and phases one after the other, without a copy: one index is twice as quick as two."""
    flat = cube.view()
    flat.shape = cube.shape[0] * cube.shape[1], cube.shape[2]
    return flat


def _numbers(cube: F32, phase: Array) -> Array:
    return np.asarray(np.arange(len(phase)) * cube.shape[1] + np.clip(phase, 0, cube.shape[1] - 1))
