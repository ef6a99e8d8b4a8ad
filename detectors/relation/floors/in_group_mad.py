"""The floor of floors: local step time against the peers of the same stage."""

from __future__ import annotations

import numpy as np

from detectors.relation.features import LOCAL
from detectors.relation.floors.base import F32, Episode, Floor, among, filled, rolling

ROUNDS = 4
LEAST_SPREAD = 0.002


class InGroupMad(Floor):
    """Robust z of the mean local time of 20 s within the data-parallel group."""

    name = "in_group_mad"
    paper = "median and MAD per stage, the in-stage comparison that gets ByteDance's three traces right"

    def score(self, episode: Episode) -> F32:
        local = rolling(filled(episode.node)[:, LOCAL], ROUNDS)
        middle, spread = among(local, episode.graph.group_of("dp"))
        return np.asarray((local - middle) / np.maximum(spread, LEAST_SPREAD), dtype=np.float32)


class InGroupMadOwnPast(Floor):
    """The same of the distance from the node's own mean during the warm-up: what unequal nodes need."""

    name = "in_group_mad_past"
    paper = "as in_group_mad, on the change since the warm-up"

    def score(self, episode: Episode) -> F32:
        local = filled(episode.node)[:, LOCAL]
        usual = np.median(local[2 : max(episode.warm, 3)], axis=0)
        recent = rolling(local - usual, ROUNDS)
        middle, spread = among(recent, episode.graph.group_of("dp"))
        return np.asarray((recent - middle) / np.maximum(spread, LEAST_SPREAD), dtype=np.float32)
