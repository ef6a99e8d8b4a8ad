"""Relations that nobody told: nodes whose local times go up and down together do the same work.

GDN's idea without its gradient descent: each node is a vector (its innovations over the last minutes), its relatives are the nodes
with the most similar vectors, and who is mutually related, directly or over others, is a group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from detectors.relation.graph import Ints, Relation

F32 = NDArray[np.float32]

NEIGHBOURS = 6
LEAST_SIMILARITY = 0.5
LEAST_ROUNDS = 16
CHUNK = 512


def learnt_relation(history: F32) -> Relation | None:
    """Groups of nodes from rounds × nodes of innovations (NaN unknown); None while there is too little to learn from.

    The mean over all nodes is kept: a stage differs from another in when and how much it follows the job, and that is what binds it.
    """
    known = history[np.isfinite(history).mean(axis=1) > 0.5]
    if len(known) < LEAST_ROUNDS:
        return None
    values = np.nan_to_num(known - np.nanmedian(known, axis=0))
    values /= np.maximum(np.linalg.norm(values, axis=0), 1e-6)
    close = _nearest(values.T.astype(np.float32))
    group = _components(close, values.shape[1])
    return Relation("learnt", group, tuple(f"alike {number}" for number in range(int(group.max(initial=-1)) + 1)))


def _nearest(units: F32) -> list[set[int]]:
    """Of each node the most similar others that are similar enough."""
    count = len(units)
    wanted = min(NEIGHBOURS, count - 1)
    found: list[set[int]] = []
    for at in range(0, count, CHUNK):
        likeness = units[at : at + CHUNK] @ units.T
        likeness[np.arange(len(likeness)), np.arange(at, at + len(likeness))] = -np.inf
        best = np.argpartition(-likeness, wanted - 1, axis=1)[:, :wanted]
        found += [{int(j) for j in row if likeness[i, j] > LEAST_SIMILARITY} for i, row in enumerate(best)]
    return found


def _components(close: list[set[int]], count: int) -> Ints:
    """Groups of mutual neighbours; nodes without one are alone (-1)."""
    group = np.full(count, -1, dtype=np.int64)
    number = 0
    for start in range(count):
        if group[start] >= 0:
            continue
        reached, stack = {start}, [start]
        while stack:
            node = stack.pop()
            fresh = {other for other in close[node] if node in close[other]} - reached
            reached |= fresh
            stack += sorted(fresh)
        if len(reached) > 1:
            group[sorted(reached)] = number
            number += 1
    return group
