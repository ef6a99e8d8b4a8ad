"""The probe matrix in time: every (prober, target) pair's last answers and its own usual round trip."""

from __future__ import annotations

import msgspec
import numpy as np

from detectors.base import FamilyMatrix
from detectors.mesh.rows import Rows
from detectors.robust import median_of_known
from detectors.state import Array, nan_array

RING = 32
"""Ticks kept per pair."""
_SCALE_FLOOR = 0.15
_FORGETTING = 0.02
_LATE_MS, _LATE_FACTOR = 180.0, 20.0
"""A round trip as long as the shortest time-out after which a segment is sent again, and far beyond the usual."""
_FORGET_PAIR_TICKS = 600
_MOST_PAIRS = 20_000
"""On a large network nodes change their peers all the time, and most pairs never come again: beyond so many, those not probed for longest
are forgotten, but none that the rings still tell of."""


def _ring(pairs: int) -> Array:
    return np.zeros((RING, pairs), dtype=np.float32)


class Pairs(msgspec.Struct):
    """Rings over the last ticks, `RING` × pairs; slot `cursor` is the newest tick.

    `log_base` and `log_scale` are each pair's usual round trip, learnt in logarithms with forgetting; `known` counts samples. `silent`
    counts the newest probed ticks without any answer; `idle` the ticks since a pair was probed. `late` marks ticks whose longest round
    trip was of another order than the median: what a queue or a retransmission does, and a median hides.
    """

    keys: tuple[tuple[str, str], ...] = ()
    cursor: int = 0
    times: Array = msgspec.field(default_factory=lambda: np.zeros(RING, dtype=np.int64))
    rtt_ms: Array = msgspec.field(default_factory=lambda: _ring(0))
    sent: Array = msgspec.field(default_factory=lambda: _ring(0))
    lost: Array = msgspec.field(default_factory=lambda: _ring(0))
    late: Array = msgspec.field(default_factory=lambda: _ring(0))
    log_base: Array = msgspec.field(default_factory=lambda: nan_array(0))
    log_scale: Array = msgspec.field(default_factory=lambda: nan_array(0))
    known: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    idle: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    silent: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    loss_rate: float = 0.0
    probes_seen: float = 0.0

    def put(self, at_ns: int, matrix: FamilyMatrix, rows: Rows | None = None) -> None:
        """One tick's probes. Pairs not probed for ten minutes are forgotten, and sooner where there are very many."""
        self._forget()
        index = self._rows(matrix.entities, rows or Rows())
        self.cursor = (self.cursor + 1) % RING
        self.times[self.cursor] = at_ns
        self.rtt_ms[self.cursor] = np.nan
        self.sent[self.cursor], self.lost[self.cursor], self.late[self.cursor] = 0.0, 0.0, 0.0
        lost = np.nan_to_num(matrix.column("lost_count"))
        sent = np.maximum(np.nan_to_num(matrix.column("sent_count")), lost)
        self.rtt_ms[self.cursor, index] = matrix.column("rtt_ms")
        self.sent[self.cursor, index], self.lost[self.cursor, index] = sent, lost
        self.late[self.cursor, index] = self._is_late(index, matrix)
        self.idle += 1
        self.idle[index] = 0
        probed = index[sent > 0]
        self.silent[probed] = np.where((lost >= sent)[sent > 0], self.silent[probed] + 1, 0)

    def excuse(self, rows: Array, ticks: int) -> None:
        """What these pairs saw in the newest ticks is not to be judged by: as if they had not been probed."""
        at = np.ix_(self.recent(ticks), np.flatnonzero(rows))
        self.rtt_ms[at] = np.nan
        self.sent[at], self.lost[at], self.late[at] = 0.0, 0.0, 0.0
        self.silent[rows] = 0

    def recent(self, ticks: int) -> Array:
        """Slots of the newest `ticks` ticks, oldest first."""
        return np.asarray((self.cursor - np.arange(min(ticks, RING))[::-1]) % RING)

    def typical_rtt(self, ticks: int, least: int) -> Array:
        """Median round trip over the newest ticks; NaN with fewer than `least` answers.

        Of a pair that was never above its usual round trip in these ticks the usual one is given: its median is not above that either.
        """
        window = self.rtt_ms[self.recent(ticks)]
        with np.errstate(invalid="ignore"):
            usual = np.exp(self.log_base)
            high = np.flatnonzero((window > 1.1 * usual).any(axis=0) | (self.known == 0))
        typical = np.where(np.isfinite(window).sum(axis=0) >= least, usual, np.nan)
        typical[high] = np.where(np.isfinite(typical[high]), median_of_known(window[:, high]), np.nan)
        return typical

    def rise(self, typical: Array) -> tuple[Array, Array]:
        """How far round trips are above each pair's own usual one: in its scales, and in milliseconds; NaN where nothing is known."""
        with np.errstate(invalid="ignore", divide="ignore"):
            z = (np.log(np.maximum(typical, 1e-6)) - self.log_base) / np.maximum(self.log_scale, _SCALE_FLOOR)
        return np.asarray(z), np.asarray(typical - np.exp(self.log_base))

    def slow(self, typical: Array, least_known: int, factor: float, floor_ms: float, z: float = 4.0) -> Array:
        """Pairs far above their own usual round trip, by factor, by scale and by an amount that can hurt."""
        scales, more_ms = self.rise(typical)
        with np.errstate(invalid="ignore"):
            far = (scales > z) & (typical > factor * (typical - more_ms)) & (more_ms > floor_ms)
        return np.asarray((self.known >= least_known) & far)

    def dead(self, ticks: int) -> Array:
        """Pairs whose probes of the newest `ticks` ticks (in which they were probed) were all lost, at least one in each."""
        return np.asarray((self.silent >= ticks) & (self.idle < 2 * ticks + 2))

    def learn(self, healthy: Array) -> None:
        """Move the usual round trips of `healthy` pairs towards the newest tick; innovations are clipped."""
        now = self.rtt_ms[self.cursor]
        use = healthy & np.isfinite(now) & (now > 0)
        value = np.log(np.where(use, now, 1.0))
        first = use & (self.known == 0)
        self.log_base = np.where(first, value, self.log_base)
        self.log_scale = np.where(first, 2 * _SCALE_FLOOR, self.log_scale)
        weight = np.maximum(1.0 / (self.known + 1), _FORGETTING)
        bound = 3.0 * np.maximum(self.log_scale, _SCALE_FLOOR)
        away = np.clip(value - self.log_base, -bound, bound)
        self.log_base = np.where(use, self.log_base + weight * away, self.log_base)
        self.log_scale = np.where(
            use, self.log_scale + weight * (1.2533 * np.abs(away) - self.log_scale), self.log_scale
        )
        self.known = np.where(use, self.known + 1, self.known)
        sent, lost = float(self.sent[self.cursor, healthy].sum()), float(self.lost[self.cursor, healthy].sum())
        self.probes_seen = min(self.probes_seen + sent, 1e6)
        if sent:
            self.loss_rate += (lost / sent - self.loss_rate) * min(1.0, sent / max(self.probes_seen, 1.0))

    def loss_rate_before(self, slots: Array) -> float:
        """The same for all but these ticks: what they lost is not usual because they lost it."""
        seen = max(self.probes_seen - float(self.sent[slots].sum()), 0.0)
        lost = max(self.loss_rate * self.probes_seen - float(self.lost[slots].sum()), 0.0)
        return (lost + 0.5) / (seen + 1.0)

    def usual_loss_rate(self) -> float:
        """Share of probes that the mesh usually loses, never quite zero."""
        return (self.loss_rate * self.probes_seen + 0.5) / (self.probes_seen + 1.0)

    def _is_late(self, index: Array, matrix: FamilyMatrix) -> Array:
        usual = np.exp(self.log_base[index])
        with np.errstate(invalid="ignore"):
            long = (matrix.column("rtt_max_ms") >= _LATE_MS) & (matrix.column("rtt_max_ms") >= _LATE_FACTOR * usual)
            return np.asarray(long & (matrix.column("rtt_ms") < 3.0 * usual) & (self.known[index] > 0))

    def _rows(self, entities: tuple[tuple[str, str], ...], rows: Rows) -> Array:
        index = rows.of(entities, self.keys)
        if index is None:
            known = set(self.keys)
            self._grow([key for key in entities if key not in known])
            index = rows.of(entities, self.keys)
        assert index is not None  # those that were missing were added
        return index

    def _grow(self, new: list[tuple[str, str]]) -> None:
        count = len(new)
        self.keys = (*self.keys, *new)
        self.rtt_ms = np.hstack([self.rtt_ms, _ring(count) + np.float32(np.nan)])
        self.sent, self.lost, self.late = (np.hstack([old, _ring(count)]) for old in (self.sent, self.lost, self.late))
        self.log_base, self.log_scale = (np.append(old, np.zeros(count)) for old in (self.log_base, self.log_scale))
        zeros = np.zeros(count, dtype=np.int64)
        self.known, self.idle, self.silent = (np.append(old, zeros) for old in (self.known, self.idle, self.silent))

    def _forget(self) -> None:
        limit = _FORGET_PAIR_TICKS
        if len(self.idle) > _MOST_PAIRS:
            limit = min(limit, max(RING, int(np.partition(self.idle, _MOST_PAIRS)[_MOST_PAIRS]) - 1))
        keep = self.idle <= limit
        if keep.all():
            return
        self.keys = tuple(key for key, kept in zip(self.keys, keep.tolist(), strict=True) if kept)
        rings = (self.rtt_ms, self.sent, self.lost, self.late)
        self.rtt_ms, self.sent, self.lost, self.late = (ring[:, keep] for ring in rings)
        self.log_base, self.log_scale = self.log_base[keep], self.log_scale[keep]
        self.known, self.idle, self.silent = self.known[keep], self.idle[keep], self.silent[keep]
