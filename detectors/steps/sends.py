"""What machines send over their networks while their job stands: a save to a store elsewhere writes nothing to their disks.

A device sends visibly at twice what it sends while its job moves. The way to the store is seldom the way of the gradients; where it is, a
save that is slower than they are is not seen, for the device of a machine that also works for others looks the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import itemgetter

import msgspec
import numpy as np

from detectors.base import FamilyMatrix
from detectors.state import Array
from detectors.steps.processes import Ints
from detectors.steps.progress import JobProgress
from trainwarden.clock import NS_PER_S

SENT = "tx_bytes_per_s"
_VISIBLE_BYTES_PER_S, _FACTOR, _GAIN = 7e6, 2.0, 0.05
_LEAST_TICKS = 3
_QUIET_NS = 15 * NS_PER_S
"""Who has sent nothing visible for so long sends no more: a rank that hangs after its save is not excused by it."""

Entities = tuple[tuple[str, str], ...]


class SendsState(msgspec.Struct):
    """One entry per network device. `usual` is what it sends while its job moves (NaN: not known), `newest` its last reading, `ticks` how
    often it sent visibly since its job's last step, `sent_ns` when it did last.
    """

    entities: Entities = ()
    usual: Array = msgspec.field(default_factory=lambda: np.zeros(0))
    newest: Array = msgspec.field(default_factory=lambda: np.zeros(0))
    ticks: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    sent_ns: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class Sends:
    """Network devices of all nodes. A device that was away is unknown when it comes back, and excuses nobody."""

    def __init__(self, state: SendsState | None = None) -> None:
        self.state = state or SendsState()
        self._owners: list[tuple[Entities, Mapping[str, str], tuple[str, ...], Ints]] = []
        self._rows: list[tuple[Entities, dict[tuple[str, str], int]]] = []

    def note(
        self, matrix: FamilyMatrix, at_ns: int, job_of: Mapping[str, str], jobs: Mapping[str, JobProgress]
    ) -> None:
        """One tick of family `nic`. `job_of` names each node's job, the same mapping as before while nothing changed."""
        if SENT not in matrix.metrics:
            return
        self._settle(matrix.entities)
        names, owner = self._owned_by(job_of)
        moves = np.array([name in jobs and jobs[name].is_moving(at_ns) for name in names] + [False], np.bool_)[owner]
        state, sent = self.state, matrix.column(SENT).astype(np.float64)
        known = np.isfinite(sent)
        visible = known & ~moves & (sent >= np.maximum(_VISIBLE_BYTES_PER_S, _FACTOR * state.usual))
        state.ticks = np.where(moves, 0, np.minimum(state.ticks + visible, 1_000_000))
        state.sent_ns[visible] = at_ns
        learnt = np.where(np.isnan(state.usual), sent, state.usual + _GAIN * (sent - state.usual))
        state.usual = np.where(moves & known, learnt, state.usual)
        state.newest = sent

    def senders(self, nodes: Sequence[str], at_ns: int) -> dict[str, float]:
        """Those of these nodes that send, and how many bytes per second their busiest device does."""
        state = self.state
        rows = np.flatnonzero((state.ticks >= _LEAST_TICKS) & (at_ns - state.sent_ns <= _QUIET_NS))
        found: dict[str, float] = {}
        for row in rows.tolist():
            node = state.entities[row][0]
            found[node] = max(found.get(node, 0.0), float(np.nan_to_num(state.newest[row])))
        wanted = set(nodes) if found else set()
        return {node: rate for node, rate in found.items() if node in wanted}

    def _settle(self, entities: Entities) -> None:
        state = self.state
        if state.entities is entities or state.entities == entities:
            return
        came = np.fromiter(map(self._row_of(state.entities).get, entities, repeat(-1)), np.int64, len(entities))
        old = came >= 0
        self.state = SendsState(entities, np.full(len(came), np.nan), np.full(len(came), np.nan),
                                np.zeros(len(came), np.int64), np.zeros(len(came), np.int64))  # fmt: skip
        for name in ("usual", "newest", "ticks", "sent_ns"):
            getattr(self.state, name)[old] = getattr(state, name)[came[old]]

    def _owned_by(self, job_of: Mapping[str, str]) -> tuple[tuple[str, ...], Ints]:
        """Names of jobs, and each device's place among them; behind the last for those of none."""
        mine = self.state.entities
        for entities, known, names, owner in self._owners:
            if entities is mine and known is job_of:
                return names, owner
        names = tuple(sorted(set(job_of.values())))
        number = {name: place for place, name in enumerate(names)}
        place = {node: number[name] for node, name in job_of.items()}
        owner = np.fromiter(map(place.get, map(itemgetter(0), mine), repeat(len(names))), np.int64, len(mine))
        self._owners = [(mine, job_of, names, owner), *self._owners[:1]]
        return names, owner

    def _row_of(self, entities: Entities) -> dict[tuple[str, str], int]:
        """Row by entity; kept, for a node that misses ticks and comes back changes the rows twice."""
        for known, rows in self._rows:
            if known is entities:
                return rows
        self._rows = [(entities, {entity: row for row, entity in enumerate(entities)}), *self._rows[:1]]
        return self._rows[0][1]
