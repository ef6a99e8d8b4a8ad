"""Whom a node probes on a large network: some peers for good, the others in turn, so that all nodes together see every pair of leaves.

For good: the two neighbours in the ring of names (the ring that collectives use), and a node on the same rail below another leaf. In turn:
the nodes below one leaf share the other leaves among themselves and move on at each epoch. Every node works this out for itself from the
same picture; where pictures differ for a moment, a pair is seen twice or a minute later.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

RATE_MAX_PER_S = 19.0
"""Probes per second and node on a large network, whatever the settings say of one peer."""
RDMA_SHARE_PER_S = 6.0
"""Of these, pings over RDMA where there are any."""
COVER_WITHIN_S = 60
EPOCH_MIN_S, EPOCH_MAX_S = 2, 10
STABLE = 3
UNKNOWN_LEAF = 32
"""Nodes whose leaf nobody knows are taken in runs of so many names: who is numbered together hangs together."""


@dataclass(frozen=True)
class Place:
    """Where a node is cabled to; empty is unknown."""

    leaf: str = ""
    rail: str = ""


class Rotation:
    """Peers of one node over time.

    Parameters
    ----------
    node
        Who probes; it need not be in `places`.
    places
        Every node known.
    limit
        Peers probed at once, more than `STABLE`.
    """

    def __init__(self, node: str, places: Mapping[str, Place], limit: int) -> None:
        self._node = node
        self._ring = sorted({*places, node})
        self._places = {name: places.get(name, Place()) for name in self._ring}
        self._leaves = _by_leaf(self._ring, self._places)
        self._leaf_of = {name: leaf for leaf, names in self._leaves.items() for name in names}
        self._limit = limit
        self._slots = max(1, limit - STABLE)
        own = self._leaf_of[node]
        self._mates = self._leaves[own]
        self._others = [leaf for leaf in self._leaves if leaf != own]
        self._stable = self._for_good()
        self.epoch_s = epoch_length_s(len(self._leaves), min(map(len, self._leaves.values())), self._slots)

    def peers(self, epoch: int) -> list[str]:
        """Names to probe in an epoch, sorted."""
        chosen = dict.fromkeys(self._stable)
        for slot, leaf in enumerate(self._duty(epoch)):
            chosen.setdefault(self._member(leaf, epoch, slot))
        for slot in range(self._slots, 3 * self._slots):
            # whoever has no leaf on duty takes anybody: leaves of few nodes would be asked by all
            if len(chosen) >= self._limit:
                break
            name = self._ring[self._number(epoch, slot) % len(self._ring)]
            if name != self._node:
                chosen.setdefault(name)
        return sorted(chosen)

    def epoch_at(self, now_ns: int) -> int:
        """The epoch of a moment: all nodes change at the same times."""
        return now_ns // (self.epoch_s * 1_000_000_000)

    def _duty(self, epoch: int) -> list[str]:
        """This node's part of the other leaves. Together the nodes below a leaf visit each other leaf once, or as many as they can."""
        count, mates = len(self._others), len(self._mates)
        together = mates * self._slots
        advance = together if together < count else 0
        turn = epoch * advance // count if advance else epoch
        first = (self._mates.index(self._node) + turn) % mates * self._slots
        end = min(first + self._slots, count)
        return [self._others[(epoch * advance + number) % count] for number in range(first, end)]

    def _member(self, leaf: str, epoch: int, slot: int) -> str:
        """A node below a leaf, another one each time; of the own rail where there are such."""
        names = self._leaves[leaf]
        rail = self._places[self._node].rail
        along = [name for name in names if rail and self._places[name].rail == rail] or names
        return along[self._number(epoch, slot) % len(along)]

    def _number(self, epoch: int, slot: int) -> int:
        return zlib.crc32(f"{self._node}>{epoch}>{slot}".encode())

    def _for_good(self) -> list[str]:
        at = self._ring.index(self._node)
        near = [self._ring[at - 1], self._ring[(at + 1) % len(self._ring)]]
        far = (
            self._others[zlib.crc32(f"{self._node}>".encode()) % len(self._others)]
            if self._others
            else self._leaf_of[self._node]
        )
        return [name for name in dict.fromkeys([*near, self._member(far, 0, 0)]) if name != self._node]


def epoch_length_s(leaves: int, smallest: int, slots: int) -> int:
    """Seconds between two changes of peers, so that within `COVER_WITHIN_S` the `smallest` leaf has visited all others.

    Examples
    --------
    >>> epoch_length_s(40, 32, 5), epoch_length_s(313, 4, 5)
    (10, 3)
    """
    needed = math.ceil(max(1, leaves - 1) / max(1, smallest * slots))
    # a minute begins within an epoch and ends within one: one more must fit
    return max(EPOCH_MIN_S, min(EPOCH_MAX_S, COVER_WITHIN_S // (needed + 1)))


def probes_per_peer_s(wanted: float, peers: int, large: bool, rdma: bool = False) -> float:
    """Probes per second and peer; on a large network all together, with pings over RDMA, stay below `RATE_MAX_PER_S`."""
    most_per_s = RATE_MAX_PER_S - RDMA_SHARE_PER_S * rdma
    return min(wanted, most_per_s / max(1, peers)) if large else wanted


def _by_leaf(ring: list[str], places: Mapping[str, Place]) -> dict[str, list[str]]:
    """Leaves by name, their nodes sorted."""
    found: dict[str, list[str]] = {}
    nowhere = 0
    for name in ring:
        leaf = places[name].leaf
        if not leaf:
            leaf = f"\0{nowhere // UNKNOWN_LEAF:05d}"
            nowhere += 1
        found.setdefault(leaf, []).append(name)
    return dict(sorted(found.items()))
