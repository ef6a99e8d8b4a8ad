"""One row per node: the mean over its devices of every measurement of every family."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base import AlignedTick, FamilyMatrix

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
    """Where the rows of a family go: `order` sorts them by node (None when they are sorted), `starts` begins each of `nodes`."""

    entities: tuple[tuple[str, str], ...]
    nodes: list[str]
    order: I64 | None
    starts: I64


@dataclass
class NodeTables:
    """Makes tables of ticks; remembers where rows go as long as a family's rows stay the same, and nothing that changes an answer."""

    _layouts: dict[str, _Layout] = field(default_factory=dict)

    def of(self, tick: AlignedTick) -> tuple[list[str], list[str], F32]:
        """Sorted nodes, sorted features (``family.metric``) and values, rates and sizes as logarithms; NaN where nothing is reported."""
        parts = [self._part(tick.families[name]) for name in sorted(tick.families) if len(tick.families[name].entities)]
        nodes = sorted({node for part_nodes, _, _ in parts for node in part_nodes})
        columns: dict[str, F32] = {}
        for part_nodes, names, means in parts:
            whole = means if part_nodes == nodes else _spread(means, part_nodes, nodes)
            columns.update({name: whole[:, i] for i, name in enumerate(names)})
        features = sorted(columns)
        empty = np.zeros((len(nodes), 0), dtype=np.float32)
        return nodes, features, np.stack([columns[f] for f in features], axis=1) if features else empty

    def _part(self, matrix: FamilyMatrix) -> tuple[list[str], list[str], F32]:
        layout = self._layout(matrix)
        states = _STATES | matrix.states
        kept = np.array([i for i, metric in enumerate(matrix.metrics) if metric not in states], dtype=np.int64)
        values = matrix.values[:, kept] if layout.order is None else matrix.values[np.ix_(layout.order, kept)]
        known = np.isfinite(values)
        whole = bool(known.all())
        sums = np.add.reduceat(
            values if whole else np.where(known, values, np.float32(0)), layout.starts, axis=0, dtype=np.float64
        )
        sizes = np.diff(np.append(layout.starts, len(values)))[:, None]
        counts = sizes if whole else np.add.reduceat(known, layout.starts, axis=0, dtype=np.int64)
        means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        logarithmic = np.array([matrix.metrics[i].endswith(_RATES) for i in kept], dtype=np.bool_)
        means[:, logarithmic] = np.sign(means[:, logarithmic]) * np.log1p(np.abs(means[:, logarithmic]))
        return layout.nodes, [f"{matrix.family}.{matrix.metrics[i]}" for i in kept], means.astype(np.float32)

    def _layout(self, matrix: FamilyMatrix) -> _Layout:
        kept = self._layouts.get(matrix.family)
        if kept is not None and kept.entities == matrix.entities:
            return kept
        owners = [node for node, _ in matrix.entities]
        nodes = sorted(set(owners))
        place = {node: row for row, node in enumerate(nodes)}
        rows = np.array([place[node] for node in owners], dtype=np.int64)
        order = np.argsort(rows, kind="stable")
        starts = np.searchsorted(rows[order], np.arange(len(nodes)))
        made = _Layout(matrix.entities, nodes, None if bool((order == np.arange(len(order))).all()) else order, starts)
        self._layouts[matrix.family] = made
        return made


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
