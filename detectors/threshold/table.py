"""Names of the series of one family, and their lines: entities are rows, metrics columns, whatever order and subset a tick brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.base import F32, FamilyMatrix
from detectors.seats import seats
from detectors.state import Array
from detectors.threshold.lines import Lines, LineSettings, LinesState, row_blocks
from detectors.threshold.peers import Groups, common, drifts_shared
from detectors.threshold.places import PHASES

STATES = frozenset(
    {"alive", "state", "phase", "last_step", "step_age_s", "up", "carrier", "role", "speed_mbps", "sent_count"}
)
"""Not measurements but states and positions: other detectors read them."""
_LOADS = frozenset({"cpu_busy_ratio", "cpu_user_ratio", "cpu_system_ratio", "load1", "runnable_tasks", "psi_cpu_some_ratio",
                    "context_switches_per_s"})  # fmt: skip
"""Are themselves the load, so the load cannot explain them."""
_FORGET_ENTITY_TICKS = 600
_BLOCK_SERIES = 65_536
"""Series that are brought to the scale they are compared on at a time: they stay in the cache meanwhile."""
_LOG_SUFFIXES = ("_per_s", "_bytes", "_ms", "_count")
_LOG_FLOOR, _RATIO_FLOOR, _FLOOR, _RELATIVE_FLOOR = 0.12, 0.012, 1e-6, 0.02


class Roster:
    """Which row an entity has and which column a metric; both keep their number until the entity has long been absent."""

    def __init__(
        self, entities: Sequence[tuple[str, str]] = (), metrics: Sequence[str] = (), absent: Array | None = None
    ) -> None:
        self.entities, self.metrics = list(entities), list(metrics)
        self.absent = np.zeros(len(self.entities), np.int64) if absent is None else absent
        self._row = {entity: row for row, entity in enumerate(self.entities)}
        self._seen: list[tuple[tuple[tuple[str, str], ...], NDArray[np.int64]]] = []
        """Rows of the entities seated last, and before: of many nodes one misses a tick every few seconds."""
        self.changes = 0
        """Grows whenever rows are added or dropped."""

    def overdue(self) -> NDArray[np.bool_]:
        """Rows that have been absent for too long."""
        return np.asarray(self.absent > _FORGET_ENTITY_TICKS)

    def row_of(self, entity: tuple[str, str]) -> int | None:
        """Row of an entity, None when it is not known."""
        return self._row.get(entity)

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Forget all rows but these."""
        self.entities = [entity for entity, kept in zip(self.entities, rows.tolist(), strict=True) if kept]
        self._row = {entity: row for row, entity in enumerate(self.entities)}
        self.absent, self._seen = self.absent[rows], []
        self.changes += 1

    def seat(self, matrix: FamilyMatrix) -> tuple[int, int]:
        """Give the matrix's entities rows and its metrics columns, new ones at the end; how many there are of both."""
        self.metrics += [metric for metric in _measured(matrix) if metric not in self.metrics]
        self._rows(matrix.entities)
        return len(self.entities), len(self.metrics)

    def place(self, matrix: FamilyMatrix) -> F32:
        """The matrix's measurements in the roster's rows and columns, new ones added; NaN where it has none."""
        self.seat(matrix)
        return self.grid(matrix)

    def grid(self, matrix: FamilyMatrix, due: slice | None = None) -> F32:
        """The measurements of the matrix that was seated last. With `due` only these rows are filled in, the others hold anything."""
        metrics, rows = _measured(matrix), self._seats()
        source = [matrix.metrics.index(metric) for metric in metrics]
        whole = len(rows) == len(self.entities) and bool((rows == np.arange(len(rows))).all())
        if whole and metrics == self.metrics:
            return matrix.values if len(metrics) == len(matrix.metrics) else _some_columns(matrix.values, source, due)
        grid = np.full((len(self.entities), len(self.metrics)), np.nan, np.float32)
        if metrics == self.metrics:  # somebody is absent: whole rows at a time
            grid[rows] = _some_columns(matrix.values, source, None)
            return grid
        columns = np.array([self.metrics.index(metric) for metric in metrics], dtype=np.int64)
        grid[np.ix_(rows, columns)] = matrix.values[:, source]
        return grid

    def _seats(self) -> NDArray[np.int64]:
        """Rows of the entities seated last."""
        assert self._seen, "a matrix is seated before it is placed"
        return self._seen[0][1]

    def _rows(self, entities: tuple[tuple[str, str], ...]) -> None:
        for number, (known, _) in enumerate(self._seen):
            if known is entities or known == entities:
                self._seen.insert(0, self._seen.pop(number))
                break
        else:
            self._seen = [(entities, self._seated(entities)), *self._seen[:1]]
        self.absent += 1
        self.absent[self._seen[0][1]] = 0

    def _seated(self, entities: tuple[tuple[str, str], ...]) -> NDArray[np.int64]:
        rows = seats(entities, self.entities)
        if not len(rows) or rows.min() >= 0:
            return rows
        new = sorted(entity for entity in entities if entity not in self._row)
        self._row.update({entity: len(self.entities) + number for number, entity in enumerate(new)})
        self.entities += new
        self.absent = np.concatenate([self.absent, np.zeros(len(new), np.int64)])
        self.changes += 1
        return np.array([self._row[entity] for entity in entities], dtype=np.int64)


def _measured(matrix: FamilyMatrix) -> list[str]:
    return [metric for metric in matrix.metrics if metric not in STATES and metric not in matrix.states]


def _some_columns(values: F32, columns: Sequence[int], due: slice | None) -> F32:
    """These columns (in the order they have) of all rows, or of rows `due` only: whole runs of neighbours at a time, for an index list
    takes value after value."""
    at, out = due or slice(None), np.empty((len(values), len(columns)), np.float32)
    starts = [i for i, column in enumerate(columns) if i == 0 or column != columns[i - 1] + 1]
    for first, last in pairwise([*starts, len(columns)]):
        out[at, first:last] = values[at, columns[first] : columns[first] + last - first]
    return out


@dataclass(frozen=True)
class PerNode:
    """A value of each node; `names` is the same object as before where the nodes are the same."""

    names: dict[str, int]
    values: F32


NOBODY = PerNode({}, np.zeros(0, np.float32))


class Owners:
    """Which node each row of a family belongs to, for as long as its rows stay the same."""

    def __init__(self) -> None:
        self._entities: tuple[tuple[str, str], ...] = ()
        self._names: dict[str, int] = {}
        self._owner = self._order = self._starts = np.zeros(0, np.int64)

    def highest(self, matrix: FamilyMatrix, values: F32) -> PerNode:
        """Largest value of each node's rows."""
        self._learn(matrix.entities)
        return PerNode(self._names, np.maximum.reduceat(values[self._order], self._starts) if len(values) else values)

    def last(self, matrix: FamilyMatrix, values: F32) -> PerNode:
        """Value of each node's last row."""
        self._learn(matrix.entities)
        out = np.empty(len(self._names), np.float32)
        out[self._owner] = values
        return PerNode(self._names, out)

    def _learn(self, entities: tuple[tuple[str, str], ...]) -> None:
        if self._entities is entities or self._entities == entities:
            return
        names: dict[str, int] = {}
        owner = [names.setdefault(node, len(names)) for node, _ in entities]
        if names.keys() != self._names.keys() or list(names) != list(self._names):
            self._names = names
        self._entities, self._owner = entities, np.array(owner, np.int64)
        self._order = np.argsort(self._owner, kind="stable")
        self._starts = np.searchsorted(self._owner[self._order], np.arange(len(names)))


class TableState(msgspec.Struct):
    """State of a `Table`."""

    entities: list[tuple[str, str]]
    metrics: list[str]
    absent: Array
    lines: LinesState


class Table:
    """Lines of one family.

    Parameters
    ----------
    family
        Whose series.
    settings
        Of the lines.
    state
        What an earlier table knew.
    """

    def __init__(self, family: str, settings: LineSettings, state: TableState | None = None) -> None:
        self.family = family
        self.roster = Roster(state.entities, state.metrics, state.absent) if state else Roster()
        self.lines = Lines(len(self.roster.entities), len(self.roster.metrics), settings, phases=PHASES, alike=True)
        self._describe()
        if state:
            self.lines.state = state.lines
        self._peers = Groups(family)
        self._nodes: tuple[int, list[str], NDArray[np.int64]] | None = None
        self._places: dict[float, tuple[dict[str, int], NDArray[np.int64]]] = {}
        self._compared = np.zeros((0, 0), np.float32)

    def state(self) -> TableState:
        """What this table knows."""
        return TableState(self.roster.entities, self.roster.metrics, self.roster.absent, self.lines.state)

    def place(self, matrix: FamilyMatrix) -> F32:
        """The tick's measurements, in this table's order (see `Roster.place`); the lines grow and shrink with it."""
        gone = self.roster.overdue()
        if gone.any():
            self.roster.keep(~gone)
            self.lines.keep(~gone)
        shape = self.roster.seat(matrix)
        if self.lines.shape != shape:
            self.lines.grow(*shape)
            self._describe()
        return self.roster.grid(matrix)

    def _describe(self) -> None:
        metrics = self.roster.metrics
        self._plain = np.array([not is_logarithmic(metric) for metric in metrics], np.bool_)
        floor = np.array([_floor(metric) for metric in metrics], np.float32)
        relative = np.array([0.0 if is_logarithmic(metric) else _RELATIVE_FLOOR for metric in metrics], np.float32)
        follows = np.array([metric not in _LOADS for metric in metrics], np.float32)
        self.lines.set_columns(len(metrics), floor, relative, follows)

    def transform(self, grid: F32) -> F32:
        """Values as they are compared: log(1 + x) of rates, sizes and times. Good until the next call."""
        if self._plain.all():
            return grid
        if self._compared.shape != grid.shape:
            self._compared = np.empty(grid.shape, np.float32)
        for at in row_blocks(grid.shape[0], grid.shape[1], _BLOCK_SERIES):
            own = grid[at]
            out = np.abs(own, out=self._compared[at])
            # all columns and then some of them back: gathering and scattering those meant costs more
            np.log(np.add(out, np.float32(1.0), out=out), out=out)
            np.copysign(out, own, out=out)
            np.copyto(out, own, where=self._plain)
        return self._compared

    def per_row(self, of_node: PerNode, default: float) -> F32:
        """A value of each row's node."""
        if self._nodes is None or self._nodes[0] != self.roster.changes:
            names, owner = np.unique([node for node, _ in self.roster.entities], return_inverse=True)
            self._nodes = self.roster.changes, [str(name) for name in names], owner
            self._places = {}
        known = self._places.get(default)
        if known is None or known[0] is not of_node.names:
            places = np.array([of_node.names.get(name, -1) for name in self._nodes[1]], np.int64)
            known = self._places[default] = of_node.names, places
        values = np.append(of_node.values, np.float32(default))
        return np.asarray(values[known[1]][self._nodes[2]], np.float32)

    def common(self, compared: F32, load: F32, phase: Array, jobs: dict[str, str]) -> F32 | None:
        """What like devices of the same job do at this moment beyond what is expected of them; None without peers."""
        return common(
            self.lines, compared, load, phase, self._peers.of(self.roster.entities, self.roster.changes, jobs)
        )

    def news_of(
        self, shifts: NDArray[np.int64], compared: F32, phase: Array, jobs: dict[str, str]
    ) -> NDArray[np.int64]:
        """Those of these (row, column) shifts that are neither the job's nor the load's doing; the others are not asked about again."""
        groups = self._peers.of(self.roster.entities, self.roster.changes, jobs)
        shared = drifts_shared(self.lines, shifts, groups, self._peers.numbers(len(self.roster.entities)))
        excused = shared | ~self.lines.apart_without_load(shifts, compared, phase)
        self.lines.keep_silent(shifts[excused])
        return np.asarray(shifts[~excused])

    def raw(self, column: int, value: float) -> float:
        """A compared value in the unit of its metric."""
        return float(np.sign(value) * np.expm1(abs(value))) if is_logarithmic(self.roster.metrics[column]) else value


def is_logarithmic(metric: str) -> bool:
    """Whether a metric spreads over orders of magnitude, so that ratios count and not differences."""
    return metric.endswith(_LOG_SUFFIXES)


def _floor(metric: str) -> float:
    if is_logarithmic(metric):
        return _LOG_FLOOR
    return _RATIO_FLOOR if metric.endswith("_ratio") else _FLOOR
