"""A line for every series that follows its history, its node's load and phase, and its peers; the only dial is a risk.

A value is out when it lies beyond what its own history explains *and* beyond what its peers in the same job do at the same moment, by more
than the tail of past excesses allows at the given risk, for several ticks. Such a verdict supports others; it never stands alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from detectors.base import AlignedTick, Detector, FamilyMatrix, Frame, series_evidence
from detectors.robust import median_of_known
from detectors.state import Array, decode_state, encode_state
from detectors.synthetic import Example, Scene, SyntheticCluster, node_name
from detectors.threshold.table import Table, is_logarithmic, transform
from trainwarden.records import Entity, EntityKind, Verdict
from trainwarden.settings import option
from trainwarden.topology import Topology

_STATES = frozenset(
    {"alive", "state", "phase", "last_step", "step_age_s", "up", "carrier", "role", "speed_mbps", "sent_count"}
)
"""Not measurements but states and positions: other detectors read them."""
_LOADS = frozenset({"cpu_busy_ratio", "cpu_user_ratio", "cpu_system_ratio", "load1", "runnable_tasks", "psi_cpu_some_ratio",
                    "context_switches_per_s"})  # fmt: skip
"""Are themselves the load, so the load cannot explain them."""
_DIGITS = re.compile(r"\d+")
_TRAINING_PHASE = 2


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
    """Values of a series since it left its line."""

    at_ns: list[int] = []
    values: list[float] = []
    expected: float = 0.0


class State(msgspec.Struct):
    """State of the detector: a table per family, excerpts of series beyond their line."""

    tables: dict[str, Table] = {}
    excerpts: dict[str, Excerpt] = {}


class ThresholdDetector(Detector):
    """Says `threshold` of single series."""

    name = "dynamic_threshold"
    kinds = ("threshold",)
    Settings = ThresholdSettings
    settings: ThresholdSettings
    supporting_per_hour: ClassVar[float] = 6.0
    """Verdicts an hour on four healthy nodes, at most (contract)."""

    def __init__(self, settings: ThresholdSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()

    @classmethod
    def example(cls) -> Example:
        """The disk of node 2 is busy from second 100 on."""
        busy = Scene(host={(2, "disk_busy_ratio"): 0.95})
        frames = SyntheticCluster(seed=1).frames(120, lambda second: busy if second >= 100 else None)
        return Example(frames, "threshold", _entity("host", node_name(2), "host", "disk_busy_ratio"))

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for tick in frame.ticks:
            jobs = {node: layout.job for layout in frame.topology.jobs() for node in layout.nodes}
            phases, loads = _phases(tick), _loads(tick)
            for name in sorted(tick.families):
                matrix = tick.families[name]
                if len(matrix.entities):
                    verdicts += self._family(tick, _measurements(matrix), jobs, phases, loads, frame.topology)
        return verdicts

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _family(self, tick: AlignedTick, matrix: FamilyMatrix, jobs: dict[str, str], phases: dict[str, int], loads: dict[str, float],
                topology: Topology) -> list[Verdict]:  # fmt: skip
        table = self._state.tables.setdefault(matrix.family, Table(matrix.family))
        rows = table.rows_of(matrix)
        raw = _in_order(matrix, table.metrics)
        values = transform(table.metrics, raw)
        phase = np.array([phases.get(node, 0) for node, _ in matrix.entities], dtype=np.int64)
        load = np.array([loads.get(node, np.nan) for node, _ in matrix.entities])
        expected = table.expected(rows, phase, load, np.array([metric not in _LOADS for metric in table.metrics]))
        residual = values - expected
        spread = table.spread_of(rows)
        score = _score(residual, _common_part(residual, _groups(matrix, jobs)), spread)
        warm = (table.seen[rows] >= self.settings.warm_ticks) & np.isfinite(score)
        limits = table.limits(self.settings.risk)
        beyond = warm & (np.nan_to_num(score) > limits)
        table.follow_tail(rows, np.nan_to_num(score), limits, warm & ~table.open[rows])
        verdicts = self._say(tick, matrix, table, rows, raw, expected, score, limits, beyond, topology)
        weight = np.where(table.open[rows], 0.2, 1.0) * self.settings.forgetting
        table.learn(rows, values, residual, phase, load, weight)
        return verdicts

    def _say(self, tick: AlignedTick, matrix: FamilyMatrix, table: Table, rows: Array, raw: Array, expected: Array, score: Array,
             limits: Array, beyond: Array, topology: Topology) -> list[Verdict]:  # fmt: skip
        known = np.isfinite(score)
        table.streak[rows] = np.where(beyond, table.streak[rows] + 1, np.where(known, 0, table.streak[rows]))
        table.calm[rows] = np.where(beyond, 0, table.calm[rows] + known)
        starts = (table.streak[rows] >= self.settings.persist_ticks) & ~table.open[rows]
        ends = table.open[rows] & (table.calm[rows] >= self.settings.calm_ticks)
        self._excerpts(tick, matrix, table, rows, raw, expected, beyond | table.open[rows])
        found = sorted(
            ((float(score[r, c]) / float(limits[c]), int(r), int(c)) for r, c in np.argwhere(starts)), reverse=True
        )
        verdicts = []
        for _, row, column in found[: self.settings.per_tick]:
            table.open[rows[row], column] = True
            verdicts.append(self._verdict(tick, matrix, table, row, column, score, limits, topology, clears=False))
        for row, column in np.argwhere(ends):
            table.open[rows[row], column] = False
            verdicts.append(
                self._verdict(tick, matrix, table, int(row), int(column), score, limits, topology, clears=True)
            )
            self._state.excerpts.pop(_key(matrix, table, int(row), int(column)), None)
        return verdicts

    def _excerpts(self, tick: AlignedTick, matrix: FamilyMatrix, table: Table, rows: Array, raw: Array, expected: Array,
                  watched: Array) -> None:  # fmt: skip
        mine = {
            _key(matrix, table, int(row), int(column)): (int(row), int(column)) for row, column in np.argwhere(watched)
        }
        for key, (row, column) in mine.items():
            excerpt = self._state.excerpts.setdefault(key, Excerpt())
            excerpt.at_ns = [*excerpt.at_ns[-19:], tick.at_ns]
            excerpt.values = [*excerpt.values[-19:], float(raw[row, column])]
            excerpt.expected = _back(table.metrics[column], float(expected[row, column]))
        prefix = f"{matrix.family}|"
        stale = [key for key in self._state.excerpts if key.startswith(prefix) and key not in mine]
        for key in stale:
            del self._state.excerpts[key]

    def _verdict(self, tick: AlignedTick, matrix: FamilyMatrix, table: Table, row: int, column: int, score: Array, limits: Array,
                 topology: Topology, clears: bool) -> Verdict:  # fmt: skip
        node, device = matrix.entities[row]
        metric = table.metrics[column]
        excerpt = self._state.excerpts.get(_key(matrix, table, row, column), Excerpt())
        layout = topology.job_of(node)
        value = excerpt.values[-1] if excerpt.values else float("nan")
        state = (
            "is back within its line"
            if clears
            else f"is {value:.4g}, its history, load and peers explain {excerpt.expected:.4g}"
        )
        times = excerpt.at_ns or [tick.at_ns]
        note = f"expected {excerpt.expected:.4g}; score {score[row, column]:.1f}, line {limits[column]:.1f}"
        name, unit = f"{matrix.family}.{metric} of {node}/{device}", metric.rpartition("_")[2]
        evidence = series_evidence(name, unit, times, excerpt.values or [value], note=note)
        return self.verdict(
            kind="threshold", entity=_entity(matrix.family, node, device, metric), window=(times[0], tick.at_ns), onset_at_ns=times[0],
            job=layout.job if layout else "", attempt=layout.attempt if layout else 0, score=float(np.nan_to_num(score[row, column])),
            value=value, high=excerpt.expected, confidence=0.5, text=f"{metric} of {node}/{device} {state}", clears=clears,
            evidence=(evidence,),
        )  # fmt: skip


def _entity(family: str, node: str, device: str, metric: str) -> Entity:
    return Entity(EntityKind.SERIES, f"{node}/{device}/{family}.{metric}", node)


def _key(matrix: FamilyMatrix, table: Table, row: int, column: int) -> str:
    node, device = matrix.entities[row]
    return f"{matrix.family}|{node}|{device}|{table.metrics[column]}"


def _measurements(matrix: FamilyMatrix) -> FamilyMatrix:
    keep = [number for number, metric in enumerate(matrix.metrics) if metric not in _STATES]
    order = sorted(range(len(matrix.entities)), key=lambda number: matrix.entities[number])
    metrics, entities = tuple(matrix.metrics[i] for i in keep), tuple(matrix.entities[i] for i in order)
    return FamilyMatrix(matrix.family, entities, metrics, matrix.values[np.ix_(order, keep)])


def _in_order(matrix: FamilyMatrix, metrics: Sequence[str]) -> Array:
    if tuple(metrics) == matrix.metrics:
        return matrix.values.astype(np.float64)
    return np.column_stack([matrix.column(metric) for metric in metrics]).astype(np.float64)


def _phases(tick: AlignedTick) -> dict[str, int]:
    """Each node's activity: 0 idle or starting, 1 training, 2 evaluation or save."""
    matrix = tick.family("process")
    if matrix is None:
        return {}
    found: dict[str, int] = {}
    for (node, _), phase in zip(matrix.entities, np.nan_to_num(matrix.column("phase")).tolist(), strict=True):
        activity = 1 if phase == _TRAINING_PHASE else 2 if phase > _TRAINING_PHASE else 0
        found[node] = max(found.get(node, 0), activity)
    return found


def _loads(tick: AlignedTick) -> dict[str, float]:
    matrix = tick.family("host")
    if matrix is None:
        return {}
    return {node: float(load) for (node, _), load in zip(matrix.entities, matrix.column("cpu_busy_ratio"), strict=True)}


def _groups(matrix: FamilyMatrix, jobs: dict[str, str]) -> list[Array]:
    """Rows of like devices on nodes of the same job."""
    found: dict[tuple[str, str], list[int]] = {}
    for row, (node, device) in enumerate(matrix.entities):
        like = "peer" if matrix.family == "mesh" else _DIGITS.sub("#", device)
        if node in jobs:
            found.setdefault((jobs[node], like), []).append(row)
    return [np.array(rows) for rows in found.values() if len(rows) >= 3]


def _common_part(residual: Array, groups: list[Array]) -> Array:
    """What all peers do at this moment: the median of their residuals, 0 without peers."""
    common = np.zeros_like(residual)
    for rows in groups:
        common[rows] = np.nan_to_num(median_of_known(residual[rows]))
    return common


def _score(residual: Array, common: Array, spread: Array) -> Array:
    """Distance from history or from the peers' common movement, whichever is smaller; 0 when the two disagree in direction."""
    against_peers = residual - common
    agree = np.sign(residual) == np.sign(against_peers)
    return np.asarray(
        np.where(agree | ~np.isfinite(residual), np.minimum(np.abs(residual), np.abs(against_peers)), 0.0) / spread
    )


def _back(metric: str, value: float) -> float:
    return float(np.sign(value) * np.expm1(abs(value))) if is_logarithmic(metric) else value
