"""What each probe passes through: two nodes, their leaves, a rail, the leaf's switch of that rail, and the two ports on it.

Nodes have the attributes ``leaf`` and ``rail`` of the topology; where a node probes its peers over several rails, ``probe_rails``
(``"n7=0 n9=1"``) says over which. What is not known is no candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwarden.topology import Topology

NODE, LEAF, SWITCH, RAIL, PORT = range(5)
"""Kinds of part, the most particular shared one first."""
_WANTED = ("leaf", "rail", "probe_rails")
Facts = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Parts:
    """Incidence of probes and parts.

    Attributes
    ----------
    nodes
        Names of all nodes that probe or are probed; part i < len(nodes) is node i.
    names, kinds
        Of every part.
    ends
        Probes × 2: prober and target.
    through
        Probes × 10: node, leaf, rail, leaf's switch of the rail and port, each of the prober and of the target; -1 where unknown.
    host
        Probes × 10: the end on whose behalf the part is passed.
    """

    nodes: tuple[str, ...]
    names: tuple[str, ...]
    kinds: NDArray[np.int64]
    ends: NDArray[np.int64]
    through: NDArray[np.int64]
    host: NDArray[np.int64]

    @cached_property
    def targets(self) -> NDArray[np.bool_]:
        """Which nodes are probed: a prober that nobody probes is a bystander."""
        probed = np.zeros(len(self.nodes), dtype=np.bool_)
        probed[self.ends[:, 1]] = True
        return probed

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Numbers of the parts that are no nodes, by name, lowest first."""
        found: dict[str, tuple[int, ...]] = {}
        for number in range(len(self.nodes), len(self.names)):
            name = self.names[number]
            found[name] = (*found.get(name, ()), number)
        return found

    @cached_property
    def number(self) -> dict[str, int]:
        """Numbers of the nodes."""
        return {name: number for number, name in enumerate(self.nodes)}

    def hosts(self, part: int) -> NDArray[np.int64]:
        """Ends on whose behalf probes pass a part, in their order."""
        return np.asarray(self.host.ravel()[self.places(part)])

    def places(self, part: int) -> NDArray[np.int64]:
        """Where `through` names a part, as places in the flat array, lowest first."""
        order, starts = self._inverse
        return np.asarray(order[starts[part] : starts[part + 1]])

    def passing(self, *parts: int) -> NDArray[np.bool_]:
        """Which probes pass one of these parts."""
        mine = np.zeros(len(self.through), dtype=np.bool_)
        for part in parts:
            mine[self.places(part) // self.through.shape[1]] = True
        return mine

    def counts(self, probes: NDArray[np.bool_]) -> NDArray[np.int64]:
        """How many of these probes pass each part; a probe counts once for a part."""
        if 2 * np.count_nonzero(probes) > len(probes):  # nearly all, as a rule: what is left is quicker to count
            return np.asarray(self._all - self._counted(~probes), dtype=np.int64)
        return self._counted(probes)

    def _counted(self, probes: NDArray[np.bool_]) -> NDArray[np.int64]:
        once = self._once[np.flatnonzero(probes)]
        return np.asarray(np.bincount(once[once >= 0], minlength=len(self.kinds)), dtype=np.int64)

    @cached_property
    def _all(self) -> NDArray[np.int64]:
        return self._counted(np.ones(len(self.through), dtype=np.bool_))

    @cached_property
    def _inverse(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Places in the flat `through` by part, and where each part's begin: ten columns are not searched for each part asked about."""
        flat = self.through.ravel()
        order = np.asarray(np.argsort(flat, kind="stable"), dtype=np.int64)
        starts = np.searchsorted(flat[order], np.arange(len(self.kinds) + 1))
        return order, np.asarray(starts, dtype=np.int64)

    @cached_property
    def _once(self) -> NDArray[np.int64]:
        """`through` without what a target's end passes and the prober's did already."""
        once = self.through.copy()
        once[:, 1::2][once[:, 1::2] == once[:, ::2]] = -1
        return once


def facts_of(nodes: Sequence[str], topology: Topology) -> Facts:
    """What of the topology matters here, to tell whether it changed."""
    found = (topology.attributes(node) for node in nodes)
    return tuple(tuple(facts.get(key, "") for key in _WANTED) for facts in found)


def nodes_of(keys: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """All nodes, sorted."""
    return tuple(sorted({name for pair in keys for name in pair}))


def parts_of(keys: Sequence[tuple[str, str]], nodes: tuple[str, ...], facts: Facts) -> Parts:
    """The parts that the probes `keys` pass."""
    number = {name: i for i, name in enumerate(nodes)}
    ends = np.array([(number[a], number[b]) for a, b in keys], dtype=np.int64).reshape(len(keys), 2)
    rails = _rails(keys, ends, facts)
    book = _Book(list(nodes), [NODE] * len(nodes))
    leaf = [facts[i][0] for i in range(len(nodes))]
    columns: list[list[int]] = []
    for (a, b), rail in zip(ends.tolist(), rails, strict=True):
        shared = [book.leaf(leaf[a]), book.leaf(leaf[b]), book.switch(leaf[a], rail), book.switch(leaf[b], rail)]
        along = book.rail(rail)
        ports = [book.port(nodes[i], rail if facts[i][2] or facts[b][2] else "") for i in (a, b)]
        columns.append([a, b, shared[0], shared[1], along, along, shared[2], shared[3], *ports])
    through = np.array(columns, dtype=np.int64).reshape(len(keys), 10)
    host = np.tile(ends, 5).reshape(len(keys), 10)
    return Parts(nodes, tuple(book.names), np.array(book.kinds, dtype=np.int64), ends, through, host)


def _rails(keys: Sequence[tuple[str, str]], ends: NDArray[np.int64], facts: Facts) -> list[str]:
    by_peer = [dict(word.rpartition("=")[::2] for word in fact[2].split(" ") if "=" in word) for fact in facts]
    own = [fact[1] for fact in facts]
    found = []
    for (_, peer), (a, b) in zip(keys, ends.tolist(), strict=True):
        found.append(by_peer[a].get(peer) or (own[a] if own[a] == own[b] else ""))
    return found


class _Book:
    """Numbers of parts, given out in order of appearance."""

    def __init__(self, names: list[str], kinds: list[int]) -> None:
        self.names, self.kinds = names, kinds
        self._known: dict[tuple[int, str], int] = {}

    def leaf(self, leaf: str) -> int:
        return self._part(LEAF, leaf, bool(leaf))

    def rail(self, rail: str) -> int:
        return self._part(RAIL, f"rail{rail}" if rail.isdigit() else rail, bool(rail))

    def switch(self, leaf: str, rail: str) -> int:
        return self._part(SWITCH, f"{leaf}/rail{rail}" if rail.isdigit() else f"{leaf}/{rail}", bool(leaf and rail))

    def port(self, node: str, rail: str) -> int:
        return self._part(PORT, f"{node}\x1f{rail}", bool(rail))

    def _part(self, kind: int, name: str, known: bool) -> int:
        if not known:
            return -1
        key = (kind, name)
        if key not in self._known:
            self._known[key] = len(self.names)
            self.names.append(name)
            self.kinds.append(kind)
        return self._known[key]
