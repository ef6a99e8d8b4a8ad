"""Counters that tell of trouble in the network without saying whose: segments sent again, packets out of order, congestion marks.

A node surges when a counter stays far above the highest that it, and its peers, showed in health. Of exchangeable samples the next one is
above the record of n with probability 1 / (n + 1), and three of four above twice the record are rarer still.
"""

from __future__ import annotations

import msgspec
import numpy as np

from detectors.base import AlignedTick, FamilyMatrix
from detectors.robust import median_of_known
from detectors.state import Array

RESENT_TCP, RESENT_RDMA, MARKED = range(3)
_SOURCES: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("host", ("tcp_retrans_per_s",), 60.0),
    ("nic", ("out_of_sequence_per_s", "retransmit_timeouts_per_s"), 10.0),
    ("nic", ("ecn_marked_per_s", "cnp_sent_per_s"), 100.0),
)
"""Family, columns (the highest over a node's devices counts), and events per second that are never a surge."""
_KEPT, _MOST_OF, _FACTOR = 4, 3, 2.0
_POOLED_SAMPLES = 30
_BLOCK, _DECAY = 10, 0.98
"""Samples enter the record in blocks, a block late, so that what climbs is not chased; the record fades by half in six minutes."""
_NEW_NORMAL_TICKS = 600
_SUMMED = 8


def _flat(*shape: int, fill: float = 0.0) -> Array:
    return np.full(shape, fill, dtype=np.float32)


class Surges(msgspec.Struct):
    """Nodes × counters: which newest samples were high, fading record of health, and since when each surges (0: it does not).

    `fresh` has the highest samples of the present block and of the one before, which are not yet part of the record; `samples` counts
    those that are. `newest` has the last samples themselves.
    """

    nodes: tuple[str, ...] = ()
    times: Array = msgspec.field(default_factory=lambda: np.zeros(_KEPT, dtype=np.int64))
    above: Array = msgspec.field(default_factory=lambda: np.zeros((_KEPT, 0, len(_SOURCES)), dtype=np.bool_))
    record: Array = msgspec.field(default_factory=lambda: _flat(0, len(_SOURCES)))
    fresh: Array = msgspec.field(default_factory=lambda: _flat(2, 0, len(_SOURCES), fill=np.nan))
    ticks: int = 0
    samples: Array = msgspec.field(default_factory=lambda: np.zeros((0, len(_SOURCES)), dtype=np.int64))
    since_ns: Array = msgspec.field(default_factory=lambda: np.zeros((0, len(_SOURCES)), dtype=np.int64))
    high_ticks: Array = msgspec.field(default_factory=lambda: np.zeros((0, len(_SOURCES)), dtype=np.int64))
    newest: Array = msgspec.field(default_factory=lambda: _flat(_SUMMED, 0, len(_SOURCES)))

    def put(self, tick: AlignedTick, owners: Owners) -> None:
        """One tick. Of nodes that are no longer expected nothing is kept."""
        self._settle(tick.nodes)
        now = np.stack([owners.highest(tick, family, columns) for family, columns, _ in _SOURCES], axis=1)
        known, above = np.isfinite(now), np.zeros(now.shape, dtype=np.bool_)
        above[known] = (now > self._limit())[known]
        self.above = np.concatenate([self.above[1:], above[None]])
        self.newest = np.concatenate([self.newest[1:], np.nan_to_num(now)[None]])
        self.times = np.append(self.times[1:], tick.at_ns)
        count = self.above.sum(axis=0)
        first_ns = self.times[np.argmax(self.above, axis=0)]
        begins, lasts = (self.since_ns == 0) & (count >= _MOST_OF), (self.since_ns > 0) & (count > 0)
        self.since_ns = np.where(begins, first_ns, np.where(lasts, self.since_ns, 0))
        self._learn(now, known, above)

    def surging(self, *counters: int) -> dict[str, int]:
        """Nodes of which one of these counters surges, with since when (unix ns)."""
        since = self.since_ns[:, counters].astype(np.float64)
        since[since == 0] = np.inf
        first = since.min(axis=1, initial=np.inf)
        return {self.nodes[row]: int(first[row]) for row in np.flatnonzero(np.isfinite(first)).tolist()}

    def share(self, counter: int) -> float:
        """Share of the nodes that have this counter of which it surges."""
        have = self.samples[:, counter] > 0
        return float((self.since_ns[have, counter] > 0).mean()) if have.any() else 0.0

    def is_even(self, nodes: set[str], *counters: int, times: float) -> bool:
        """Whether all of these nodes surge and none of them by more than so many times their median.

        One node that loses what it gets and sends makes others send again too, but it sends again as much as all of them together, or
        nothing where it only loses what it gets.
        """
        rows = np.array([row for row, node in enumerate(self.nodes) if node in nodes], dtype=np.int64)
        if len(rows) < len(nodes) or not (self.since_ns[np.ix_(rows, np.array(counters))] > 0).any(axis=1).all():
            return False
        events = self.newest[:, rows][:, :, counters].max(axis=2).sum(axis=0)
        return bool(events.max() <= times * np.median(events))

    def _limit(self) -> Array:
        """Per node and counter; infinite while too little is known."""
        peers = median_of_known(np.where(self.samples > 0, self.record, np.nan))
        floor = np.array([least for _, _, least in _SOURCES])
        limit = np.maximum(_FACTOR * np.fmax(self.record, peers), floor)
        return np.where(self.samples.sum(axis=0) >= _POOLED_SAMPLES, limit, np.inf)

    def _learn(self, now: Array, known: Array, above: Array) -> None:
        """What is above is no health, unless it stays for so long that it is how things are now."""
        self.high_ticks = np.where(above, self.high_ticks + 1, np.where(known, 0, self.high_ticks))
        use = known & (((self.since_ns == 0) & ~above) | (self.high_ticks > _NEW_NORMAL_TICKS))
        self.fresh[0] = np.fmax(self.fresh[0], np.where(use, now, np.nan))
        self.ticks += 1
        if self.ticks % _BLOCK:
            return
        whole = np.isfinite(self.fresh[1])
        self.record = np.where(whole, np.fmax(self.record * _DECAY, self.fresh[1]), self.record).astype(np.float32)
        self.samples = np.minimum(self.samples + _BLOCK * whole, 1_000_000)
        self.fresh = np.stack([np.full_like(self.fresh[0], np.nan), self.fresh[0]])

    def _settle(self, nodes: tuple[str, ...]) -> None:
        if nodes is self.nodes or nodes == self.nodes:
            return
        place = {name: row for row, name in enumerate(self.nodes)}
        rows, counters = np.array([place.get(name, -1) for name in nodes], dtype=np.int64), len(_SOURCES)

        def moved(old: Array, fill: float) -> Array:
            pad = np.full((*old.shape[:-2], 1, counters), fill, dtype=old.dtype)
            return np.concatenate([old, pad], axis=-2)[..., rows, :]

        self.fresh, self.newest = moved(self.fresh, np.nan), moved(self.newest, 0)
        self.above, self.record, self.samples, self.since_ns, self.high_ticks = (
            moved(old, 0) for old in (self.above, self.record, self.samples, self.since_ns, self.high_ticks)
        )
        self.nodes = nodes


class Owners:
    """Which node each row of a family belongs to; worked out again when rows or nodes change."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[tuple[str, str], ...], tuple[str, ...], Array]] = {}

    def highest(self, tick: AlignedTick, family: str, columns: tuple[str, ...]) -> Array:
        """The highest of some columns over each node's devices; NaN for nodes without."""
        found, matrix = np.full(len(tick.nodes), np.nan, dtype=np.float32), tick.family(family)
        if matrix is None or not any(column in matrix.metrics for column in columns):
            return found
        rows = self._rows(matrix, tick.nodes)
        values = np.fmax.reduce([matrix.column(column) for column in columns])
        np.fmax.at(found, rows[rows >= 0], values[rows >= 0])
        return found

    def _rows(self, matrix: FamilyMatrix, nodes: tuple[str, ...]) -> Array:
        entities, of, rows = self._known.get(matrix.family, ((), (), np.zeros(0, dtype=np.int64)))
        if entities is not matrix.entities or of is not nodes:
            place = {name: row for row, name in enumerate(nodes)}
            rows = np.array([place.get(node, -1) for node, _ in matrix.entities], dtype=np.int64)
            self._known[matrix.family] = (matrix.entities, nodes, rows)
        return rows
