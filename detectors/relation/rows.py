"""Where the rows of a family lie: whose they are, of which device, over which rail.

Some node of a large cluster is always late, so the rows change with nearly every tick. Names become numbers once for all jobs; what is made
anew when rows change is arithmetic on them, and of each job only over its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice, repeat

import numpy as np
from numpy.typing import NDArray

from detectors.base import FamilyMatrix
from detectors.relation.graph import Graph
from trainwarden.topology import Topology

F32 = NDArray[np.float32]
Ints = NDArray[np.int64]
Keys = tuple[tuple[str, str], ...]
Found = tuple[Ints, Ints, Ints, tuple[str, ...]]
"""Row, node number and device number of each row of a job's nodes, and the names of the devices."""
Probed = tuple[tuple[Ints, Ints], tuple[Ints, Ints]]
"""Rows of probes that a job's nodes ask, and that they answer, each with the places in a nodes × rails grid."""

MOST_NAMES = 1 << 20
"""More names than this, or pairs of them, were not met in one cluster: those of nodes long gone are forgotten with all others."""
KEPT = 4
"""Of so many ticks rows are kept: a frame may hold several, and all jobs look at each."""
UNKNOWN = -2


class Rows:
    """Names of all families as numbers, and the rows of each family by the number of who owns them."""

    def __init__(self) -> None:
        self.epoch = 0
        self._begin()

    def _begin(self) -> None:
        self.names: list[str] = []
        self._name: dict[str, int] = {}
        self._pair: dict[tuple[str, str], int] = {}
        self._ends: Ints = np.zeros((2, 0), dtype=np.int64)
        self._of: dict[str, list[_Family]] = {}

    def numbers(self, names: Iterable[str]) -> Ints:
        """Of names; those never met get one."""
        return np.array([self._number(name) for name in names], dtype=np.int64)

    def _number(self, name: str) -> int:
        number = self._name.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number

    def see(self, family: FamilyMatrix) -> _Family:
        """The rows of a family as they are now."""
        for known in self._of.get(family.family, ()):
            if known.entities is family.entities:
                return known
        if max(len(self.names), len(self._pair)) > MOST_NAMES:
            self.epoch += 1
            self._begin()
        pairs = self._pairs(family.entities)
        made = _Family(family.entities, pairs, self._ends[:, pairs])
        self._of[family.family] = [made, *self._of.get(family.family, ())][:KEPT]
        return made

    def _pairs(self, entities: Keys) -> Ints:
        found = np.fromiter(map(self._pair.get, entities, repeat(-1)), np.int64, len(entities))
        fresh, before = np.flatnonzero(found < 0).tolist(), len(self._pair)
        if fresh:
            found[fresh] = [self._pair.setdefault(entities[row], len(self._pair)) for row in fresh]
            ends = [self.numbers(pair) for pair in islice(self._pair, before, None)]
            self._ends = np.concatenate([self._ends, np.stack(ends, axis=1)], axis=1)
        return found


@dataclass
class _Family:
    """Rows as they are: the number of each row's pair of names, and of the two names (0: who reports; 1: the device, or who answers)."""

    entities: Keys
    pairs: Ints
    ends: Ints
    _sorted: dict[int, tuple[Ints, Ints]] = field(default_factory=dict)

    def of_nodes(self, owners: Ints, side: int) -> tuple[Ints, Ints]:
        """(row, place in `owners`) of the rows with one of `owners` on a side, in the order of `owners`, and of rows."""
        order, starts = self._by(side, int(owners.max(initial=-1)) + 1)
        first = starts[owners]
        counts = starts[owners + 1] - first
        place = np.repeat(np.arange(len(owners)), counts)
        within = np.arange(place.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return order[first[place] + within], place

    def _by(self, side: int, least: int) -> tuple[Ints, Ints]:
        known = self._sorted.get(side)
        if known is None or len(known[1]) <= least:
            counts = np.bincount(self.ends[side], minlength=least)
            starts = np.concatenate([[0], np.cumsum(counts)])
            known = self._sorted[side] = np.argsort(self.ends[side], kind="stable"), starts
        return known


@dataclass
class Places:
    """Where rows of a family belong: node numbers of one graph, and numbers of devices. Made anew when the rows change."""

    graph: Graph
    rows: Rows = field(default_factory=Rows)
    rails: dict[tuple[str, str], str] = field(default_factory=dict)
    _known: dict[str, list[tuple[_Family, Found]]] = field(default_factory=dict)
    _probed: list[tuple[_Family, int, Probed]] = field(default_factory=list)
    _rail_of: NDArray[np.int16] = field(default_factory=lambda: np.zeros(0, dtype=np.int16))
    _epoch: int = -1
    _owners: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def learn_rails(self, topology: Topology) -> None:
        """Read over which rail each node of the job probes, or is probed."""
        mine = set(self.graph.nodes)
        for name in topology.nodes():
            words = topology.attributes(name).get("probe_rails", "").split(" ")
            said = ((peer, rail) for peer, _, rail in (word.rpartition("=") for word in words))
            self.rails |= {(name, peer): rail for peer, rail in said if name in mine or peer in mine}
        self._rail_of = self._rail_of[:0]

    def _see(self, family: FamilyMatrix) -> _Family:
        seen = self.rows.see(family)
        if self._epoch != self.rows.epoch:
            self._epoch, self._owners = self.rows.epoch, self.rows.numbers(self.graph.nodes)
            self._rail_of = self._rail_of[:0]
        return seen

    def of(self, family: FamilyMatrix) -> Found:
        """(row, node number, device number) of each row of the job's nodes, and the names of the devices."""
        seen, known = self._see(family), self._known.setdefault(family.family, [])
        for other, found in known:
            if other is seen:
                return found
        found = self._found(seen)
        self._known[family.family] = [(seen, found), *known][:KEPT]
        return found

    def _found(self, seen: _Family) -> Found:
        rows, nodes = seen.of_nodes(self._owners, 0)
        devices = seen.ends[1, rows]
        some = np.flatnonzero(np.bincount(devices)).tolist() if devices.size else []
        ordered = sorted(some, key=self.rows.names.__getitem__)
        place = np.zeros(max(some, default=-1) + 1, dtype=np.int64)
        place[ordered] = np.arange(len(ordered))
        return rows, nodes, place[devices], tuple(self.rows.names[number] for number in ordered)

    def probed(self, family: FamilyMatrix, count: int) -> Probed:
        """Rows of probes, and their places in a grid of `count` rails."""
        seen = self._see(family)
        for other, rails, found in self._probed:
            if other is seen and rails == count:
                return found
        made = (self._cells(seen, 0, count), self._cells(seen, 1, count))
        self._probed = [(seen, count, made), *self._probed][:KEPT]
        return made

    def _cells(self, seen: _Family, side: int, count: int) -> tuple[Ints, Ints]:
        rows, nodes = seen.of_nodes(self._owners, side)
        rail = self._rails_of(seen, rows)
        on = (rail >= 0) & (rail < count)
        return rows[on], nodes[on] * count + rail[on]

    def _rails_of(self, seen: _Family, rows: Ints) -> Ints:
        """Rail of each row's probe, -1 for none; each pair of names is looked up once."""
        pairs = seen.pairs[rows]
        most = int(pairs.max(initial=-1))
        if most >= len(self._rail_of):
            more = np.full(most + 1 - len(self._rail_of), UNKNOWN, dtype=np.int16)
            self._rail_of = np.concatenate([self._rail_of, more])
        for at in np.flatnonzero(self._rail_of[pairs] == UNKNOWN).tolist():
            rail = self.rails.get(seen.entities[rows[at]], "")
            self._rail_of[pairs[at]] = int(rail) if rail.isdigit() and int(rail) < 1000 else -1
        return self._rail_of[pairs].astype(np.int64)

    def grid(self, family: FamilyMatrix | None, *metrics: str) -> tuple[F32, tuple[str, ...]]:
        """metrics × nodes × devices, NaN where nobody reports; and the names of the devices."""
        if family is None or not family.entities:
            return np.full((len(metrics), len(self.graph.nodes), 0), np.nan, dtype=np.float32), ()
        rows, nodes, devices, names = self.of(family)
        found = np.full((len(metrics), len(self.graph.nodes), len(names)), np.nan, dtype=np.float32)
        told = [i for i, metric in enumerate(metrics) if metric in family.metrics]
        columns = [family.metrics.index(metrics[i]) for i in told]
        for i, values in zip(told, family.values[rows[:, None], columns].T, strict=True):
            found[i, nodes, devices] = values
        return found, names
