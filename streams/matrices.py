"""From blocks of many nodes to one matrix per family: columns are merged by metric name, rows sorted by node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.base import FamilyMatrix
from trainwarden.records import Block, Catalog, Tick, decode, encode

Pair = tuple[str, str]


class Columns(NamedTuple):
    """Metric names of several layouts together, where each layout's columns go, and which names are states."""

    metrics: tuple[str, ...]
    places: dict[str, NDArray[np.intp]]
    states: frozenset[str]


class Names:
    """The (node, device) pairs of a family's rows: the same objects as in the tick before where nothing changed.

    Detectors keep rows by these names. With kept objects they compare by identity, and ten thousand devices cost them microseconds. Of a
    thousand nodes one misses a tick every few seconds: so what was before the newest change is kept, too.
    """

    def __init__(self) -> None:
        self._whole: dict[str, list[tuple[list[tuple[str, tuple[str, ...]]], tuple[Pair, ...]]]] = {}
        self._parts: dict[str, dict[str, tuple[tuple[str, ...], tuple[Pair, ...]]]] = {}

    def of(self, family: str, blocks: Sequence[tuple[str, tuple[str, ...]]]) -> tuple[Pair, ...]:
        """Rows of `blocks`, which are (node, devices)."""
        asked = list(blocks)
        known = self._whole.setdefault(family, [])
        for number, (told, rows) in enumerate(known):
            if told == asked:
                known.insert(0, known.pop(number))
                return rows
        before = self._parts.get(family, {})
        kept: dict[str, tuple[tuple[str, ...], tuple[Pair, ...]]] = {}
        parts: list[tuple[Pair, ...]] = []
        for node, devices in asked:
            part = before.get(node)
            if part is None or part[0] != devices:
                part = devices, tuple((node, device) for device in devices)
            kept[node] = part
            parts.append(part[1])
        self._parts[family] = kept
        rows = tuple(chain.from_iterable(parts))
        self._whole[family] = [(asked, rows), *known[:1]]
        return rows


class Catalogs:
    """Column layouts by id."""

    def __init__(self) -> None:
        self.names = Names()
        self._by_id: dict[str, Catalog] = {}
        self._row_bytes: dict[str, int] = {}
        """Of one device, of each layout that can be used."""
        self._unusable: dict[str, str] = {}
        self._merged: dict[tuple[str, ...], Columns] = {}

    def learn(self, catalog: Catalog) -> None:
        """Take a catalogue in; the same id always means the same columns."""
        if catalog.catalog_id in self._by_id:
            return
        self._by_id[catalog.catalog_id] = catalog
        self._row_bytes[catalog.catalog_id] = 4 * len(catalog.metrics)
        names = [metric.name for metric in catalog.metrics]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            del self._row_bytes[catalog.catalog_id]
            self._unusable[catalog.catalog_id] = f"catalogue {catalog.catalog_id} names {', '.join(twice)} twice"

    def fits(self, tick: Tick) -> bool:
        """Whether nothing is `missing` and nothing a `misfit`: nearly always."""
        row_bytes = self._row_bytes
        for block in tick.blocks:  # noqa: SIM110 - a generator would cost as much again, ten thousand times a second
            if len(block.values) != row_bytes.get(block.catalog_id, -1) * len(block.devices):
                return False
        return True

    def missing(self, tick: Tick) -> str | None:
        """A catalogue id that the tick uses and nobody has sent yet."""
        return next((block.catalog_id for block in tick.blocks if block.catalog_id not in self._by_id), None)

    def misfit(self, tick: Tick) -> str | None:
        """Why the tick cannot be read, None when it can. All its catalogues must be known."""
        for block in tick.blocks:
            if block.catalog_id in self._unusable:
                return f"block {block.family}: {self._unusable[block.catalog_id]}"
            width = len(self._by_id[block.catalog_id].metrics)
            if len(block.values) != 4 * width * len(block.devices):
                return (
                    f"block {block.family}: {len(block.values)} bytes, expected {len(block.devices)} devices x {width} metrics"
                    f" x 4 of catalogue {block.catalog_id}"
                )
        return None

    def columns(self, catalog_ids: Iterable[str]) -> Columns:
        """Union of the metric names of several layouts, and where each layout's columns go."""
        key = tuple(sorted(set(catalog_ids)))
        if key not in self._merged:
            self._merged[key] = self._merge(key)
        return self._merged[key]

    def snapshot(self) -> list[bytes]:
        """Every layout in wire form."""
        return [encode(catalog) for catalog in self._by_id.values()]

    def restore(self, state: list[bytes]) -> None:
        """Take `snapshot`'s layouts over."""
        self._by_id, self._row_bytes, self._unusable, self._merged = {}, {}, {}, {}
        for payload in state:
            self.learn(decode(payload))

    def _merge(self, catalog_ids: tuple[str, ...]) -> Columns:
        names: dict[str, int] = {}
        for catalog_id in catalog_ids:
            for metric in self._by_id[catalog_id].metrics:
                names.setdefault(metric.name, len(names))
        places = {
            catalog_id: np.array([names[m.name] for m in self._by_id[catalog_id].metrics], dtype=np.intp)
            for catalog_id in catalog_ids
        }
        told = (metric for catalog_id in catalog_ids for metric in self._by_id[catalog_id].metrics)
        return Columns(tuple(names), places, frozenset(metric.name for metric in told if metric.kind == "state"))


def family_matrices(ticks: Iterable[Tick], catalogs: Catalogs) -> dict[str, FamilyMatrix]:
    """One matrix per family over ticks sorted by node."""
    blocks: dict[str, list[tuple[str, Block]]] = {}
    for tick in ticks:
        for block in tick.blocks:
            blocks.setdefault(block.family, []).append((tick.node, block))
    return {family: _matrix(family, blocks[family], catalogs) for family in sorted(blocks)}


def _matrix(family: str, blocks: list[tuple[str, Block]], catalogs: Catalogs) -> FamilyMatrix:
    metrics, places, states = catalogs.columns({block.catalog_id for _, block in blocks})
    entities = catalogs.names.of(family, [(node, block.devices) for node, block in blocks])
    if len(places) == 1:
        # joined in memory of its own, which may be written to: detectors get no second copy
        flat = np.frombuffer(bytearray().join([block.values for _, block in blocks]), dtype="<f4")
        values = flat.reshape(len(entities), len(metrics)).astype(np.float32, copy=False)
        return FamilyMatrix(family, entities, metrics, values, states)
    values = np.full((len(entities), len(metrics)), np.nan, dtype=np.float32)
    row = 0
    for _, block in blocks:
        count, columns = len(block.devices), places[block.catalog_id]
        found = np.frombuffer(block.values, dtype="<f4").reshape(count, len(columns))
        values[row : row + count, columns] = found
        row += count
    return FamilyMatrix(family, entities, metrics, values, states)


def pack(state: Any) -> bytes:
    """MessagePack of plain containers."""
    return msgspec.msgpack.encode(state)


def map_head(count: int) -> bytes:
    """Beginning of a map of so many pairs in MessagePack: what `pack` says, where the pairs follow on their own."""
    return bytes([0x80 | count]) if count < 16 else b"\xde" + count.to_bytes(2, "big")


def array_head(count: int) -> bytes:
    """The same of a list of fewer than sixteen."""
    return bytes([0x90 | count])


def bin_of(payload: bytes) -> tuple[bytes, bytes]:
    """Bytes in MessagePack without a copy: their beginning, and they themselves."""
    for sign, width in ((b"\xc4", 1), (b"\xc5", 2)):
        if len(payload) < 1 << (8 * width):
            return sign + len(payload).to_bytes(width, "big"), payload
    return b"\xc6" + len(payload).to_bytes(4, "big"), payload


def unpack(payload: bytes) -> Any:
    """Inverse of `pack`."""
    return msgspec.msgpack.decode(payload)
