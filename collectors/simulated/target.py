"""What a fault strikes: a named thing in the machine room, as index arrays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from collectors.simulated.layout import SPINES, Layout, leaf_name, pdu_name, rack_name, zone_name
from collectors.simulated.noise import Ints
from collectors.simulated.placement import Grid, Placement
from collectors.simulated.spec import GPUS
from trainwarden.errors import UsageError


class Scope(StrEnum):
    """Kinds of thing that a fault strikes."""

    GPU = "gpu"
    NODE = "node"
    NIC = "nic"
    PAIR = "pair"
    RACK = "rack"
    PDU = "pdu"
    ZONE = "zone"
    LEAF = "leaf"
    RAIL = "rail"
    SPINE = "spine"
    JOB = "job"
    STAGE = "stage"
    FABRIC = "fabric"


SHARED = frozenset({Scope.RACK, Scope.PDU, Scope.ZONE, Scope.LEAF, Scope.RAIL, Scope.SPINE, Scope.FABRIC})


@dataclass(frozen=True)
class Target:
    """A thing struck. `gpus` and `ports` are (node, place) index pairs, `probes` (node, peer) pairs whose way leads over it."""

    scope: Scope
    name: str
    nodes: Ints
    gpus: tuple[Ints, Ints]
    ports: tuple[Ints, Ints]
    probes: tuple[Ints, Ints]
    jobs: tuple[int, ...]
    stage: int = -1


class Targets:
    """Finds things by name, and draws them."""

    def __init__(self, layout: Layout, placement: Placement) -> None:
        self._layout = layout
        self._placement = placement
        self._index = {name: i for i, name in enumerate(layout.names)}

    def named(self, scope: Scope, name: str) -> Target:
        """The thing called `name`.

        Raises
        ------
        UsageError
            There is none of that name and kind.
        """
        try:
            return self._find(scope, name)
        except (KeyError, ValueError, IndexError):
            raise UsageError(
                f"--faults: {name!r} is no {scope}, expected a name like {self._example(scope)!r}"
            ) from None

    def drawn(self, scope: Scope, stream: np.random.Generator) -> Target:
        """A random thing that matters to some job."""
        grid = self._placement.grids[int(stream.integers(len(self._placement.grids)))]
        node = grid.first_node + int(stream.integers(grid.nodes))
        return self._find(scope, self._name_at(scope, node, grid, stream))

    def _name_at(self, scope: Scope, node: int, grid: Grid, stream: np.random.Generator) -> str:
        layout = self._layout
        gpu, rail = int(stream.integers(GPUS)), int(stream.integers(layout.spec.rails))
        other = grid.first_node + (node - grid.first_node + 1) % grid.nodes
        return {
            Scope.GPU: f"{layout.names[node]}/gpu{gpu}", Scope.NODE: layout.names[node],
            Scope.NIC: f"{layout.names[node]}/{layout.rail_devices[rail]}",
            Scope.PAIR: f"{layout.names[node]}-{layout.names[other]}",
            Scope.RACK: rack_name(int(layout.rack[node])), Scope.PDU: pdu_name(int(layout.pdu[node])),
            Scope.ZONE: zone_name(int(layout.zone[node])), Scope.LEAF: leaf_name(int(layout.pod[node]), rail),
            Scope.RAIL: f"rail{rail}", Scope.SPINE: f"spine-{int(stream.integers(SPINES))}",
            Scope.JOB: grid.name, Scope.STAGE: f"{grid.name}/stage{grid.pp - 1}", Scope.FABRIC: "fabric",
        }[scope]  # fmt: skip

    def _example(self, scope: Scope) -> str:
        stream = np.random.Generator(np.random.Philox(0))
        return self._name_at(scope, self._placement.grids[0].first_node, self._placement.grids[0], stream)

    def _find(self, scope: Scope, name: str) -> Target:
        nodes, places, rails = self._parts(scope, name)
        if len(nodes) == 0:
            raise KeyError(name)
        if scope is Scope.SPINE:
            return self._spine(name, nodes, places, rails)
        return Target(scope, name, nodes, _pairs(nodes, places), _pairs(nodes, rails), self._probes(scope, name, nodes, rails),
                      self._jobs(nodes), _stage(scope, name))  # fmt: skip

    def _spine(self, name: str, nodes: Ints, places: Ints, rails: Ints) -> Target:
        """A spine carries the probes between pods, and of jobs only those that reach over several."""
        pod = self._layout.pod
        jobs = tuple(g.index for g in self._placement.grids if len(np.unique(pod[g.span])) > 1)
        reaching = np.array(
            [n for j in jobs for n in np.arange(self._layout.size)[self._placement.grids[j].span]], dtype=np.int64
        )
        return Target(Scope.SPINE, name, nodes, _pairs(reaching, places), _pairs(reaching, rails),
                      self._probes(Scope.SPINE, name, nodes, rails), jobs)  # fmt: skip

    def _parts(self, scope: Scope, name: str) -> tuple[Ints, Ints, Ints]:
        """Nodes, GPU places and rails of a name."""
        layout, everything = self._layout, np.arange(GPUS)
        rails = np.arange(layout.spec.rails)
        head, _, tail = name.partition("/")
        if scope is Scope.GPU:
            gpu = _number(tail, "gpu", GPUS)
            return self._node(head), np.array([gpu]), layout.rail_of_gpu[[gpu]]
        if scope is Scope.NIC:
            rail = layout.rail_devices.index(tail)
            return self._node(head), np.flatnonzero(layout.rail_of_gpu == rail), np.array([rail])
        if scope is Scope.PAIR:
            return np.concatenate([self._node(word) for word in name.split("-")]), everything, rails
        if (scope is Scope.LEAF and tail) or scope is Scope.RAIL:
            rail = _number(tail or head, "rail", layout.spec.rails)
            return self._group(scope, head), np.flatnonzero(layout.rail_of_gpu == rail), np.array([rail])
        return self._group(scope, head if scope is not Scope.STAGE else name), everything, rails

    def _group(self, scope: Scope, name: str) -> Ints:
        layout = self._layout
        groups = {Scope.RACK: (layout.rack, "rack-"), Scope.PDU: (layout.pdu, "pdu-"), Scope.ZONE: (layout.zone, "zone-"),
                  Scope.LEAF: (layout.pod, "leaf-")}  # fmt: skip
        if scope in groups:
            of_node, prefix = groups[scope]
            return np.flatnonzero(of_node == _number(name, prefix, layout.size))
        if scope is Scope.NODE:
            return self._node(name)
        if scope in (Scope.JOB, Scope.STAGE):
            return self._job(name)
        if scope is Scope.SPINE:
            _number(name, "spine-", SPINES)
        return np.arange(layout.size)

    def _job(self, name: str) -> Ints:
        head, _, tail = name.partition("/")
        grid = next((grid for grid in self._placement.grids if grid.name == head), None)
        if grid is None:
            raise KeyError(name)
        return (
            grid.stage_nodes(_number(tail, "stage", grid.pp))
            if tail
            else np.arange(grid.first_node, grid.first_node + grid.nodes)
        )

    def _node(self, name: str) -> Ints:
        return np.array([self._index[name]])

    def _jobs(self, nodes: Ints) -> tuple[int, ...]:
        struck = set(nodes.tolist())
        return tuple(
            g.index for g in self._placement.grids if struck & set(range(g.first_node, g.first_node + g.nodes))
        )

    def _probes(self, scope: Scope, name: str, nodes: Ints, rails: Ints) -> tuple[Ints, Ints]:
        """Probes that the struck ports send or answer; for a spine those that it carries, for a pair those between the two."""
        layout = self._layout
        source = np.isin(np.arange(layout.size), nodes)[:, None]
        answer = np.isin(layout.peers, nodes)
        over = np.isin(layout.peer_rail, rails)[None, :]
        if scope is Scope.SPINE:
            chosen = layout.peer_far & (layout.peer_spine == _number(name, "spine-", SPINES))
        elif scope is Scope.PAIR:
            chosen = source & answer
        else:
            chosen = (source | answer) & over
        found = np.nonzero(chosen)
        return found[0], found[1]


def _pairs(nodes: Ints, places: Ints) -> tuple[Ints, Ints]:
    return np.repeat(nodes, len(places)), np.tile(places, len(nodes))


def _number(text: str, prefix: str, limit: int) -> int:
    number = int(text.removeprefix(prefix))
    if not text.startswith(prefix) or not 0 <= number < limit:
        raise ValueError(text)
    return number


def _stage(scope: Scope, name: str) -> int:
    return int(name.rpartition("stage")[2]) if scope is Scope.STAGE else -1
