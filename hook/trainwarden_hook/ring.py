"""Which node keeps whose replica: a ring that crosses racks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def partners(racks: Mapping[str, str]) -> dict[str, str]:
    """The node that keeps the replicas of each node.

    Each node keeps those of exactly one other. Nodes in order of their racks, shifted by the size of the
    largest rack: nobody's partner is in the own rack unless one rack holds more than half of all nodes.

    Parameters
    ----------
    racks
        Rack of each node by name; an empty text is one rack like any other.

    Returns
    -------
    dict
        Partner of each node; empty for fewer than two nodes.
    """
    if len(racks) < 2:
        return {}
    order = sorted(racks, key=lambda node: (racks[node], node))
    largest = max(Counter(racks.values()).values())
    shift = largest if largest < len(order) else 1
    return {node: order[(number + shift) % len(order)] for number, node in enumerate(order)}
