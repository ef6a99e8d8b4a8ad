"""Series whose source is broken: they stand still, jump back, or stop while the rest of their device goes on being reported.

That is news of the telemetry, not of the node: other detectors that lean on such a series lean on nothing. What most peers in the job do
as well, on most of its nodes, is the job's doing and not said: they all wait, or have ended. Nor is what stands still on three nodes.

The stated rate follows from the risk. A false opinion needs a run (of repeats, or of absence) of a length that health brings with the
probability `risk`; runs begin at looks, of which a series has one every `LOOK_EVERY` ticks, and at most every other look begins one. So a
series at 1 Hz has at most `false_per_day(risk)` = 2.2e-5 false opinions a day, and a node of 2,000 series 0.04. A jump back of a counter
is a restart of its source, and no false opinion.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.base import F32, AlignedTick, Detector, FamilyMatrix, Frame, series_evidence
from detectors.state import Array, decode_state, encode_state
from detectors.synthetic import Example, Scene, SyntheticCluster, node_name
from detectors.threshold.dynamic import series_entity
from detectors.threshold.peers import Fellows, FellowsState, Groups
from detectors.threshold.still import LOOK_EVERY, Broken, Stillness
from detectors.threshold.table import Roster
from trainwarden.records import Verdict
from trainwarden.settings import option
from trainwarden.topology import Topology

_RESET_HELD_TICKS = 60
_OTHER_NODES = 2
"""A run that health brings with probability r is half as long with probability √r: on two other nodes at once it has a cause they share."""
_SIZES = ("_bytes", "_count")
"""What a process holds moves while it grows and then stands, for hours, in health: seen live of the memory of training ranks."""
_WHY = {
    "stuck": "has stood still far longer than it ever does",
    "absent": "is no longer reported while the rest of its device is",
    "reset": "is a counter and jumped back",
}


@dataclass(frozen=True)
class StaleSettings:
    """Settings of `stale_series`."""

    risk: float = option(1e-9, "probability that a healthy series stands still, or is missing, for as long")
    per_tick: int = option(20, "verdicts per tick and family at most")


class Case(msgspec.Struct):
    """A series said to be stale: why, since when (its onset) and since how many ticks it has been said."""

    series: tuple[str, str, str]
    why: str
    onset_at_ns: int
    value: float
    ticks: int = 0


class FamilyState(msgspec.Struct):
    """State of one family."""

    entities: list[tuple[str, str]]
    metrics: list[str]
    absent: Array
    still: Stillness
    cases: dict[str, Case]
    ticks: int


class State(msgspec.Struct):
    """State of the detector."""

    families: dict[str, FamilyState] = {}
    fellows: FellowsState = msgspec.field(default_factory=FellowsState)


class _Watch:
    """One family's series."""

    def __init__(self, family: str, state: FamilyState | None = None) -> None:
        self.groups = Groups(family)
        self.roster = Roster(state.entities, state.metrics, state.absent) if state else Roster()
        self.still = state.still if state else Stillness.of(0, 0)
        self.cases = state.cases if state else {}
        self.ticks = state.ticks if state else 0

    def state(self) -> FamilyState:
        return FamilyState(
            self.roster.entities, self.roster.metrics, self.roster.absent, self.still, self.cases, self.ticks
        )

    def place(self, matrix: FamilyMatrix) -> tuple[F32, slice]:
        """The tick's measurements, and the rows of them that are due and filled in."""
        gone = self.roster.overdue()
        if gone.any():
            self.roster.keep(~gone)
            self.still = self.still.kept(~gone)
        shape = self.roster.seat(matrix)
        if self.still.last.shape != shape:
            self.still = self.still.grown(*shape)
        due = self.still.due(self.ticks)
        return self.roster.grid(matrix, due), due

    def series(self, row: int, column: int) -> tuple[str, str, str]:
        return (*self.roster.entities[row], self.roster.metrics[column])


class StaleSeriesDetector(Detector):
    """Says `stale_series` of single series."""

    name = "stale_series"
    version = 3
    kinds = ("stale_series",)
    Settings = StaleSettings
    settings: StaleSettings
    false_alarms_per_node_day: ClassVar[float] = 0.05
    """Opinions, none of which raises an alarm: `false_per_day` of up to 2,000 series, a fifth added (see the module). The contract allows
    nothing beside it."""

    def __init__(self, settings: StaleSettings | None = None) -> None:
        super().__init__(settings)
        self._watches: dict[str, _Watch] = {}
        self._fellows = Fellows()

    @classmethod
    def example(cls) -> Example:
        """The busy share of node 2 is the same number from second 80 on."""
        frozen = Scene(host={(2, "cpu_busy_ratio"): 0.613})
        frames = SyntheticCluster(seed=2).frames(125, lambda second: frozen if second >= 80 else None)
        return Example(frames, "stale_series", series_entity("host", node_name(2), "host", "cpu_busy_ratio"))

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for tick in frame.ticks:
            jobs = self._fellows.jobs(frame.topology, tick.at_ns)
            for family in sorted(tick.families):
                if len(tick.families[family].entities):
                    verdicts += self._family(tick, tick.families[family], jobs, frame.topology)
        return verdicts

    def snapshot(self) -> bytes:
        return encode_state(State({name: watch.state() for name, watch in self._watches.items()}, self._fellows.state))

    def restore(self, payload: bytes) -> None:
        state = decode_state(payload, State)
        self._watches = {name: _Watch(name, part) for name, part in state.families.items()}
        self._fellows = Fellows(state.fellows)

    def _family(
        self, tick: AlignedTick, matrix: FamilyMatrix, jobs: dict[str, str], topology: Topology
    ) -> list[Verdict]:
        watch = self._watches.get(matrix.family)
        if watch is None:
            watch = self._watches[matrix.family] = _Watch(matrix.family)
        grid, due = watch.place(matrix)
        watch.ticks += 1
        broken = watch.still.step(grid, self.settings.risk, due)
        verdicts = self._ends(tick, watch, matrix.family, due, broken, topology)
        found = self._found(watch, broken, due, jobs)
        new = [series for series in sorted(found) if _key(series) not in watch.cases]
        for series in new[: self.settings.per_tick]:
            why, run, value = found[series]
            case = Case(series, why, tick.at_ns - int(run) * tick.interval_ms * 1_000_000, value)
            watch.cases[_key(series)] = case
            verdicts.append(self._say(tick, matrix.family, case, topology, clears=False))
        return verdicts

    def _ends(
        self, tick: AlignedTick, watch: _Watch, family: str, due: slice, broken: Broken, topology: Topology
    ) -> list[Verdict]:
        verdicts = []
        if watch.cases:
            found = {watch.series(*pair) for _, pairs, _ in _broken(watch, broken) for pair in pairs.tolist()}
            for key, case in list(watch.cases.items()):
                case.ticks += 1
                if self._over(watch, case, due, found):
                    del watch.cases[key]
                    verdicts.append(self._say(tick, family, case, topology, clears=True))
        return verdicts

    @staticmethod
    def _over(watch: _Watch, case: Case, due: slice, found: Container[tuple[str, str, str]]) -> bool:
        """Whether a series moves again; one whose device is no longer known is nobody's."""
        if case.why == "reset":
            return case.ticks > _RESET_HELD_TICKS
        row = watch.roster.row_of(case.series[:2])
        return row is None or (due.start <= row < due.stop and case.series not in found)

    @staticmethod
    def _found(
        watch: _Watch, broken: Broken, due: slice, jobs: dict[str, str]
    ) -> dict[tuple[str, str, str], tuple[str, float, float]]:
        """Why, ticks since, value of each series found broken, but for what most of a job's are."""
        found: dict[tuple[str, str, str], tuple[str, float, float]] = {}
        for why, pairs, run in _broken(watch, broken):
            news = pairs[~_alike(watch, why, pairs, run, due, jobs)] if len(pairs) else pairs
            for row, column in news.tolist():
                since = 0.0 if run is None else LOOK_EVERY * float(run[row, column])
                found[watch.series(row, column)] = (why, since, float(watch.still.last[row, column]))
        return found

    def _say(self, tick: AlignedTick, family: str, case: Case, topology: Topology, clears: bool) -> Verdict:
        node, device, metric = case.series
        layout = topology.job_of(node)
        text = f"{metric} of {node}/{device} " + ("moves again" if clears else _WHY[case.why])
        evidence = series_evidence(f"{family}.{metric} of {node}/{device}", metric.rpartition("_")[2], [case.onset_at_ns, tick.at_ns],
                                   [case.value, case.value], note=_WHY[case.why])  # fmt: skip
        return self.verdict(
            kind="stale_series", entity=series_entity(family, node, device, metric), window=(case.onset_at_ns, tick.at_ns),
            onset_at_ns=case.onset_at_ns, job=layout.job if layout else "", attempt=layout.attempt if layout else 0,
            score=float(-np.log10(self.settings.risk)), value=case.value, confidence=0.8, text=text, clears=clears, evidence=(evidence,),
        )  # fmt: skip


def false_per_day(risk: float, interval_ms: int = 1000) -> float:
    """False opinions of one healthy series in a day, at most: half of its looks can begin a run of repeats, the other half one of absence.

    Examples
    --------
    >>> f"{2000 * false_per_day(1e-9):.3f}"
    '0.043'
    """
    looks = 86_400_000 / interval_ms / LOOK_EVERY
    return looks * risk


def _broken(watch: _Watch, broken: Broken) -> list[tuple[str, NDArray[np.int64], F32 | None]]:
    """Why, (row, column) pairs, and the runs they are in, of what is worth saying.

    A series that stands at zero is idle and a share that stands at one is full: neither is stuck.
    """
    if not (len(broken.stuck) or len(broken.absent) or len(broken.reset)):
        return []
    last, here, metrics = watch.still.last, watch.roster.absent == 0, watch.roster.metrics
    row, column = broken.stuck[:, 0], broken.stuck[:, 1]
    full = np.array([1.0 if metric.endswith("_ratio") else np.nan for metric in metrics])[column]
    held = np.array([metric.endswith(_SIZES) for metric in metrics], np.bool_)[column]
    value = last[row, column]
    stuck = broken.stuck[(value != 0) & (value != full) & ~held]
    parts = (
        ("absent", broken.absent, watch.still.away),
        ("stuck", stuck, watch.still.run),
        ("reset", broken.reset, None),
    )
    return [(why, pairs[here[pairs[:, 0]]], run) for why, pairs, run in parts]


def _alike(
    watch: _Watch, why: str, pairs: NDArray[np.int64], run: F32 | None, due: slice, jobs: dict[str, str]
) -> NDArray[np.bool_]:
    """Which pairs do what most of their peers do: stand, or are missing, for at least half as long, or were reset at this look too.

    Of what stands, peers on two other nodes are enough: links that carry all they can stand at their ceilings together, each at its own.
    """
    roster, alike = watch.roster, np.zeros(len(pairs), np.bool_)
    groups = watch.groups.of(roster.entities, roster.changes, jobs)
    number = watch.groups.numbers(len(roster.entities))[pairs[:, 0]]
    for group, column in sorted({(int(g), int(c)) for g, c in zip(number, pairs[:, 1], strict=True) if g >= 0}):
        rows = groups[group].rows
        mine = np.flatnonzero((number == group) & (pairs[:, 1] == column))
        known = roster.absent[rows] == 0
        if run is None:
            known &= (rows >= due.start) & (rows < due.stop)
            part = np.isin(rows, pairs[mine, 0])
            alike[mine] = groups[group].moves(part[:, None], known[:, None])[0]
            continue
        runs = run[pairs[mine, 0], column]
        for length in np.unique(runs):
            part = known & (run[rows, column] >= length / 2)
            these = mine[runs == length]
            alike[these] = groups[group].moves(part[:, None], known[:, None])[0]
            if why == "stuck":
                nodes = {roster.entities[row][0] for row in rows[part].tolist()}
                alike[these] |= len(nodes) > _OTHER_NODES
    return alike


def _key(series: tuple[str, str, str]) -> str:
    return "\0".join(series)
