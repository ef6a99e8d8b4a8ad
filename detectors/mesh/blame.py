"""Which node, leaf or fabric explains a set of bad pairs: the fewest nodes whose removal leaves a healthy mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwarden.topology import Topology

_EXPLAINED_SHARE = 0.15
_GUILTY_SHARE = 0.6
_MAX_NODES = 16


@dataclass(frozen=True)
class Explanation:
    """Nodes to blame, or a leaf, or everything; all empty when the pairs do not tell."""

    nodes: tuple[str, ...] = ()
    leaf: str = ""
    fabric: bool = False


def explain(keys: Sequence[tuple[str, str]], bad: NDArray[np.bool_], topology: Topology) -> Explanation:
    """Explain bad pairs.

    A node is guilty when most pairs that reach it are bad and the pairs that do not touch it are not. Two nodes that see only each
    other cannot tell whose link it is.

    Examples
    --------
    >>> keys = [(a, b) for a in "abcd" for b in "abcd" if a != b]
    >>> explain(keys, np.array(["c" in pair for pair in keys]), Topology()).nodes
    ('c',)
    >>> explain(keys, np.ones(len(keys), dtype=bool), Topology()).fabric
    True
    """
    targets = sorted({target for _, target in keys})
    if not bad.any():
        return Explanation()
    chosen = _fewest(keys, bad, targets)
    if len(chosen) == 1:
        return _single(keys, bad, chosen[0])
    if leaf := _common_leaf(chosen, targets, topology):
        return Explanation(leaf=leaf)
    if len(chosen) >= max(2.0, _GUILTY_SHARE * len(targets)):
        return Explanation(fabric=len(targets) > 2)
    return Explanation(nodes=tuple(chosen)) if 4 * len(chosen) <= len(targets) else Explanation()


def _fewest(keys: Sequence[tuple[str, str]], bad: NDArray[np.bool_], targets: list[str]) -> list[str]:
    """Greedy: the node with the largest share of bad pairs first, until hardly any bad pair is left."""
    number = {name: i for i, name in enumerate(sorted({name for pair in keys for name in pair}))}
    ends = np.array([(number[prober], number[target]) for prober, target in keys])
    candidates = np.array([number[target] for target in targets])
    names = list(number)
    left = np.ones(len(keys), dtype=np.bool_)
    chosen: list[str] = []
    while len(chosen) < _MAX_NODES and left.any() and bad[left].mean() > _EXPLAINED_SHARE:
        hits, total = np.zeros(len(names)), np.zeros(len(names))
        for column in (0, 1):
            np.add.at(hits, ends[left, column], bad[left])
            np.add.at(total, ends[left, column], 1.0)
        share = np.where(total > 0, hits / np.maximum(total, 1.0), -1.0) + 1e-6 * hits
        worst = int(candidates[np.argmax(share[candidates])])
        chosen.append(names[worst])
        left &= (ends != worst).all(axis=1)
    return chosen


def _single(keys: Sequence[tuple[str, str]], bad: NDArray[np.bool_], node: str) -> Explanation:
    reaching = np.array([target == node for _, target in keys])
    apart = np.array([node not in pair for pair in keys])
    if not apart.any() or bad[reaching].mean() < _GUILTY_SHARE:
        return Explanation()
    return Explanation(nodes=(node,))


def _common_leaf(chosen: list[str], targets: list[str], topology: Topology) -> str:
    leaves = {node: topology.attributes(node).get("leaf", "") for node in targets}
    found = {leaves.get(node, "") for node in chosen}
    leaf = found.pop() if len(found) == 1 else ""
    members = [node for node in targets if leaves[node] == leaf]
    covers = bool(leaf) and len(members) < len(targets) and 3 * len(set(chosen) & set(members)) >= 2 * len(members)
    return leaf if covers else ""
