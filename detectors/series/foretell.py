"""Says `foretold`: a trend that ends in a failure within hours if it goes on, with the time it takes and how often such trends did.

Measured: none in 1,536 node-days of simulated health never used before (docs/measured.md); version 2 made 3.3 in a thousand.

The design aims at the stated rate. The budget (one per thousand node-days) is divided by the series of a node, the evaluations of a
day (1440, and 8640 for trends within minutes) and the windows of an evaluation; what remains is the risk of one test, about 1e-9, and a
row is named only when health could bring what was seen no more often than that: by an exact test of counts against its own past and its
peers, or by a move of the level against the usual moves of itself and its peers. That the limit must also lie within reach makes it rarer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.base import F32, AlignedTick, Detector, FamilyMatrix, Frame, series_evidence
from detectors.placement import Jobs
from detectors.series.laws import BASES, Finding, counts, done_of_way, knows_usual, risk_per_test, trends
from detectors.series.panel import FINE, QUICK_S, SLOW_S, Panel, Places, Reading
from detectors.series.reliability import Signs, probability
from detectors.series.scenes import Fleet, Precursor
from detectors.series.watch import Law, Watch, watch_of
from detectors.state import decode_state, encode_state
from detectors.synthetic import Example, node_entity
from trainwarden.clock import NS_PER_S
from trainwarden.errors import ConfigError
from trainwarden.records import Entity, EntityKind, Verdict
from trainwarden.settings import option
from trainwarden.topology import Topology

LEAST_HORIZON_S, MOST_HORIZON_S = 600.0, 86_400.0
_DAY_S = 86_400
_MORE_OF_EVENTS = 2
"""Buckets more than a level's trend that one of events must show."""


@dataclass(frozen=True)
class ForetellSettings:
    """Settings of `foretell`."""

    horizon_s: float = option(6 * 3600.0, "how far ahead a failure is named, 10 min to 24 h")
    false_per_node_day: float = option(1e-3, "expected false foretellings of a node in a day of health")
    persist_buckets: int = option(
        3,
        "buckets (10 s or 1 min) in a row that a trend must show before it is said; events in two more",
    )
    calm_buckets: int = option(30, "buckets without it before it is taken back")


class _Order:
    """Rows of a family by name."""

    def __init__(self, told: tuple[tuple[str, str], ...]) -> None:
        rows = sorted(range(len(told)), key=told.__getitem__)
        self.told, self.entities = told, [told[row] for row in rows]
        self._rows = None if rows == list(range(len(told))) else np.array(rows, dtype=np.int64)

    def of(self, column: F32) -> NDArray[np.float64]:
        """A column in this order."""
        return (column if self._rows is None else column[self._rows]).astype(np.float64)


class State(msgspec.Struct):
    """State of the detector: a panel per watched metric, and those still to be evaluated since the last bucket closed."""

    panels: dict[str, Panel] = {}
    pending: list[str] = []


class Foretell(Detector):
    """Foretells failures from the trends that `detectors.series.watch` lists."""

    name = "foretell"
    version = 3
    kinds = ("foretold",)
    Settings = ForetellSettings
    settings: ForetellSettings
    false_alarms_per_node_day: ClassVar[float] = 1e-3

    def __init__(self, settings: ForetellSettings | None = None) -> None:
        super().__init__(settings)
        if not LEAST_HORIZON_S <= self.settings.horizon_s <= MOST_HORIZON_S:
            raise ConfigError(
                f"detectors.foretell.horizon_s is {self.settings.horizon_s:g} s, expected 10 min (600) to 24 h (86400): choose one between"
            )
        self._state = State()
        self._orders: dict[str, list[_Order]] = {}
        self._places: dict[str, Places] = {}
        self._jobs = Jobs()
        self._groups: dict[str, tuple[list[tuple[str, str]], dict[str, str], list[NDArray[np.int64]]]] = {}

    @classmethod
    def example(cls) -> Example:
        """Memory of node 2 leaks away within two hours, from the second hour on."""
        leak = Precursor("memory_leak", node=2, device=0, onset_s=2.2 * 3600, duration_s=2 * 3600)
        fleet = Fleet(4, seed=3, precursors=(leak,), nuisance=0.0)
        return Example([_of_hosts(frame) for frame in fleet.frames(240)], "foretold", node_entity(2))

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for tick in frame.ticks:
            for name in sorted(tick.families):
                self._take(tick, tick.families[name])
            verdicts += self._evaluate_some(tick, frame.topology)
        return verdicts

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Levels whose usual moves are known over the shortest window; counts are tested against whatever past they have."""
        levels = [panel for panel in self._state.panels.values() if not panel.row.is_count and len(panel.entities)]
        return {
            "levels": (
                sum(int(knows_usual(panel).sum()) for panel in levels),
                sum(len(panel.entities) for panel in levels),
            )
        }

    def snapshot(self) -> bytes:
        packed = {key: panel.packed() for key, panel in self._state.panels.items()}
        return encode_state(State(packed, self._state.pending))

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)
        for panel in self._state.panels.values():
            panel.unpack()

    def _take(self, tick: AlignedTick, matrix: FamilyMatrix) -> None:
        watched = [
            (metric, watch) for metric in matrix.metrics if (watch := watch_of(matrix.family, metric)) is not None
        ]
        if not watched or not len(matrix.entities):
            return
        order, places = self._sorted(matrix), self._places.setdefault(matrix.family, Places())
        interval_s = tick.interval_ms / 1000.0
        for metric, watch in watched:
            loads = order.of(matrix.column(watch.load)) if watch.load else None
            reading = Reading(watch, metric, order.of(matrix.column(metric)), loads, interval_s)
            for bucket_s in (SLOW_S, QUICK_S) if tick.interval_ms <= QUICK_S * 1000 else (SLOW_S,):
                panel = self._panel(watch, matrix.family, metric, bucket_s)
                bucket = tick.at_ns // (bucket_s * NS_PER_S)
                key = _key(panel)
                if panel.close(bucket) and key not in self._state.pending:
                    self._state.pending.append(key)
                if bucket == panel.bucket:
                    panel.take(order.entities, reading, places)

    def _panel(self, watch: Watch, family: str, metric: str, bucket_s: int) -> Panel:
        key = f"{family}.{metric}/{bucket_s}"
        if key not in self._state.panels:
            self._state.panels[key] = Panel(watch.name, family, metric, len(BASES[bucket_s].trends), bucket_s)
        return self._state.panels[key]

    def _sorted(self, matrix: FamilyMatrix) -> _Order:
        """Order and names of a family's rows by name; kept from tick to tick, for sorting ten thousand names costs milliseconds. Of many
        nodes one misses a tick every few seconds, so what was before the newest change is kept, too."""
        kept = self._orders.setdefault(matrix.family, [])
        for number, order in enumerate(kept):
            if order.told is matrix.entities or order.told == matrix.entities:
                kept.insert(0, kept.pop(number))
                return order
        self._orders[matrix.family] = [_Order(matrix.entities), *kept[:1]]
        return self._orders[matrix.family][0]

    def _alike(self, panel: Panel, jobs: dict[str, str]) -> list[NDArray[np.int64]]:
        """`_groups` of a panel's rows, kept while its family has the same rows and the jobs are the same."""
        kept = self._groups.get(panel.family)
        if kept is None or kept[1] is not jobs or (kept[0] is not panel.entities and kept[0] != panel.entities):
            kept = self._groups[panel.family] = panel.entities, jobs, _groups(panel.entities, jobs)
        return kept[2]

    def _evaluate_some(self, tick: AlignedTick, topology: Topology) -> list[Verdict]:
        """Evaluate as many panels as must be per tick, so that all are done before the next bucket closes: work is spread, not heaped."""
        interval_s = tick.interval_ms / 1000.0
        due = math.ceil(sum(min(1.0, interval_s / panel.bucket_s) for panel in self._state.panels.values()))
        now, self._state.pending = self._state.pending[:due], self._state.pending[due:]
        jobs = self._jobs.of(topology) if now else {}
        return [
            verdict
            for key in now
            for verdict in self._evaluate(self._state.panels[key], tick.at_ns, len(tick.nodes), jobs, topology)
        ]

    def _evaluate(
        self, panel: Panel, at_ns: int, nodes: int, jobs: dict[str, str], topology: Topology
    ) -> list[Verdict]:
        base, counted = BASES[panel.bucket_s], panel.row.is_count
        law, tests = (counts, 2 * len(base.counts)) if counted else (trends, len(base.trends))
        series = sum(len(p.entities) for p in self._state.panels.values() if p.bucket_s == panel.bucket_s) / max(
            1, nodes
        )
        risk = risk_per_test(self.settings.false_per_node_day, series, panel.bucket_s, tests)
        found = law(panel, self._alike(panel, jobs), risk, self.settings.horizon_s)
        rows = np.array([finding.row for finding in found], dtype=np.int64)
        seen = np.zeros(len(panel.entities), dtype=np.bool_)
        seen[rows] = True
        panel.calm = np.where(seen, 0.0, panel.calm + 1.0)
        held = panel.calm <= (self.settings.persist_buckets if counted else 0)
        panel.streak = np.where(held, panel.streak + seen, 0.0)
        said = [self._say(panel, finding, at_ns, topology) for finding in found if self._is_news(panel, finding)]
        ends = np.flatnonzero((panel.since_ns > 0) & (panel.calm >= self.settings.calm_buckets))
        return said + [
            self._take_back(panel, row, at_ns, topology) for row in ends.tolist() if self._closes(panel, row)
        ]

    def _is_news(self, panel: Panel, finding: Finding) -> bool:
        """Whether a finding lasted, and neither it nor the other base of time has named the row."""
        if panel.since_ns[finding.row] or not self._lasts(panel, finding):
            return False
        twin = self._twin(panel)
        entity = panel.entities[finding.row]
        return twin is None or entity not in twin.entities or not twin.since_ns[twin.entities.index(entity)]

    def _lasts(self, panel: Panel, finding: Finding) -> bool:
        """Whether a finding was there for some buckets. Events stay in their window when they are over, so they must show more often,
        with a few gaps, and still come."""
        streak, persist = panel.streak[finding.row], self.settings.persist_buckets
        if panel.row.is_count:
            return bool(streak >= persist + _MORE_OF_EVENTS and np.nansum(panel.fine[finding.row, -persist:]) > 0)
        return bool(streak >= persist or finding.window_s > FINE * panel.bucket_s)

    def _twin(self, panel: Panel) -> Panel | None:
        """The same metric on the other base of time."""
        return self._state.panels.get(f"{panel.family}.{panel.metric}/{SLOW_S + QUICK_S - panel.bucket_s}")

    def _closes(self, panel: Panel, row: int) -> bool:
        """Close a row's foretelling; whether its node has no other open, so that the node itself is cleared."""
        panel.since_ns[row] = 0
        node = panel.entities[row][0]
        return not any(
            other.since_ns[i] > 0
            for other in self._state.panels.values()
            for i, (owner, _) in enumerate(other.entities)
            if owner == node
        )

    def _say(self, panel: Panel, finding: Finding, at_ns: int, topology: Topology) -> Verdict:
        onset_ns = at_ns - int(finding.window_s) * NS_PER_S
        panel.since_ns[finding.row] = onset_ns
        node, device = panel.entities[finding.row]
        chance = probability(self.signs_of(panel, finding))
        panel.told[finding.row] = panel.bucket
        text = f"{panel.metric} of {node}/{device} {_course(panel, finding)}; it ends in {panel.row.end} {_when(finding.time_s)}, "
        text += f"if it goes on ({chance:.0%} of such trends did within {_span(self.settings.horizon_s)})"
        return self._verdict(panel, finding.row, at_ns, topology, window=(onset_ns, at_ns), onset_at_ns=onset_ns, confidence=chance,
                             score=finding.strength, value=finding.time_s, high=panel.row.limit, text=text)  # fmt: skip

    def signs_of(self, panel: Panel, finding: Finding) -> Signs:
        """What tells whether a trend goes on to its limit."""
        share = finding.time_s / self.settings.horizon_s
        again = _told_lately(panel, finding.row) or self._told_by_twin(panel, finding.row)
        return Signs(done_of_way(panel, finding), share, again)

    def _told_by_twin(self, panel: Panel, row: int) -> bool:
        twin, entity = self._twin(panel), panel.entities[row]
        return twin is not None and entity in twin.entities and _told_lately(twin, twin.entities.index(entity))

    def _take_back(self, panel: Panel, row: int, at_ns: int, topology: Topology) -> Verdict:
        text = f"no trend towards a failure is left on {panel.entities[row][0]}: {panel.metric} stopped rising towards its limit"
        return self._verdict(panel, row, at_ns, topology, window=(at_ns, at_ns), confidence=0.5, text=text, clears=True)

    def _verdict(
        self, panel: Panel, row: int, at_ns: int, topology: Topology, window: tuple[int, int], **facts: object
    ) -> Verdict:
        node, device = panel.entities[row]
        layout = topology.job_of(node)
        times = [at_ns - (FINE - i) * panel.bucket_s * NS_PER_S for i in range(FINE)]
        known = [(t, v) for t, v in zip(times, panel.fine[row].tolist(), strict=True) if math.isfinite(v)] or [
            (at_ns, math.nan)
        ]
        unit = f"events/{panel.bucket_s}s" if panel.row.is_count else panel.metric.rpartition("_")[2]
        evidence = series_evidence(f"{panel.family}.{panel.metric} of {node}/{device}", unit, [t for t, _ in known], [v for _, v in known],
                                   note=f"limit {panel.row.limit:g}{_limit_unit(panel.row)} ({panel.row.origin})")  # fmt: skip
        return self.verdict(kind="foretold", entity=Entity(EntityKind.NODE, node, node), window=window, job=layout.job if layout else "",
                            attempt=layout.attempt if layout else 0, evidence=(evidence,), **facts)  # fmt: skip


def _groups(entities: list[tuple[str, str]], jobs: dict[str, str]) -> list[NDArray[np.int64]]:
    """Rows of the nodes of one job, where there are at least three nodes: one machine's devices are no peers of themselves."""
    found: dict[str, list[int]] = {}
    nodes: dict[str, set[str]] = {}
    before, mine = "", list[int]()
    for row, (node, _) in enumerate(entities):
        if node != before or not row:
            job, before, mine = jobs.get(node), node, []
            if job is not None:
                mine = found.setdefault(job, [])
                nodes.setdefault(job, set()).add(node)
        mine.append(row)
    return [np.array(rows) for job, rows in found.items() if len(nodes[job]) >= 3]


def _key(panel: Panel) -> str:
    return f"{panel.family}.{panel.metric}/{panel.bucket_s}"


def _told_lately(panel: Panel, row: int) -> bool:
    """Whether a row was foretold within the last day."""
    return bool(panel.told[row] > 0 and panel.bucket - panel.told[row] <= _DAY_S // panel.bucket_s)


def _course(panel: Panel, finding: Finding) -> str:
    window = _span(finding.window_s)
    if panel.row.is_count:
        total = f" ({panel.raw[finding.row]:g} in all)" if panel.row.law is Law.TOTAL else ""
        return f"counts {finding.rate_per_h:.3g} events an hour now, usual are {finding.usual:.3g}{total}"
    verb, kind = ("falls" if panel.row.falling else "rises"), " decades" if panel.row.decades else ""
    load = f" at equal {panel.row.load}" if panel.row.load else ""
    return f"{verb} {finding.rate_per_h:.3g}{kind} an hour{load}, seen over {window} in which healthy ones move {finding.usual:.2g}"


def _limit_unit(row: Watch) -> str:
    return {Law.RATE: " an hour", Law.TOTAL: " in all"}.get(row.law, " above its peers" if row.relative else "")


def _when(time_s: float) -> str:
    return "now" if time_s < SLOW_S else f"in about {_span(time_s)}"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"


def _of_hosts(frame: Frame) -> Frame:
    """What hosts report: the example needs no more, and each contract check runs through it."""
    ticks = tuple(replace(tick, families={"host": tick.families["host"]}) for tick in frame.ticks)
    return replace(frame, ticks=ticks)
