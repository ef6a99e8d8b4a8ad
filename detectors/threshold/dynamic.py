"""A line for every series that follows its history, its node's load and phase, and its peers; the only dial is a risk.

A value is out when it lies beyond what its own history explains *and* beyond what its peers in the same job do at the same moment, by more
than the tail of past excesses allows at the given risk, for several ticks. A series within its line that has lain to one side of its usual
place for too long has shifted. Such verdicts support others; they never stand alone. A series that is too young to have a line is not
judged, and `coverage` counts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.base import F32, AlignedTick, Detector, FamilyMatrix, Frame, series_evidence
from detectors.state import Array, decode_state, encode_state
from detectors.synthetic import Example, Scene, SyntheticCluster, node_name
from detectors.threshold.lines import LineSettings, Readings
from detectors.threshold.peers import Fellows, FellowsState
from detectors.threshold.table import NOBODY, Owners, PerNode, Table, TableState
from trainwarden.records import Entity, EntityKind, Verdict
from trainwarden.settings import option
from trainwarden.topology import Topology

_TRAINING_PHASE = 2
_MOST_EXCERPTS = 256
"""Series per family whose last values are kept while they are out; in a storm of lines the farthest."""
_EXCERPT_TICKS = 20


@dataclass(frozen=True)
class ThresholdSettings:
    """Settings of `dynamic_threshold`."""

    risk: float = option(1e-5, "probability that a healthy point of a series passes its line")
    warm_ticks: int = option(30, "ticks of a series before it has a line")
    persist_ticks: int = option(5, "ticks in a row beyond the line before it is said")
    calm_ticks: int = option(5, "ticks within the line before it is taken back")
    forgetting: float = option(
        0.01,
        "weight of a tick in the usual place; an open series learns at a fifth of it, so a lasting shift becomes usual",
    )
    per_tick: int = option(
        20, "verdicts per tick and family at most, the farthest first: a storm of lines says no more than its worst"
    )


class Excerpt(msgspec.Struct):
    """Values of a series since it left its line; `expected`, `low` and `high` as of the newest, in the metric's unit."""

    at_ns: list[int] = []
    values: list[float] = []
    expected: float = 0.0
    low: float = 0.0
    high: float = 0.0


class State(msgspec.Struct):
    """State of the detector: a table per family, excerpts of series beyond their line, who is in whose job."""

    tables: dict[str, TableState] = {}
    excerpts: dict[str, dict[str, Excerpt]] = {}
    fellows: FellowsState = msgspec.field(default_factory=FellowsState)


@dataclass(frozen=True)
class _Look:
    """One family at one tick; `load` and `phase` per row of the table, `shifts` those of the readings that are no job's doing."""

    tick: AlignedTick
    table: Table
    raw: F32
    load: F32
    phase: Array
    readings: Readings
    topology: Topology
    shifts: NDArray[np.int64]


class ThresholdDetector(Detector):
    """Says `threshold` of single series."""

    name = "dynamic_threshold"
    version = 6
    kinds = ("threshold",)
    Settings = ThresholdSettings
    settings: ThresholdSettings
    supporting_per_hour: ClassVar[float] = 6.0
    """Verdicts an hour on four healthy nodes, at most (contract)."""
    false_alarms_per_node_day: ClassVar[float] = 4.0
    """Opinions, none of which raises an alarm: some twenty series a node, five points in a row beyond a line of risk 1e-5, or a shift."""

    def __init__(self, settings: ThresholdSettings | None = None) -> None:
        super().__init__(settings)
        self._tables: dict[str, Table] = {}
        self._excerpts: dict[str, dict[str, Excerpt]] = {}
        self._fellows = Fellows()
        self._nodes = Nodes()

    @classmethod
    def example(cls) -> Example:
        """The disk of node 2 is busy from second 100 on."""
        busy = Scene(host={(2, "disk_busy_ratio"): 0.95})
        frames = SyntheticCluster(seed=1).frames(120, lambda second: busy if second >= 100 else None)
        return Example(frames, "threshold", series_entity("host", node_name(2), "host", "disk_busy_ratio"))

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for tick in frame.ticks:
            jobs = self._fellows.jobs(frame.topology, tick.at_ns)
            phases, loads = self._nodes.phases(tick), self._nodes.loads(tick)
            for name in sorted(tick.families):
                matrix = tick.families[name]
                if len(matrix.entities):
                    verdicts += self._family(tick, matrix, jobs, phases, loads, frame.topology)
        return verdicts

    def snapshot(self) -> bytes:
        return encode_state(
            State({name: table.state() for name, table in self._tables.items()}, self._excerpts, self._fellows.state)
        )

    def restore(self, payload: bytes) -> None:
        state = decode_state(payload, State)
        self._tables = {name: Table(name, self._line_settings(), part) for name, part in state.tables.items()}
        self._excerpts, self._fellows = state.excerpts, Fellows(state.fellows)

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Per family: series that have a line, of those that ever reported."""
        seen = {name: table.lines.state.places.seen for name, table in self._tables.items()}
        return {
            name: (int((times >= self.settings.warm_ticks).sum()), int((times > 0).sum()))
            for name, times in seen.items()
        }

    def _line_settings(self) -> LineSettings:
        s = self.settings
        return LineSettings(s.risk, s.warm_ticks, s.persist_ticks, s.calm_ticks, s.forgetting)

    def _family(self, tick: AlignedTick, matrix: FamilyMatrix, jobs: dict[str, str], phases: PerNode, loads: PerNode,
                topology: Topology) -> list[Verdict]:  # fmt: skip
        table = self._tables.get(matrix.family)
        if table is None:
            table = self._tables[matrix.family] = Table(matrix.family, self._line_settings())
        raw = table.place(matrix)
        compared = table.transform(raw)
        load, phase = table.per_row(loads, np.nan), table.per_row(phases, 0.0).astype(np.int64)
        common = table.common(compared, load, phase, jobs)
        readings = table.lines.step(compared, load, phase, common)
        shifts = table.news_of(readings.shifts, compared, phase, jobs) if len(readings.shifts) else readings.shifts
        look = _Look(tick, table, raw, load, phase, readings, topology, shifts)
        self._keep_excerpts(look)
        return [*self._starts(look), *self._ends(look), *self._shifts(look)]

    # --- what is said --------------------------------------------------------------------------------------------------------

    def _starts(self, look: _Look) -> list[Verdict]:
        verdicts = []
        for row, column, score in _farthest(look, self.settings.per_tick):
            look.table.lines.open_at(row, column)
            verdicts.append(self._say(look, row, column, score, clears=False))
        return verdicts

    def _ends(self, look: _Look) -> list[Verdict]:
        verdicts = [self._say(look, row, column, 0.0, clears=True) for row, column in look.readings.ends.tolist()]
        kept = self._excerpts.get(look.table.family, {})
        for row, column in look.readings.ends.tolist():
            kept.pop(_key(look.table, row, column), None)
        return verdicts

    def _shifts(self, look: _Look) -> list[Verdict]:
        pairs = look.shifts
        score, side = look.table.lines.state.shifts.score_of(pairs[:, 0], pairs[:, 1])
        order = np.argsort(-score, kind="stable")[: self.settings.per_tick]
        verdicts = []
        for number in order.tolist():
            row, column = (int(value) for value in pairs[number])
            text = f"has lain {'below' if side[number] else 'above'} its usual place for too long"
            verdicts.append(self._say(look, row, column, float(score[number]), clears=False, shift=text))
        for row, column in look.readings.settled.tolist():
            verdicts.append(self._say(look, row, column, 0.0, clears=True, shift="lies at its usual place again"))
        return verdicts

    def _say(self, look: _Look, row: int, column: int, score: float, clears: bool, shift: str = "") -> Verdict:
        table, tick = look.table, look.tick
        node, device = table.roster.entities[row]
        metric = table.roster.metrics[column]
        now = _excerpt_now(look, row, column)
        excerpt = self._excerpts.get(table.family, {}).get(_key(table, row, column)) or now
        excerpt.expected, excerpt.low, excerpt.high = now.expected, now.low, now.high
        value = excerpt.values[-1]
        state = shift or (
            "is back within its line"
            if clears
            else f"is {value:.4g}, its history, load and peers explain {excerpt.expected:.4g}"
        )
        seen = int(table.lines.state.places.seen[row, column])
        line = -np.log10(self.settings.risk)
        note = f"expected {excerpt.expected:.4g}; score {score:.1f}, line {line:.1f} (-log10 p), {seen} ticks known"
        evidence = series_evidence(f"{table.family}.{metric} of {node}/{device}", metric.rpartition("_")[2], excerpt.at_ns,
                                   excerpt.values, excerpt.low, excerpt.high, note)  # fmt: skip
        layout = look.topology.job_of(node)
        return self.verdict(
            kind="threshold", entity=series_entity(table.family, node, device, metric), window=(excerpt.at_ns[0], tick.at_ns),
            onset_at_ns=excerpt.at_ns[0], job=layout.job if layout else "", attempt=layout.attempt if layout else 0, score=score,
            value=value, low=excerpt.low, high=excerpt.high, confidence=0.5, text=f"{metric} of {node}/{device} {state}", clears=clears,
            evidence=(evidence,),
        )  # fmt: skip

    def _keep_excerpts(self, look: _Look) -> None:
        """Go on with the excerpts of series beyond their line; those back within it lose theirs unless they are open."""
        before = self._excerpts.get(look.table.family, {})
        kept: dict[str, Excerpt] = {}
        for row, column in _watched(look).tolist():
            key = _key(look.table, row, column)
            old = before.get(key, Excerpt())
            at_ns = [*old.at_ns[1 - _EXCERPT_TICKS :], look.tick.at_ns]
            kept[key] = Excerpt(at_ns, [*old.values[1 - _EXCERPT_TICKS :], float(look.raw[row, column])])
        for row, column in look.readings.ends.tolist():
            key = _key(look.table, row, column)
            if key in before:
                kept[key] = before[key]
        self._excerpts[look.table.family] = kept


def series_entity(family: str, node: str, device: str, metric: str) -> Entity:
    """A series as the entity of a verdict."""
    return Entity(EntityKind.SERIES, f"{node}/{device}/{family}.{metric}", node)


class Nodes:
    """What each node is at: its activity and its load."""

    def __init__(self) -> None:
        self._processes, self._hosts = Owners(), Owners()

    def phases(self, tick: AlignedTick) -> PerNode:
        """Each node's activity: 0 idle or starting, 1 training, 2 evaluation or save."""
        matrix = tick.family("process")
        if matrix is None:
            return NOBODY
        phase = matrix.column("phase")
        activity = (phase == _TRAINING_PHASE) + np.float32(2.0) * (phase > _TRAINING_PHASE)
        return self._processes.highest(matrix, activity.astype(np.float32))

    def loads(self, tick: AlignedTick) -> PerNode:
        """Each node's share of busy processor time."""
        matrix = tick.family("host")
        return NOBODY if matrix is None else self._hosts.last(matrix, matrix.column("cpu_busy_ratio"))


def _key(table: Table, row: int, column: int) -> str:
    node, device = table.roster.entities[row]
    return "\0".join((node, device, table.roster.metrics[column]))


def _farthest(look: _Look, most: int) -> list[tuple[int, int, float]]:
    """Series that begin to be out, as (row, column, score), the least likely first."""
    points = look.readings.beyond
    scores = {(int(r), int(c)): float(s) for r, c, s in zip(points.row, points.column, points.score, strict=True)} \
        if len(look.readings.starts) else {}  # fmt: skip
    found = [(row, column, scores.get((row, column), 0.0)) for row, column in look.readings.starts.tolist()]
    return sorted(found, key=lambda item: (-item[2], look.table.roster.entities[item[0]], item[1]))[:most]


def _watched(look: _Look) -> NDArray[np.int64]:
    """(row, column) of the series whose excerpts are kept: open ones first, then those out for the longest."""
    state = look.table.lines.state
    flat = np.flatnonzero((state.streak != 0) | state.open)
    row, column = np.divmod(flat, look.table.lines.shape[1])
    if len(flat) > _MOST_EXCERPTS:
        order = np.lexsort((-state.streak[row, column].astype(np.int64), ~state.open[row, column]))[:_MOST_EXCERPTS]
        row, column = row[order], column[order]
    return np.column_stack((row, column))


def _excerpt_now(look: _Look, row: int, column: int) -> Excerpt:
    table, at = look.table, np.array([row])
    middle = float(table.lines.expected(at, look.load[at], look.phase[at])[0, column])
    spread = float(table.lines.spread(row)[column])
    up, down = table.lines.heights(at, np.array([column]))
    low, high = middle - spread * float(down[0]), middle + spread * float(up[0])
    return Excerpt([look.tick.at_ns], [float(look.raw[row, column])], table.raw(column, middle), table.raw(column, low),
                   table.raw(column, high))  # fmt: skip
