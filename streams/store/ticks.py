"""Ticks as wide tables: float32 blocks go column by column into Arrow, never value by value through Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from streams.store.rows import sample_ms
from trainwarden.errors import DecodeError
from trainwarden.records import Block, Catalog, Placement, Tick

OTHER = "other_ticks"
TICK_TABLES = (
    "host_ticks", "process_ticks", "nic_ticks", "mesh_ticks", "gpu_ticks", "gpu_instance_ticks", "port_ticks", "rdma_ticks",
    "pcie_ticks", "board_ticks", "machine_ticks", "nvme_ticks", "mount_ticks", OTHER, "gaps",
)  # fmt: skip
_OF_TICK = ("ts", "cluster", "node", "seq", "boot_id", "spooled", "arrived_at")
_OF_DEVICE = ("job", "attempt", "rank", "device")
_LABELS = frozenset((*_OF_TICK, *_OF_DEVICE))

KEPT_DEVICES = 64
"""Different lists of devices of one node; a node has one for each family, and another while a device is missing."""

CatalogOf = Callable[[str], Catalog | None]
Indices = NDArray[np.intp]
Owner = tuple[str, int, int]
"""Job, attempt and rank."""


class _Piece(NamedTuple):
    """A block that fits its catalogue, of the tick that is number `tick` of the batch."""

    tick: int
    block: Block
    owners: tuple[Owner, ...]


@dataclass
class Owners:
    """To whom devices belong, kept from batch to batch: what a node says of its ranks seldom changes."""

    _known: dict[str, tuple[tuple[Placement, ...], dict[tuple[str, ...], tuple[Owner, ...]]]] = field(
        default_factory=dict
    )

    def of(self, node: str, placements: tuple[Placement, ...], devices: tuple[str, ...]) -> tuple[Owner, ...]:
        """The owner of each device."""
        known = self._known.get(node)
        if known is None or known[0] != placements:
            known = self._known[node] = placements, {}
        owners = known[1].get(devices)
        if owners is None:
            if len(known[1]) >= KEPT_DEVICES:
                known[1].clear()
            owners = known[1][devices] = tuple(placement_of(placements, device) for device in devices)
        return owners


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
        self._catalogs: dict[str, Catalog] = {}
        self._ticks: list[tuple[Any, ...]] = []
        self._families: dict[str, list[_Piece]] = {}
        self._gaps: list[tuple[int, Owner, str, str]] = []

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
        for block in tick.blocks:
            self._check(block)
        number = len(self._ticks)
        self._ticks.append((at_ms, tick.cluster, tick.node, tick.seq, tick.boot_id, tick.spooled, arrived_ms))
        for block in tick.blocks:
            owners = self._owners.of(tick.node, tick.placements, block.devices)
            self._families.setdefault(block.family, []).append(_Piece(number, block, owners))
        if tick.gaps:
            owner = placement_of(tick.placements, "")
            self._gaps.extend((number, owner, gap.source, gap.reason) for gap in tick.gaps)

    def tables(self) -> dict[str, Any]:
        """Arrow table by name, only those that have rows."""
        found: dict[str, Any] = {}
        others: list[Any] = []
        for family, pieces in self._families.items():
            sheet = _Sheet(family, self._labels(pieces), pieces, self._catalogs)
            name = f"{family}_ticks"
            columns = set(self._schemas[name].names) if name in self._schemas and name != OTHER else set()
            if (wide := sheet.wide(columns - _LABELS)) is not None:
                found[name] = _table(self._schemas[name], wide)
            others.extend(_table(self._schemas[OTHER], other) for other in sheet.others(columns - _LABELS))
        if others:
            found[OTHER] = pa.concat_tables(others).combine_chunks()
        if self._gaps:
            found["gaps"] = self._gap_table()
        return found

    def _check(self, block: Block) -> None:
        catalog = self._catalogs.get(block.catalog_id) or self._catalog(block)
        if not block.devices or len(block.values) % (4 * len(block.devices)):
            raise DecodeError(
                f"block {block.family}: {len(block.values)} bytes do not divide into {len(block.devices)} devices of float32"
            )
        named, width = len(catalog.metrics), len(block.values) // (4 * len(block.devices))
        if width != named:
            raise DecodeError(f"block {block.family}: {width} columns, catalogue {block.catalog_id} names {named}")

    def _catalog(self, block: Block) -> Catalog:
        catalog = self._catalog_of(block.catalog_id)
        if catalog is None:
            raise DecodeError(f"block {block.family}: catalogue {block.catalog_id!r} is not in tw.catalog")
        self._catalogs[block.catalog_id] = catalog
        return catalog

    def _labels(self, pieces: Sequence[_Piece]) -> dict[str, Any]:
        """Columns of labels, one row for each device."""
        counts = [len(piece.block.devices) for piece in pieces]
        ticks = np.repeat(np.array([piece.tick for piece in pieces], dtype=np.intp), counts)
        owners = chain.from_iterable(piece.owners for piece in pieces)
        devices = list(chain.from_iterable(piece.block.devices for piece in pieces))
        return self._of_ticks(ticks) | _of_owners(owners) | {"device": pa.array(devices, pa.string())}

    def _of_ticks(self, ticks: Indices) -> dict[str, Any]:
        """What is the same for all devices of a tick, repeated for each of `ticks`."""
        types = (pa.int64(), pa.string(), pa.string(), pa.uint64(), pa.string(), pa.bool_(), pa.int64())
        rows = pa.array(ticks)
        columns = zip(_OF_TICK, types, zip(*self._ticks, strict=True), strict=True)
        return {name: pa.array(values, kind).take(rows) for name, kind, values in columns}

    def _gap_table(self) -> Any:
        numbers, owners, sources, reasons = zip(*self._gaps, strict=True)
        columns = self._of_ticks(np.array(numbers, dtype=np.intp)) | _of_owners(owners)
        said = {"source": pa.array(sources, pa.string()), "reason": pa.array(reasons, pa.string())}
        return _table(self._schemas["gaps"], columns | said | {"device": pa.array([""] * len(numbers))})


class _Sheet:
    """All blocks of one family in a batch: labels, and values by metric."""

    def __init__(
        self, family: str, labels: dict[str, Any], pieces: Sequence[_Piece], catalogs: Mapping[str, Catalog]
    ) -> None:
        self._family = family
        self._labels = labels
        self._values = dict(_columns(pieces, catalogs, len(labels["device"])))

    def wide(self, columns: set[str]) -> dict[str, Any] | None:
        """Labels and the metrics that have a column of their own, as far as anybody reported them; None when there is none."""
        known = {name: values for name, values in self._values.items() if name in columns}
        return self._labels | {name: _nullable(values) for name, values in known.items()} if known else None

    def others(self, columns: set[str]) -> Iterator[dict[str, Any]]:
        """The other metrics, one row for each value that is there."""
        for metric, values in self._values.items():
            rows = np.flatnonzero(~np.isnan(values)) if metric not in columns else ()
            if len(rows):
                labels = {name: column.take(pa.array(rows)) for name, column in self._labels.items()}
                named = {"family": _repeated(self._family, len(rows)), "metric": _repeated(metric, len(rows))}
                yield labels | named | {"value": pa.array(values[rows])}


def _columns(
    pieces: Sequence[_Piece], catalogs: Mapping[str, Catalog], count: int
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Values by metric, one for each device of all pieces, NaN where it was not reported."""
    by_catalog: dict[str, list[int]] = {}
    starts = np.cumsum([0, *(len(piece.block.devices) for piece in pieces)])
    for number, piece in enumerate(pieces):
        by_catalog.setdefault(piece.block.catalog_id, []).append(number)
    found: dict[str, NDArray[np.float32]] = {}
    for catalog_id, numbers in by_catalog.items():
        metrics = catalogs[catalog_id].metrics
        flat = np.frombuffer(b"".join(pieces[number].block.values for number in numbers), dtype="<f4")
        turned = np.ascontiguousarray(flat.reshape(-1, len(metrics)).T)
        if len(by_catalog) == 1:
            yield from ((metric.name, turned[i]) for i, metric in enumerate(metrics))
            return
        rows = np.concatenate([np.arange(starts[number], starts[number + 1]) for number in numbers])
        for i, metric in enumerate(metrics):
            found.setdefault(metric.name, np.full(count, np.nan, dtype=np.float32))[rows] = turned[i]
    yield from found.items()


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


def placement_of(placements: tuple[Placement, ...], device: str) -> Owner:
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


def _of_owners(owners: Iterable[Owner]) -> dict[str, Any]:
    jobs, attempts, ranks = zip(*owners, strict=True)
    kinds = {"job": pa.string(), "attempt": pa.uint32(), "rank": pa.int32()}
    return {
        name: pa.array(values, kind)
        for (name, kind), values in zip(kinds.items(), (jobs, attempts, ranks), strict=True)
    }


def _nullable(values: NDArray[np.float32]) -> Any:
    return pa.array(values, mask=np.isnan(values))


def _repeated(word: str, times: int) -> Any:
    return pa.repeat(pa.scalar(word, pa.string()), times)


def _table(schema: Any, columns: Mapping[str, Any]) -> Any:
    names = [name for name in schema.names if name in columns]
    arrays = [columns[name].cast(schema.field(name).type) for name in names]
    return pa.table(arrays, schema=pa.schema([schema.field(name) for name in names]))
