"""One row per node: the mean over its devices of every measurement of every family."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import AlignedTick, FamilyMatrix
from detectors.seats import seats

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

_STATES = frozenset({
    "alive", "state", "phase", "last_step", "step_age_s", "up", "carrier", "role", "speed_mbps", "sent_count", "xid_last",
    "clocks_event_reasons", "pcie_link_gen", "pcie_link_width",
    "row_remap_pending", "row_remap_failure", "power_supplies_ok", "kubelet_ready",
})  # fmt: skip
"""States and positions, not measurements: rules read them."""
_RATES = ("_per_s", "_bytes", "_ms", "_count")


@dataclass
class _Layout:
    """Where the rows of a family go: `owner` is the number of each row's node, `order` sorts them by it (None when they are sorted), and
    `starts` begins each of `nodes`."""

    entities: tuple[tuple[str, str], ...]
    nodes: list[str]
    owner: I64
    order: I64 | None
    starts: I64
    sizes: I64


@dataclass
class _Measured:
    """Which columns of a family are measurements, their names, and which of them are compared as logarithms."""

    metrics: tuple[str, ...]
    states: frozenset[str]
    kept: I64
    names: list[str]
    logarithmic: I64


@dataclass
class NodeTables:
    """Makes tables of ticks; remembers where rows go as long as a family's rows stay the same, and nothing that changes an answer."""

    _layouts: dict[str, list[_Layout]] = field(default_factory=dict)
    _measured: dict[str, _Measured] = field(default_factory=dict)
    _nodes: tuple[list[list[str]], list[str]] = field(default_factory=lambda: ([], []))
    _features: list[str] = field(default_factory=list)

    def of(self, tick: AlignedTick) -> tuple[list[str], list[str], F32]:
        """Sorted nodes, sorted features (``family.metric``) and values, rates and sizes as logarithms; NaN where nothing is reported.

        Nodes and features are the same objects as before where they are the same; not to be changed.
        """
        parts = [self._part(tick.families[name]) for name in sorted(tick.families) if len(tick.families[name].entities)]
        nodes = self._all_nodes([part_nodes for part_nodes, _, _ in parts])
        columns: dict[str, F32] = {}
        for part_nodes, names, means in parts:
            whole = means if part_nodes is nodes or part_nodes == nodes else _spread(means, part_nodes, nodes)
            columns.update({name: whole[:, i] for i, name in enumerate(names)})
        features = sorted(columns)
        self._features = self._features if features == self._features else features
        empty = np.zeros((len(nodes), 0), dtype=np.float32)
        return nodes, self._features, np.stack([columns[f] for f in features], axis=1) if features else empty

    def _all_nodes(self, parts: list[list[str]]) -> list[str]:
        """Every node of any family, sorted."""
        known, nodes = self._nodes
        if len(parts) != len(known) or not all(map(operator.is_, parts, known)):
            found = sorted({node for part in parts for node in part})
            self._nodes = parts, nodes if found == nodes else found
        return self._nodes[1]

    def _part(self, matrix: FamilyMatrix) -> tuple[list[str], list[str], F32]:
        layout, measured = self._layout(matrix), self._columns(matrix)
        kept = measured.kept
        values = matrix.values[:, kept] if layout.order is None else matrix.values[np.ix_(layout.order, kept)]
        known = np.isfinite(values)
        whole = bool(known.all())
        sums = _of_nodes(values if whole else np.where(known, values, np.float32(0)), layout, np.float64)
        counts = layout.sizes if whole else _of_nodes(known, layout, np.int64)
        means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        large = means[:, measured.logarithmic]
        means[:, measured.logarithmic] = np.sign(large) * np.log1p(np.abs(large))
        return layout.nodes, measured.names, means.astype(np.float32)

    def _columns(self, matrix: FamilyMatrix) -> _Measured:
        found = self._measured.get(matrix.family)
        if found is None or found.metrics != matrix.metrics or found.states != matrix.states:
            states = _STATES | matrix.states
            kept = [i for i, metric in enumerate(matrix.metrics) if metric not in states]
            names = [f"{matrix.family}.{matrix.metrics[i]}" for i in kept]
            logarithmic = [number for number, i in enumerate(kept) if matrix.metrics[i].endswith(_RATES)]
            found = _Measured(matrix.metrics, matrix.states, _numbers(kept), names, _numbers(logarithmic))
            self._measured[matrix.family] = found
        return found

    def _layout(self, matrix: FamilyMatrix) -> _Layout:
        """Of many nodes one misses a tick every few seconds: so what was before the newest change is kept, too."""
        kept = self._layouts.setdefault(matrix.family, [])
        for number, layout in enumerate(kept):
            if layout.entities is matrix.entities or layout.entities == matrix.entities:
                kept.insert(0, kept.pop(number))
                return layout
        made = (_layout_within(matrix.entities, kept[0]) if kept else None) or _layout_of(matrix.entities)
        self._layouts[matrix.family] = [made, *kept[:1]]
        return made


def _of_nodes(values: NDArray[Any], layout: _Layout, kind: type[np.float64 | np.int64]) -> NDArray[Any]:
    """Sums over the rows of each node, one after the other; where all nodes have as many, of all nodes at once, at a tenth of the cost."""
    each = int(layout.sizes[0, 0])
    if not (layout.sizes == each).all():
        return np.asarray(np.add.reduceat(values, layout.starts, axis=0, dtype=kind))
    parts = values.reshape(len(layout.sizes), each, values.shape[1])
    sums = parts[:, 0].astype(kind)
    for number in range(1, each):
        sums += parts[:, number]
    return sums


def _layout_of(entities: tuple[tuple[str, str], ...]) -> _Layout:
    owners = [node for node, _ in entities]
    nodes = sorted(set(owners))
    place = {node: row for row, node in enumerate(nodes)}
    return _made(entities, nodes, _numbers([place[node] for node in owners]))


def _layout_within(entities: tuple[tuple[str, str], ...], known: _Layout) -> _Layout | None:
    """The same where all rows were there before: some node is absent."""
    rows = seats(entities, known.entities)
    if not len(rows) or rows.min() < 0:
        return None
    here, owner = np.unique(known.owner[rows], return_inverse=True)
    return _made(entities, [known.nodes[number] for number in here.tolist()], owner.astype(np.int64, copy=False))


def _made(entities: tuple[tuple[str, str], ...], nodes: list[str], owner: I64) -> _Layout:
    order = np.argsort(owner, kind="stable")
    starts = np.searchsorted(owner[order], np.arange(len(nodes)))
    sizes = np.diff(np.append(starts, len(entities)))[:, None]
    return _Layout(
        entities, nodes, owner, None if bool((order == np.arange(len(order))).all()) else order, starts, sizes
    )


def _numbers(numbers: list[int]) -> I64:
    return np.array(numbers, dtype=np.int64)


def _spread(means: F32, here: list[str], nodes: list[str]) -> F32:
    place = {node: row for row, node in enumerate(nodes)}
    whole = np.full((len(nodes), means.shape[1]), np.nan, dtype=np.float32)
    whole[[place[node] for node in here]] = means
    return whole


def node_table(tick: AlignedTick) -> tuple[list[str], list[str], F32]:
    """The table of one tick."""
    return NodeTables().of(tick)


def unscaled(feature: str, value: float) -> float:
    """A table value in the metric's own unit."""
    return float(np.sign(value) * np.expm1(abs(value))) if feature.endswith(_RATES) else value


def plain(feature: str, value: float) -> str:
    """A table value as a reader knows it."""
    return f"{unscaled(feature, float(value)):.3g}"
