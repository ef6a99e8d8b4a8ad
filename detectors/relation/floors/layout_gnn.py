"""A graph net on the room's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.relation.floors.base import F32, Episode, Floor
from detectors.relation.floors.gdn import changes, robust_largest
from detectors.relation.graph import Graph


class LayoutGnn(Floor):
    """Largest error of a node's metrics as its rack makes them likely, in robust units of that metric's errors, mean of 20 s."""

    name = "layout_gnn"
    paper = (
        "after GRAAFE: convolutions over the physical layout; self-supervised here, GRAAFE learns from past failures"
    )

    def __init__(self) -> None:
        self._net: Any = None

    def fit(self, healthy: Sequence[Episode], seed: int = 0) -> None:
        from models import floors

        self._net = floors.train_layout([changes(e) for e in healthy], [edges(e.graph) for e in healthy], seed)

    def score(self, episode: Episode) -> F32:
        from models import floors

        return robust_largest(floors.layout_errors(self._net, changes(episode), edges(episode.graph)))


def edges(graph: Graph) -> NDArray[np.int64]:
    """2 × edges: both directions between the nodes of a rack, and between neighbours in the row."""
    first, second = graph.edges("rack", 1_000_000)
    row = np.arange(len(graph.nodes) - 1)
    one, other = np.concatenate([first, row]), np.concatenate([second, row + 1])
    return np.stack([np.concatenate([one, other]), np.concatenate([other, one])])
