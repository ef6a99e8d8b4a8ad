"""Nodes of one job with typed relations, from the topology and the job's layout.

A relation divides the nodes into groups (hyper-edges): peers of a data-parallel group, replicas cut into stages, expert groups, racks,
power units, leaves, cooling zones, the job. Where the layout is unknown the relation `learnt` takes its place (`relation.learnt`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainwarden.parallel import ParallelLayout
from trainwarden.topology import JobLayout, Topology

Ints = NDArray[np.int64]

PARALLEL = ("tp", "dp", "pp", "ep")
PLACES = ("rack", "pdu", "leaf", "zone")
WEIGHTS = {
    "tp": 1.0,
    "dp": 1.0,
    "pp": 0.8,
    "ep": 1.0,
    "learnt": 0.6,
    "rack": 0.5,
    "pdu": 0.45,
    "leaf": 0.4,
    "zone": 0.3,
    "job": 0.2,
}
"""How much two members have in common; only for display and for ranking neighbours, models learn their own."""


@dataclass(frozen=True)
class Relation:
    """One way to be related.

    Attributes
    ----------
    group
        Group of each node, -1 for none.
    names
        Of the groups.
    """

    kind: str
    group: Ints
    names: tuple[str, ...]

    @property
    def weight(self) -> float:
        """Of an edge of this type."""
        return WEIGHTS[self.kind]

    def members(self, number: int) -> Ints:
        """Nodes of a group."""
        return np.flatnonzero(self.group == number)


@dataclass(frozen=True)
class Graph:
    """The nodes of a job, in order of their lowest rank, and how they are related.

    Attributes
    ----------
    rank_node
        Node number of each rank, -1 for ranks whose place is unknown.
    described
        Whether somebody said how the job is parallel.
    """

    nodes: tuple[str, ...]
    relations: dict[str, Relation]
    rank_node: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    described: bool = False

    def group_of(self, kind: str) -> Ints:
        """Group of each node in a relation; -1 everywhere when the job has no such relation."""
        found = self.relations.get(kind)
        return found.group if found is not None else np.full(len(self.nodes), -1, dtype=np.int64)

    def neighbours(self, node: int, limit: int = 8) -> list[tuple[str, str, float]]:
        """(relation, node, weight) of the closest relatives, strongest first; what a person is shown."""
        found: dict[str, tuple[str, float]] = {}
        for kind, relation in self.relations.items():
            number = int(relation.group[node])
            for other in relation.members(number).tolist() if number >= 0 else ():
                name = self.nodes[other]
                if other != node and relation.weight > found.get(name, ("", 0.0))[1]:
                    found[name] = (kind, relation.weight)
        ranked = sorted(found.items(), key=lambda item: (-item[1][1], item[0]))[:limit]
        return [(kind, name, weight) for name, (kind, weight) in ranked]

    def edges(self, kind: str, most: int = 100_000) -> tuple[Ints, Ints]:
        """Pairs (each once) of a relation, at most `most`: hyper-edges are written out only for display."""
        relation = self.relations.get(kind)
        pairs: list[Ints] = []
        for number in range(len(relation.names)) if relation is not None else ():
            members = relation.members(number) if relation is not None else np.zeros(0, dtype=np.int64)
            first, second = np.triu_indices(len(members), 1)
            pairs.append(np.stack([members[first], members[second]]))
            if sum(part.shape[1] for part in pairs) >= most:
                break
        joined = np.concatenate(pairs, axis=1)[:, :most] if pairs else np.zeros((2, 0), dtype=np.int64)
        return joined[0], joined[1]


def graph_of(layout: JobLayout, topology: Topology) -> Graph:
    """The graph of one attempt of a job; relations without two related nodes are left out."""
    nodes = layout.nodes
    number = {name: i for i, name in enumerate(nodes)}
    rank_node = np.full(max(layout.ranks, default=-1) + 1, -1, dtype=np.int64)
    for rank, (name, _) in layout.ranks.items():
        rank_node[rank] = number[name]
    facts = [topology.attributes(name) for name in nodes]
    found = {kind: _by_place(kind, [fact.get(kind, "") for fact in facts]) for kind in PLACES}
    found["job"] = Relation("job", np.zeros(len(nodes), dtype=np.int64), (layout.job,))
    parallel = layout.parallel
    fits = parallel is not None and len(parallel.places) == len(rank_node) and bool((rank_node >= 0).all())
    if parallel is not None and fits:
        found |= parallel_relations(parallel, rank_node, len(nodes), int(layout.attributes.get("ep", "1") or 1))
    return Graph(nodes, {kind: relation for kind, relation in found.items() if _relates(relation)}, rank_node, fits)


def parallel_relations(parallel: ParallelLayout, rank_node: Ints, count: int, experts: int = 1) -> dict[str, Relation]:
    """Relations between nodes that follow from how ranks are parallel."""
    same_work = _as_sets(parallel.peer_groups(), rank_node, count)
    replica = _joined(parallel.groups(*[axis for axis in parallel.axes if axis not in ("pp", "tp")]), rank_node, count)
    tensor = _joined(parallel.groups(*[axis for axis in parallel.axes if axis != "tp"]), rank_node, count)
    exchange = _joined(_exchange(parallel, experts), rank_node, count)
    stages = [
        min(parallel.coordinate(r, "pp") for r in np.flatnonzero(rank_node == m[0]).tolist()) for m in _parts(same_work)
    ]
    found = {
        "dp": Relation("dp", same_work, tuple(f"stage {stage}" for stage in stages)),
        "tp": _numbered("tp", tensor), "ep": _numbered("ep", exchange),
    }  # fmt: skip
    if parallel.stages > 1:
        found["pp"] = _numbered("pp", replica)
    return found


def _exchange(parallel: ParallelLayout, experts: int) -> tuple[int, ...]:
    """Group of each rank that exchanges tokens with others: their experts are on different ranks."""
    if experts <= 1:
        return tuple(range(len(parallel.places)))
    derived = all(
        parallel.coordinate(r, "ep") == parallel.coordinate(r, "dp") % experts for r in range(len(parallel.places))
    )
    keys = [
        (parallel.coordinate(r, "pp"), parallel.coordinate(r, "dp") // (experts if derived else 1))
        for r in range(len(parallel.places))
    ]
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def _by_place(kind: str, places: Sequence[str]) -> Relation:
    names = tuple(dict.fromkeys(place for place in places if place))
    number = {name: i for i, name in enumerate(names)}
    return Relation(kind, np.array([number.get(place, -1) for place in places], dtype=np.int64), names)


def _relates(relation: Relation) -> bool:
    known = relation.group[relation.group >= 0]
    return known.size > len(np.unique(known))


def _as_sets(of_rank: Sequence[int], rank_node: Ints, count: int) -> Ints:
    """Nodes whose ranks belong to the same groups."""
    own: list[set[int]] = [set() for _ in range(count)]
    for rank, node in enumerate(rank_node.tolist()):
        own[node].add(of_rank[rank])
    return _consecutive(frozenset(groups) for groups in own)


def _joined(of_rank: Sequence[int], rank_node: Ints, count: int) -> Ints:
    """Nodes that share a group of ranks, directly or over others."""
    parent = list(range(count))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    first: dict[int, int] = {}
    for rank, node in enumerate(rank_node.tolist()):
        other = first.setdefault(of_rank[rank], node)
        parent[root(node)] = root(other)
    return _consecutive(root(node) for node in range(count))


def _consecutive(keys: Iterable[Hashable]) -> Ints:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _parts(group: Ints) -> list[Ints]:
    return [np.flatnonzero(group == number) for number in range(int(group.max(initial=-1)) + 1)]


def _numbered(kind: str, group: Ints) -> Relation:
    return Relation(kind, group, tuple(f"{kind} {number}" for number in range(int(group.max(initial=-1)) + 1)))
