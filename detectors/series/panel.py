"""What every series that may foretell something did lately: the last hour by the minute and the last day by the quarter of an hour, and
where ticks come often enough the last ten minutes by ten seconds and four hours by 150."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.seats import seats
from detectors.series.trends import F64, GAUSS_OF_MEDIAN
from detectors.series.watch import Watch, adds_up, watch_named
from detectors.state import Array

FINE, COARSE, RATIO = 60, 96, 15
"""Buckets kept of each kind, and fine buckets in a coarse one."""
SLOW_S, QUICK_S = 60, 10
"""Fine buckets of the two bases of time."""
BACK_BUCKETS = 5
"""A grid that goes farther back than this is a new grid; less is a late tick."""
_FORGET_BUCKETS = 24 * 60
_HEALTHY_SHARE = 0.8
"""A move that came back by itself is healthy: after it, one like it is this share of what would be news."""
_SLOPE_PACE, _SETTLED_BUCKETS = 0.01, 30
_ROW_ARRAYS = (
    "total", "weight", "load", "last", "raw", "fine", "coarse", "usual", "seen", "mean_load", "smooth_load", "quick_load", "quick_level",
    "peak", "streak", "calm", "since_ns", "told", "absent",
)  # fmt: skip


Rows: TypeAlias = slice | NDArray[np.int64]
"""All rows, or their numbers."""


def _nan(*shape: int) -> NDArray[np.float32]:
    return np.full(shape, np.nan, dtype=np.float32)


def _zero(*shape: int) -> F64:
    return np.zeros(shape)


def _any_event(ring: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows with a value that is known and not zero."""
    return np.asarray((np.abs(ring) > 0).any(axis=1))


class Places:
    """Row numbers of the entities that report; worked out once for all panels of a family that have the same rows.

    What was found last and before is kept: a node that misses a tick, and one that is gone for good, would else cost ten thousand look-ups
    each time. No list that was given here may be changed afterwards.
    """

    def __init__(self) -> None:
        self._found: list[tuple[list[tuple[str, str]], list[tuple[str, str]], Rows]] = []

    def of(self, rows: list[tuple[str, str]], asked: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], Rows]:
        """`rows` as the one list that all panels share (the same object is quick to compare), and where `asked` lie among them: all where
        both are the same, -1 for those that are new."""
        for number, (known, wanted, found) in enumerate(self._found):
            if wanted is asked and (known is rows or known == rows):
                self._found.insert(0, self._found.pop(number))
                return known, found
        made: Rows = slice(None) if rows == asked else seats(asked, rows)
        self._found = [(rows, asked, made), *self._found[:1]]
        return rows, made


class Reading:
    """One tick of one watched metric, NaN where it is not reported: what both bases of time take in is worked out once.

    `added` is what a bucket gathers, 0 where nothing is known; None for a running total, whose growth each panel sees for itself.
    """

    def __init__(self, watch: Watch, metric: str, values: F64, loads: F64 | None, interval_s: float) -> None:
        self.values, self.known = values, np.isfinite(values)
        self.whole = bool(self.known.all())
        self.added = self._added(watch, metric, interval_s)
        self.loads = None if loads is None else np.where(self.known, np.nan_to_num(loads), 0.0)

    def _added(self, watch: Watch, metric: str, interval_s: float) -> F64 | None:
        if watch.is_count and adds_up(metric):
            return None
        clean = self.values if self.whole else np.where(self.known, self.values, 0.0)
        if watch.is_count:
            return np.asarray(np.maximum(clean, 0.0) * interval_s)
        return np.asarray(np.log10(np.maximum(clean, 0.0) + 1.0)) if watch.decades else clean


class Panel(msgspec.Struct):
    """State of one watched metric over all its entities (rows).

    `total`, `weight` and `load` gather the bucket that is being filled; `last` is the last running total. `fine` and `coarse` hold
    closed buckets, newest last: events of a count, means of a level. `usual` and `seen` track, per row and window, how far the level
    moves in health; `pooled` the same over all rows. `cov`, `var` and the averages of load and level explain the level by the load.
    """

    watch: str
    family: str
    metric: str
    windows: int
    bucket_s: int = SLOW_S
    bucket: int = -1
    entities: list[tuple[str, str]] = []
    total: Array = msgspec.field(default_factory=lambda: _zero(0))
    weight: Array = msgspec.field(default_factory=lambda: _zero(0))
    load: Array = msgspec.field(default_factory=lambda: _zero(0))
    last: Array = msgspec.field(default_factory=lambda: _zero(0))
    raw: Array = msgspec.field(default_factory=lambda: _zero(0))
    fine: Array = msgspec.field(default_factory=lambda: _nan(0, FINE))
    coarse: Array = msgspec.field(default_factory=lambda: _nan(0, COARSE))
    usual: Array = msgspec.field(default_factory=lambda: _zero(0, 0))
    seen: Array = msgspec.field(default_factory=lambda: _zero(0, 0))
    peak: Array = msgspec.field(default_factory=lambda: _zero(0, 0))
    pooled: Array = msgspec.field(default_factory=lambda: _zero(0))
    pooled_seen: Array = msgspec.field(default_factory=lambda: _zero(0))
    mean_load: Array = msgspec.field(default_factory=lambda: _zero(0))
    smooth_load: Array = msgspec.field(default_factory=lambda: _zero(0))
    quick_load: Array = msgspec.field(default_factory=lambda: _zero(0))
    quick_level: Array = msgspec.field(default_factory=lambda: _zero(0))
    cov: float = 0.0
    var: float = 0.0
    absent: Array = msgspec.field(default_factory=lambda: _zero(0))
    streak: Array = msgspec.field(default_factory=lambda: _zero(0))
    calm: Array = msgspec.field(default_factory=lambda: _zero(0))
    since_ns: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Onset of the open foretelling, 0 when there is none."""

    told: Array = msgspec.field(default_factory=lambda: _zero(0))
    """Bucket in which the row was last foretold, 0 for never."""

    quiet: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    known: Array = msgspec.field(default_factory=lambda: np.zeros((0, 0), dtype=np.uint8))
    """Only in a snapshot, see `packed`."""

    @property
    def row(self) -> Watch:
        """The watch row this panel serves."""
        return watch_named(self.watch)

    def take(self, entities: list[tuple[str, str]], reading: Reading, places: Places | None = None) -> None:
        """Add one tick. `entities` are sorted, so that their order in the input does not matter."""
        rows = self._rows(entities, places or Places())
        self.total[rows] += self._grown(rows, reading) if reading.added is None else reading.added
        self.weight[rows] += reading.known
        if reading.loads is not None:
            self.load[rows] += reading.loads
        self.raw[rows] = reading.values if reading.whole else np.where(reading.known, reading.values, self.raw[rows])

    def close(self, bucket: int) -> bool:
        """Close buckets up to `bucket`, the one that begins now; whether anything was closed. An older bucket changes nothing."""
        if self.bucket < 0:
            self.bucket = bucket
        passed = bucket - self.bucket
        if passed < -BACK_BUCKETS:
            self.bucket = bucket
        if passed <= 0:
            return False
        self._push(self._closing())
        self._roll()
        for _ in range(min(passed - 1, COARSE * RATIO)):
            self.bucket += 1
            self._push(np.full(len(self.entities), np.nan))
            self._roll()
        self.bucket = bucket
        self.total[:], self.weight[:], self.load[:] = 0.0, 0.0, 0.0
        self._forget()
        return True

    def remember(self, window: int, moves: F64, line: F64, deviations: float) -> None:
        """Note moves beyond half of what would be news (`line`, that many usual `deviations`); those that came back were healthy."""
        high, peak = np.nan_to_num(moves) >= line / 2, self.peak[:, window]
        back = (peak > 0) & np.isfinite(moves) & ~high
        raised = peak / (_HEALTHY_SHARE * deviations)
        self.usual[:, window] = np.where(back, np.maximum(self.usual[:, window], raised), self.usual[:, window])
        self.peak[:, window] = np.where(high, np.maximum(peak, np.nan_to_num(moves)), np.where(back, 0.0, peak))

    def follow(self, window: int, moves: F64, length: int) -> None:
        """Learn how far levels move in health over a window of `length` buckets; one that moves far counts for no more than three usual."""
        known = np.isfinite(moves)
        size = np.abs(np.where(known, moves, 0.0))
        if not known.any():
            return
        middle = GAUSS_OF_MEDIAN * float(np.median(size[known]))
        gain = max(1.0 / (self.pooled_seen[window] / max(1, known.sum()) + 1.0), 0.25 / length)
        self.pooled[window] += gain * (middle - self.pooled[window])
        self.pooled_seen[window] = min(self.pooled_seen[window] + known.sum(), 1e9)
        seen, usual = self.seen[:, window], self.usual[:, window]
        gains = np.maximum(1.0 / (seen + 1.0), 0.25 / length) * known
        bound = np.where(seen > 0, 3.0 * np.maximum(usual, self.pooled[window]), np.inf)
        usual += gains * (1.2533 * np.minimum(size, bound) - usual)
        seen += known

    def packed(self) -> Panel:
        """The same panel with the rings of rows without any event as bits (known or not): most counts are zero all day."""
        if not self.row.is_count or not len(self.fine):
            return self
        quiet = ~(_any_event(self.fine) | _any_event(self.coarse))
        made = msgspec.structs.replace(self)
        known = np.hstack([np.isfinite(self.fine)[quiet], np.isfinite(self.coarse)[quiet]])
        made.quiet, made.known = quiet, np.packbits(known, axis=1)
        made.fine, made.coarse = self.fine[~quiet], self.coarse[~quiet]
        return made

    def unpack(self) -> None:
        """Undo `packed`, in place."""
        if not len(self.quiet):
            return
        rings = _nan(len(self.quiet), FINE + COARSE)
        rings[~self.quiet] = np.hstack([self.fine, self.coarse])
        known = np.unpackbits(self.known, axis=1, count=FINE + COARSE).astype(np.bool_)
        rings[self.quiet] = np.where(known, np.float32(0), np.float32(np.nan))
        self.fine, self.coarse = np.ascontiguousarray(rings[:, :FINE]), np.ascontiguousarray(rings[:, FINE:])
        self.quiet, self.known = np.zeros(0, dtype=np.bool_), np.zeros((0, 0), dtype=np.uint8)

    def _grown(self, rows: Rows, reading: Reading) -> F64:
        """By how much running totals have grown since they were last known."""
        values, known, before = reading.values, reading.known, self.last[rows]
        grown = np.asarray(np.where(known & np.isfinite(before) & (values > before), values - before, 0.0))
        self.last[rows] = values if reading.whole else np.where(known, values, before)
        return grown

    def _closing(self) -> F64:
        """Values of the bucket that ends: events, or the mean level at usual load."""
        if self.row.is_count:
            return np.where(self.weight > 0, self.total, np.nan)
        weight = np.maximum(self.weight, 1.0)
        level = np.where(self.weight > 0, self.total / weight, np.nan)
        return self._at_usual_load(level, self.load / weight) if self.row.load else level

    def _at_usual_load(self, level: F64, load: F64) -> F64:
        """The level as it were at the row's usual load. Heat follows the load with minutes of delay, so the load is smoothed; the slope is
        that of quick movements of both, common to all rows, so that a slow drift of one row does not bend it."""
        known = np.isfinite(level) & (load > 0)
        new = known & (self.mean_load == 0.0)
        for name, value in (("mean_load", load), ("smooth_load", load), ("quick_load", load), ("quick_level", level)):
            getattr(self, name)[new] = value[new]
        self.smooth_load += np.where(known, 0.3 * (load - self.smooth_load), 0.0)
        away, moved = self.smooth_load - self.quick_load, np.where(known, level - self.quick_level, 0.0)
        self.quick_load += np.where(known, 0.05 * away, 0.0)
        self.quick_level += 0.05 * moved
        settled = known & (np.isfinite(self.fine).sum(axis=1) >= _SETTLED_BUCKETS)
        if settled.any():
            self.cov += _SLOPE_PACE * (float((away * moved)[settled].mean()) - self.cov)
            self.var += _SLOPE_PACE * (float((away * away)[settled].mean()) - self.var)
        ridge = (0.01 * float(self.mean_load[known].mean())) ** 2 if known.any() else 0.0
        slope = max(0.0, self.cov / (self.var + ridge + 1e-12))
        self.mean_load += np.where(known, 0.005 * (load - self.mean_load), 0.0)
        return np.where(known, level - slope * (self.smooth_load - self.mean_load), np.nan)

    def _push(self, values: F64) -> None:
        # each row moves by one value, and its last comes from the row below: that is where the new one goes
        flat = self.fine.data.cast("B")
        flat[: -self.fine.itemsize] = flat[self.fine.itemsize :]
        self.fine[:, -1] = values

    def _roll(self) -> None:
        if (self.bucket + 1) % RATIO:
            return
        part = self.fine[:, -RATIO:]
        known = np.isfinite(part)
        sums, number = np.where(known, part, 0.0).sum(axis=1), known.sum(axis=1)
        value = sums if self.row.is_count else sums / np.maximum(number, 1)
        self.coarse[:, :-1] = self.coarse[:, 1:]
        self.coarse[:, -1] = np.where(number * 2 >= RATIO, value, np.nan)

    def _rows(self, entities: list[tuple[str, str]], places: Places) -> Rows:
        self.entities, rows = places.of(self.entities, entities)
        if not isinstance(rows, slice) and len(rows) and rows.min() < 0:
            self._grow([entity for entity, row in zip(entities, rows.tolist(), strict=True) if row < 0])
            self.entities, rows = places.of(self.entities, entities)
        self.absent[rows] = 0.0
        return rows

    def _grow(self, new: list[tuple[str, str]]) -> None:
        count = len(new)
        self.entities = [*self.entities, *new]
        for name in (
            "total",
            "weight",
            "load",
            "raw",
            "mean_load",
            "smooth_load",
            "quick_load",
            "quick_level",
            "absent",
            "streak",
            "calm",
            "told",
        ):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(count)]))
        self.last = np.concatenate([self.last, np.full(count, np.nan)])
        self.since_ns = np.concatenate([self.since_ns, np.zeros(count, dtype=np.int64)])
        self.fine, self.coarse = (
            np.vstack([self.fine, _nan(count, FINE)]),
            np.vstack([self.coarse, _nan(count, COARSE)]),
        )
        for name in ("usual", "seen", "peak"):
            wide = getattr(self, name).reshape(-1, self.windows)
            setattr(self, name, np.vstack([wide, np.zeros((count, self.windows))]))
        if not len(self.pooled):
            self.pooled, self.pooled_seen = np.zeros(self.windows), np.zeros(self.windows)

    def _forget(self) -> None:
        self.absent += 1.0
        keep = self.absent <= _FORGET_BUCKETS
        if keep.all():
            return
        self.entities = [entity for entity, kept in zip(self.entities, keep.tolist(), strict=True) if kept]
        for name in _ROW_ARRAYS:
            setattr(self, name, getattr(self, name)[keep])
