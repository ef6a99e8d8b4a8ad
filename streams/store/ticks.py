"""Ticks as wide tables: float32 blocks go column by column into Arrow, never value by value through Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from streams.store.rows import sample_ms
from trainwarden.errors import DecodeError
from trainwarden.records import Block, Catalog, Placement, Tick

OTHER = "other_ticks"
TICK_TABLES = ("host_ticks", "process_ticks", "nic_ticks", "mesh_ticks", OTHER, "gaps")
_LABELS = ("ts", "cluster", "job", "attempt", "rank", "node", "device", "seq", "boot_id", "spooled", "arrived_at")

CatalogOf = Callable[[str], Catalog | None]
Labels = tuple[Any, ...]


@dataclass
class _Wide:
    """Rows of one wide table, still as blocks: `chunks` are (metric names, devices × metrics)."""

    labels: list[Labels] = field(default_factory=list)
    chunks: list[tuple[tuple[str, ...], NDArray[np.float32]]] = field(default_factory=list)


class TickTables:
    """Collects ticks and gives them back as Arrow tables.

    Parameters
    ----------
    schemas
        Arrow schema of every table of `TICK_TABLES` that the store has.
    catalog_of
        Catalogue by id; None while it is unknown.
    """

    def __init__(self, schemas: Mapping[str, Any], catalog_of: CatalogOf) -> None:
        self._schemas = schemas
        self._catalog_of = catalog_of
        self._wide: dict[str, _Wide] = {}
        self._other: list[tuple[Labels, str, str, float]] = []
        self._gaps: list[tuple[Labels, str, str]] = []

    def add(self, tick: Tick, arrived_ms: int) -> None:
        """Take a tick in, whole or not at all.

        Raises
        ------
        DecodeError
            When a block does not fit its catalogue, the catalogue is unknown, or the time cannot be true.
        """
        at_ms = sample_ms(tick.observed_at_ns, arrived_ms)
        if (misfit := _misfit(tick)) is not None:
            raise DecodeError(misfit)
        matrices = [(block, self._catalog(block), _matrix(block)) for block in tick.blocks]
        for block, catalog, matrix in matrices:
            if matrix.shape[1] != len(catalog.metrics):
                named = len(catalog.metrics)
                raise DecodeError(
                    f"block {block.family}: {matrix.shape[1]} columns, catalogue {block.catalog_id} names {named}"
                )
        for block, catalog, matrix in matrices:
            self._add_block(
                block, catalog, matrix, [_labels(tick, at_ms, device, arrived_ms) for device in block.devices]
            )
        label = _labels(tick, at_ms, "", arrived_ms)
        self._gaps.extend((label, gap.source, gap.reason) for gap in tick.gaps)

    def tables(self) -> dict[str, Any]:
        """Arrow table by name, only those that have rows."""
        found = {name: self._wide_table(name, wide) for name, wide in self._wide.items()}
        if self._other:
            found[OTHER] = self._other_table()
        if self._gaps:
            found["gaps"] = self._gap_table()
        return found

    def _catalog(self, block: Block) -> Catalog:
        catalog = self._catalog_of(block.catalog_id)
        if catalog is None:
            raise DecodeError(f"block {block.family}: catalogue {block.catalog_id!r} is not in tw.catalog")
        return catalog

    def _add_block(self, block: Block, catalog: Catalog, matrix: NDArray[np.float32], labels: list[Labels]) -> None:
        name = f"{block.family}_ticks"
        columns = set(self._schemas[name].names) if name in self._schemas and name != OTHER else set()
        metrics = tuple(metric.name for metric in catalog.metrics)
        known = [i for i, metric in enumerate(metrics) if metric in columns and metric not in _LABELS]
        if known:
            wide = self._wide.setdefault(name, _Wide())
            wide.labels.extend(labels)
            wide.chunks.append((tuple(metrics[i] for i in known), matrix[:, known]))
        for i in sorted(set(range(len(metrics))) - set(known)):
            present = np.flatnonzero(~np.isnan(matrix[:, i]))
            self._other.extend((labels[row], block.family, metrics[i], float(matrix[row, i])) for row in present)

    def _wide_table(self, name: str, wide: _Wide) -> Any:
        schema = self._schemas[name]
        columns = _label_columns(schema, wide.labels)
        for metric in schema.names:
            if metric not in _LABELS:
                columns[metric] = _metric_column(metric, wide)
        return _table(schema, columns)

    def _other_table(self) -> Any:
        schema = self._schemas[OTHER]
        columns = _label_columns(schema, [label for label, _, _, _ in self._other])
        columns["family"] = pa.array([family for _, family, _, _ in self._other])
        columns["metric"] = pa.array([metric for _, _, metric, _ in self._other])
        columns["value"] = pa.array([value for _, _, _, value in self._other], pa.float32())
        return _table(schema, columns)

    def _gap_table(self) -> Any:
        schema = self._schemas["gaps"]
        columns = _label_columns(schema, [label for label, _, _ in self._gaps])
        columns["source"] = pa.array([source for _, source, _ in self._gaps])
        columns["reason"] = pa.array([reason for _, _, reason in self._gaps])
        return _table(schema, columns)


def _matrix(block: Block) -> NDArray[np.float32]:
    if not block.devices or len(block.values) % (4 * len(block.devices)):
        raise DecodeError(
            f"block {block.family}: {len(block.values)} bytes do not divide into {len(block.devices)} devices of float32"
        )
    return np.frombuffer(block.values, dtype="<f4").reshape(len(block.devices), -1)


def _misfit(tick: Tick) -> str | None:
    """A number that no label column holds: found out only at the insert, it would spoil the whole batch."""
    if not 0 <= tick.seq < 1 << 64:
        return f"tick number {tick.seq}: ticks are counted from 0"
    for placement in tick.placements:
        if not (0 <= placement.attempt < 1 << 32 and -(1 << 31) <= placement.rank < 1 << 31):
            return (
                f"rank {placement.rank} in attempt {placement.attempt} of job {placement.job}: no job has such a rank"
            )
    return None


def _labels(tick: Tick, at_ms: int, device: str, arrived_ms: int) -> Labels:
    job, attempt, rank = placement_of(tick.placements, device)
    return (
        at_ms,
        tick.cluster,
        job,
        attempt,
        rank,
        tick.node,
        device,
        tick.seq,
        tick.boot_id,
        tick.spooled,
        arrived_ms,
    )


def placement_of(placements: tuple[Placement, ...], device: str) -> tuple[str, int, int]:
    """Job, attempt and rank of a device's samples.

    A device that one rank owns carries that rank. Samples of the whole node carry the job that runs there (none when several do) and
    the rank only when there is but one; rank -1 is "no single rank".
    """
    for placement in placements:
        if device in (f"rank{placement.rank}", placement.device):
            return placement.job, placement.attempt, placement.rank
    jobs = {(placement.job, placement.attempt) for placement in placements}
    if len(jobs) != 1:
        return "", 0, -1
    job, attempt = jobs.pop()
    return job, attempt, placements[0].rank if len(placements) == 1 else -1


def _metric_column(metric: str, wide: _Wide) -> Any:
    values = np.full(len(wide.labels), np.nan, dtype=np.float32)
    start = 0
    for names, matrix in wide.chunks:
        if metric in names:
            values[start : start + len(matrix)] = matrix[:, names.index(metric)]
        start += len(matrix)
    return pa.array(values, mask=np.isnan(values))


def _label_columns(schema: Any, labels: list[Labels]) -> dict[str, Any]:
    return {name: pa.array(values, schema.field(name).type)
            for name, values in zip(_LABELS, zip(*labels, strict=True), strict=True) if name in schema.names}  # fmt: skip


def _table(schema: Any, columns: Mapping[str, Any]) -> Any:
    names = [name for name in schema.names if name in columns]
    return pa.table([columns[name] for name in names], schema=pa.schema([schema.field(name) for name in names]))
