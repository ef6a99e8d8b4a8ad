"""A node whose clock stands apart from its probe peers' clocks.

Each collector measures its own clock against those of the peers it probes (`clock_offset_ms`: the median over peers, halved round trips
taken out), so a node that is off says so of itself, and its peers, whose median is over many others, do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import numpy as np

from detectors.base import AlignedTick, Detector, FamilyMatrix, Frame, series_evidence
from detectors.state import decode_state, encode_state
from detectors.synthetic import Example, SyntheticCluster, node_entity, node_name
from trainwarden.records import Entity, EntityKind, Verdict
from trainwarden.settings import option

METRIC = "clock_offset_ms"
KEPT = 20


@dataclass(frozen=True)
class ClockSkewSettings:
    """Settings of `clock_skew`."""

    limit_ms: float = option(200.0, "offset from the peers' clocks beyond which a clock is off")
    persist_ticks: int = option(10, "ticks in a row beyond the limit before it is said")
    calm_ticks: int = option(10, "ticks in a row within half the limit before it is taken back")


class Clock(msgspec.Struct):
    """One node's recent offsets, oldest first, and how long they have been beyond the limit or within half of it."""

    at_ns: list[int] = []
    offset_ms: list[float] = []
    beyond: int = 0
    calm: int = 0
    since_ns: int = 0
    said: bool = False


class State(msgspec.Struct):
    """Clocks that are or were lately off, by node: the healthy ones cost nothing."""

    clocks: dict[str, Clock] = {}


class ClockSkewDetector(Detector):
    """Says `clock_skew` of nodes. When most nodes are off alike it is the measure that is wrong, and nobody is named."""

    name = "clock_skew"
    kinds = ("clock_skew",)
    Settings = ClockSkewSettings
    settings: ClockSkewSettings
    false_alarms_per_node_day: ClassVar[float] = 1e-3
    """An offset is a median over peers; for a healthy clock to be 200 ms off ten ticks in a row the network must lie alike to all."""

    def __init__(self, settings: ClockSkewSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()

    @classmethod
    def example(cls) -> Example:
        """The clock of node 2 is 400 ms ahead from second 20 on."""
        frames = SyntheticCluster(seed=2).frames(60)
        off = [_with_offset(frame, 400.0 if number >= 40 else 0.3) for number, frame in enumerate(frames)]
        return Example(off, "clock_skew", node_entity(2))

    def update(self, frame: Frame) -> list[Verdict]:
        return [verdict for tick in frame.ticks for verdict in self._tick(tick)]

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _tick(self, tick: AlignedTick) -> list[Verdict]:
        matrix = tick.family("host")
        if matrix is None:
            return []
        offsets = np.abs(matrix.column(METRIC))
        known = np.isfinite(offsets)
        beyond = known & (offsets > self.settings.limit_ms)
        if 2 * int(beyond.sum()) > int(known.sum()):
            beyond = np.zeros_like(beyond)
        watched = [row for row, (node, _) in enumerate(matrix.entities) if beyond[row] or node in self._state.clocks]
        verdicts = [self._follow(tick, matrix, row, bool(beyond[row])) for row in watched if known[row]]
        self._forget(frozenset(tick.nodes))
        return [verdict for verdict in verdicts if verdict is not None]

    def _follow(self, tick: AlignedTick, matrix: FamilyMatrix, row: int, beyond: bool) -> Verdict | None:
        node = matrix.entities[row][0]
        offset_ms = float(matrix.column(METRIC)[row])
        clock = self._state.clocks.setdefault(node, Clock(since_ns=tick.at_ns))
        clock.at_ns, clock.offset_ms = [*clock.at_ns, tick.at_ns][-KEPT:], [*clock.offset_ms, offset_ms][-KEPT:]
        if beyond and clock.beyond == 0:
            clock.since_ns = tick.at_ns
        clock.beyond = clock.beyond + 1 if beyond else 0
        clock.calm = clock.calm + 1 if abs(offset_ms) < self.settings.limit_ms / 2 else 0
        if clock.beyond >= self.settings.persist_ticks and not clock.said:
            clock.said = True
            return self._say(tick, node, clock, clears=False)
        if clock.calm >= self.settings.calm_ticks:
            del self._state.clocks[node]
            return self._say(tick, node, clock, clears=True) if clock.said else None
        return None

    def _say(self, tick: AlignedTick, node: str, clock: Clock, *, clears: bool) -> Verdict:
        offset_ms, limit_ms = clock.offset_ms[-1], self.settings.limit_ms
        way = "ahead of" if offset_ms > 0 else "behind"
        off = f"the clock of {node} is {abs(offset_ms):.0f} ms {way} its peers' (limit {limit_ms:.0f} ms): its times mislead"
        series = series_evidence(f"clock offset of {node}", "ms", clock.at_ns, clock.offset_ms, -limit_ms, limit_ms)
        return self.verdict(
            kind="clock_skew",
            entity=Entity(EntityKind.NODE, node, node),
            window=(clock.since_ns, tick.at_ns),
            score=abs(offset_ms) / limit_ms,
            value=offset_ms,
            confidence=0.9,
            text=f"the clock of {node} agrees with its peers' again" if clears else off,
            clears=clears,
            evidence=(series,),
        )

    def _forget(self, nodes: frozenset[str]) -> None:
        """A node that is no longer expected takes what was known of its clock along."""
        for node in [name for name in self._state.clocks if name not in nodes]:
            del self._state.clocks[node]


def _with_offset(frame: Frame, offset_ms: float) -> Frame:
    """The frame with an offset column in which node 2 stands apart."""
    return replace(frame, ticks=tuple(_offset_tick(tick, offset_ms) for tick in frame.ticks))


def _offset_tick(tick: AlignedTick, offset_ms: float) -> AlignedTick:
    host = tick.families["host"]
    column = np.array([[offset_ms if node == node_name(2) else 0.2] for node, _ in host.entities], dtype=np.float32)
    wider = replace(host, metrics=(*host.metrics, METRIC), values=np.hstack([host.values, column]))
    return replace(tick, families={**tick.families, "host": wider})
