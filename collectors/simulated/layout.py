"""The machine room: which node stands in which rack, hangs at which leaf and power feed, is cooled by which zone, probes whom."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collectors.simulated.noise import Bools, Ints
from collectors.simulated.spec import GPUS, Spec

RACK_NODES = 8
POD_NODES = 32
PDU_NODES = 16
ZONE_NODES = 64
SPINES = 8
PEERS = 8
PEER_STEPS = (1, POD_NODES + 3, 2, 3 * POD_NODES + 1, 3, 5 * POD_NODES + 2, 5, 7 * POD_NODES + 5)
"""Whom a node probes: the node so many places on. Peer k is probed over rail k, so each rail has near and far pairs."""

RAIL_MBPS = 200_000.0
GPU_DEVICES = tuple(f"gpu{i}" for i in range(GPUS))


@dataclass(frozen=True)
class Layout:
    """Index arrays over nodes, and the names that go with them."""

    spec: Spec

    @property
    def size(self) -> int:
        """Nodes."""
        return self.spec.nodes

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Node names, in index order."""
        return tuple(f"n{i:05d}" for i in range(self.size))

    @cached_property
    def rack(self) -> Ints:
        """Rack of each node."""
        return np.arange(self.size) // RACK_NODES

    @cached_property
    def pod(self) -> Ints:
        """Leaf group of each node: one leaf switch per rail."""
        return np.arange(self.size) // POD_NODES

    @cached_property
    def pdu(self) -> Ints:
        """Power distribution unit of each node."""
        return np.arange(self.size) // PDU_NODES

    @cached_property
    def zone(self) -> Ints:
        """Cooling zone of each node."""
        return np.arange(self.size) // ZONE_NODES

    @cached_property
    def rail_devices(self) -> tuple[str, ...]:
        """Names of the training adapters' ports."""
        return tuple(f"mlx5_{i}/1" for i in range(self.spec.rails))

    @cached_property
    def rail_of_gpu(self) -> Ints:
        """Adapter that each of the eight GPUs uses."""
        return np.arange(GPUS) * self.spec.rails // GPUS

    @cached_property
    def peer_steps(self) -> tuple[int, ...]:
        """Distinct ring distances to the peers; fewer than eight in a small cluster."""
        wanted = dict.fromkeys(step % self.size for step in (*PEER_STEPS, *range(1, self.size)))
        return tuple(step for step in wanted if step)[: min(PEERS, self.size - 1)]

    @cached_property
    def peers(self) -> Ints:
        """Node × peer: index of the node probed."""
        return np.asarray((np.arange(self.size)[:, None] + np.array(self.peer_steps)[None, :]) % self.size)

    @cached_property
    def peer_rail(self) -> Ints:
        """Rail over which the k-th peer is probed."""
        return np.arange(len(self.peer_steps)) % self.spec.rails

    @cached_property
    def peer_far(self) -> Bools:
        """Node × peer: whether the way leads over a spine."""
        return np.asarray(self.pod[:, None] != self.pod[self.peers])

    @cached_property
    def peer_spine(self) -> Ints:
        """Node × peer: the spine that hashing chose for a far pair."""
        return (np.arange(self.size)[:, None] * 7 + self.peers * 13) % SPINES

    def facts(self, node: int) -> dict[str, str]:
        """Attributes of a node's topology record."""
        rails = " ".join(f"{self.names[p]}={r}" for p, r in zip(self.peers[node], self.peer_rail, strict=True))
        address = f"10.{node >> 14 & 63}.{node >> 7 & 127}.{(node & 127) + 1}"
        return {
            "rack": rack_name(int(self.rack[node])), "leaf": leaf_name(int(self.pod[node])), "rails": str(self.spec.rails),
            "pdu": pdu_name(int(self.pdu[node])), "zone": zone_name(int(self.zone[node])),
            "rail_address": address, "probe_address": f"{address}:7402", "probe_rails": rails,
        }  # fmt: skip


def rack_name(rack: int) -> str:
    return f"rack-{rack:03d}"


def leaf_name(pod: int, rail: int = -1) -> str:
    """A group of leaves (one per rail), or one of them."""
    return f"leaf-{pod:03d}" if rail < 0 else f"leaf-{pod:03d}/rail{rail}"


def pdu_name(pdu: int) -> str:
    return f"pdu-{pdu:03d}"


def zone_name(zone: int) -> str:
    return f"zone-{zone:02d}"
