"""Ticks as wide tables: float32 blocks go column by column into Arrow, labels as numbers, never value by value through Python.

Rows leave in the order of the tables' key, which the engine then need not bring about, column by column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from streams.store.rows import sample_ms
from streams.store.words import ATTEMPT, DEVICE, JOB, RANK, Codes, Layout, Owners, Ranked, placement_of
from trainwarden.errors import DecodeError
from trainwarden.records import Catalog

__all__ = ["OTHER", "TICK_TABLES", "Owners", "TickTables", "placement_of"]

OTHER = "other_ticks"
TICK_TABLES = (
    "host_ticks", "process_ticks", "nic_ticks", "mesh_ticks", "gpu_ticks", "gpu_instance_ticks", "port_ticks", "rdma_ticks",
    "pcie_ticks", "board_ticks", "machine_ticks", "nvme_ticks", "mount_ticks", OTHER, "gaps",
)  # fmt: skip
_LABELS = frozenset(
    ("ts", "cluster", "job", "attempt", "rank", "node", "device", "seq", "boot_id", "spooled", "arrived_at")
)
MINUTE_MS = 60_000

CatalogOf = Callable[[str], Catalog | None]
Indices = NDArray[np.intp]
Columns = dict[str, Any]


@dataclass
class _Family:
    """Blocks of one family that fit their catalogues."""

    ticks: list[int] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    catalogs: list[str] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)

    def add(self, tick: int, layout: Layout, block: Any) -> None:
        self.ticks.append(tick)
        self.layouts.append(layout)
        self.catalogs.append(block.catalog_id)
        self.values.append(block.values)


class _Heads(NamedTuple):
    """What is the same for all devices of a tick, one row for each tick."""

    ts: Codes
    arrived_at: Codes
    seq: NDArray[np.uint64]
    spooled: NDArray[np.bool_]
    cluster: Ranked
    node: Ranked
    boot_id: Ranked

    def columns(self, ticks: Indices) -> Columns:
        """Repeated for each of `ticks`."""
        times = {name: pa.array(getattr(self, name)[ticks]) for name in ("ts", "arrived_at", "seq", "spooled")}
        return times | {name: getattr(self, name).taken(ticks).column() for name in ("cluster", "node", "boot_id")}


class TickTables:
    """Collects ticks and gives them back as Arrow tables.

    Parameters
    ----------
    schemas
        Arrow schema of every table of `TICK_TABLES` that the store has.
    catalog_of
        Catalogue by id; None while it is unknown.
    owners
        What is known of the devices' ranks, from earlier batches.
    """

    def __init__(self, schemas: Mapping[str, Any], catalog_of: CatalogOf, owners: Owners | None = None) -> None:
        self._schemas = schemas
        self._catalog_of = catalog_of
        self._owners = owners or Owners()
        self._owners.trim()
        self._catalogs: dict[str, Catalog] = {}
        self._ticks: list[tuple[int, int, int, bool, int, int, int]] = []
        self._families: dict[str, _Family] = {}
        self._gaps: list[tuple[int, int, int, int, str, str]] = []

    def add(self, tick: Any, arrived_ms: int) -> None:
        """Take a tick in (a `LeanTick`), whole or not at all.

        Raises
        ------
        DecodeError
            When a block does not fit its catalogue, the catalogue is unknown, or the time cannot be true.
        """
        at_ms = sample_ms(tick.observed_at_ns, arrived_ms)
        if tick.seq < 0:
            raise DecodeError(f"tick number {tick.seq}: ticks are counted from 0")
        node = self._owners.of(tick.node, bytes(tick.placements))
        layouts = [node.layout(bytes(block.devices)) for block in tick.blocks]
        for block, layout in zip(tick.blocks, layouts, strict=True):
            self._check(block, layout.devices)
        number, code = len(self._ticks), self._owners.words.code
        self._ticks.append(
            (at_ms, arrived_ms, tick.seq, tick.spooled, code(tick.cluster), code(tick.node), code(tick.boot_id))
        )
        for block, layout in zip(tick.blocks, layouts, strict=True):
            family = self._families.get(block.family)
            if family is None:
                family = self._families[block.family] = _Family()
            family.add(number, layout, block)
        if tick.gaps:
            job, attempt, rank = placement_of(node.placements, "")
            self._gaps.extend((number, code(job), attempt, rank, gap.source, gap.reason) for gap in tick.gaps)

    def tables(self) -> dict[str, Any]:
        """Arrow table by name, only those that have rows."""
        found: dict[str, Any] = {}
        others: list[Any] = []
        heads = self._heads() if self._ticks else None
        for name, family in self._families.items():
            assert heads is not None  # a block has a tick
            sheet = _sheet(name, family, heads, self._owners, self._catalogs)
            table = f"{name}_ticks"
            columns = set(self._schemas[table].names) if table in self._schemas and table != OTHER else set()
            if (wide := sheet.wide(columns - _LABELS)) is not None:
                found[table] = _table(self._schemas[table], wide)
            others.extend(_table(self._schemas[OTHER], other) for other in sheet.others(columns - _LABELS))
        if others:
            found[OTHER] = pa.concat_tables(others).combine_chunks()
        if self._gaps and heads is not None:
            found["gaps"] = self._gap_table(heads)
        return found

    def _check(self, block: Any, devices: int) -> None:
        catalog = self._catalogs.get(block.catalog_id) or self._catalog(block)
        named = len(catalog.metrics)
        if len(block.values) == 4 * devices * named and devices:
            return
        if not devices or len(block.values) % (4 * devices):
            raise DecodeError(
                f"block {block.family}: {len(block.values)} bytes do not divide into {devices} devices of float32"
            )
        width = len(block.values) // (4 * devices)
        raise DecodeError(f"block {block.family}: {width} columns, catalogue {block.catalog_id} names {named}")

    def _catalog(self, block: Any) -> Catalog:
        catalog = self._catalog_of(block.catalog_id)
        if catalog is None:
            raise DecodeError(f"block {block.family}: catalogue {block.catalog_id!r} is not in tw.catalog")
        self._catalogs[block.catalog_id] = catalog
        return catalog

    def _heads(self) -> _Heads:
        ts, arrived, seq, spooled, *codes = zip(*self._ticks, strict=True)
        ranked = [self._owners.words.ranked(np.array(column, dtype=np.int64)) for column in codes]
        times = np.array(ts, dtype=np.int64), np.array(arrived, dtype=np.int64)
        return _Heads(*times, np.array(seq, dtype=np.uint64), np.array(spooled, dtype=np.bool_), *ranked)

    def _gap_table(self, heads: _Heads) -> Any:
        numbers, jobs, attempts, ranks, sources, reasons = zip(*self._gaps, strict=True)
        said = {
            "job": self._owners.words.ranked(np.array(jobs, dtype=np.int64)).column(),
            "attempt": pa.array(attempts, pa.uint32()),
            "rank": pa.array(ranks, pa.int32()),
            "device": pa.array([""] * len(numbers)),
            "source": pa.array(sources, pa.string()),
            "reason": pa.array(reasons, pa.string()),
        }
        return _table(self._schemas["gaps"], heads.columns(np.array(numbers, dtype=np.intp)) | said)


class _Sheet(NamedTuple):
    """All blocks of one family in a batch: labels, and values by metric."""

    family: str
    labels: Columns
    values: dict[str, NDArray[np.float32]]

    def wide(self, columns: set[str]) -> Columns | None:
        """Labels and the metrics that have a column of their own, as far as anybody reported them; None when there is none."""
        known = {name: values for name, values in self.values.items() if name in columns}
        return self.labels | {name: _nullable(values) for name, values in known.items()} if known else None

    def others(self, columns: set[str]) -> Iterator[Columns]:
        """The other metrics, one row for each value that is there."""
        for metric, values in self.values.items():
            rows = np.flatnonzero(~np.isnan(values)) if metric not in columns else ()
            if len(rows):
                labels = {name: column.take(pa.array(rows)) for name, column in self.labels.items()}
                named = {"family": _repeated(self.family, len(rows)), "metric": _repeated(metric, len(rows))}
                yield labels | named | {"value": pa.array(values[rows])}


def _sheet(name: str, family: _Family, heads: _Heads, owners: Owners, catalogs: Mapping[str, Catalog]) -> _Sheet:
    counts = [layout.devices for layout in family.layouts]
    ticks = np.repeat(np.array(family.ticks, dtype=np.intp), counts)
    owned = np.concatenate([layout.owned for layout in family.layouts])
    device, job = (owners.words.ranked(owned[:, column]) for column in (DEVICE, JOB))
    order = key_order(job.places, heads.ts[ticks], heads.node.places[ticks], device.places)
    labels = heads.columns(ticks[order]) | {
        "job": job.taken(order).column(),
        "attempt": pa.array(owned[order, ATTEMPT].astype(np.uint32)),
        "rank": pa.array(owned[order, RANK].astype(np.int32)),
        "device": device.taken(order).column(),
    }
    return _Sheet(name, labels, dict(_columns(family, counts, order, catalogs)))


def key_order(job: Codes, ts: Codes, node: Codes, device: Codes) -> Indices:
    """Rows in the order of the tick tables' key: job, minute, node, device, time."""
    minute, moment = ts // MINUTE_MS, ts - ts.min()
    columns = (job, minute - minute.min(), node, device, moment)
    spans = [int(column.max()) + 1 for column in columns]
    if np.prod([float(span) for span in spans]) >= 2**62:  # no one number holds it: times that are months apart
        return np.lexsort(columns[::-1])
    key = columns[0]
    for column, span in zip(columns[1:], spans[1:], strict=True):
        key = key * span + column
    return np.argsort(key, kind="stable")


def _columns(
    family: _Family, counts: Sequence[int], order: Indices, catalogs: Mapping[str, Catalog]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Values by metric, one for each row, NaN where it was not reported."""
    ids = dict.fromkeys(family.catalogs)
    if len(ids) == 1:
        metrics = catalogs[next(iter(ids))].metrics
        turned = np.ascontiguousarray(_matrix(family.values, len(metrics))[order].T)
        yield from ((metric.name, turned[i]) for i, metric in enumerate(metrics))
        return
    of_row = np.repeat(np.array(family.catalogs), counts)
    found: dict[str, NDArray[np.float32]] = {}
    for catalog_id in ids:
        metrics, rows = catalogs[catalog_id].metrics, np.flatnonzero(of_row == catalog_id)
        mine = [values for values, told in zip(family.values, family.catalogs, strict=True) if told == catalog_id]
        matrix = _matrix(mine, len(metrics))
        for i, metric in enumerate(metrics):
            found.setdefault(metric.name, np.full(len(order), np.nan, dtype=np.float32))[rows] = matrix[:, i]
    yield from ((name, values[order]) for name, values in found.items())


def _matrix(values: Sequence[bytes], width: int) -> NDArray[np.float32]:
    return np.frombuffer(b"".join(values), dtype="<f4").reshape(-1, width)


def _nullable(values: NDArray[np.float32]) -> Any:
    absent = np.isnan(values)
    return pa.array(values, mask=absent) if absent.any() else pa.array(values)


def _repeated(word: str, times: int) -> Any:
    return pa.repeat(pa.scalar(word, pa.string()), times)


def _table(schema: Any, columns: Mapping[str, Any]) -> Any:
    """Columns in the store's order and of its types; words stay numbers with a dictionary."""
    found: Columns = {}
    for name in schema.names:
        column, kind = columns.get(name), schema.field(name).type
        if column is not None:
            found[name] = column if pa.types.is_dictionary(column.type) else column.cast(kind)
    return pa.table(found)
