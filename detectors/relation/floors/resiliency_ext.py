"""Scores of nvidia-resiliency-ext: relative to the best rank, and to the rank's own best."""

from __future__ import annotations

import numpy as np

from detectors.relation.features import LOCAL
from detectors.relation.floors.base import F32, Episode, Floor, filled, rolling

ROUNDS = 4


class ResiliencyExt(Floor):
    """One minus the smaller of: fastest node's time over the node's, node's best time so far over its present one."""

    name = "resiliency_ext"
    paper = "nvidia-resiliency-ext straggler detection: relative and individual performance scores (its default line is 0.7)"

    def score(self, episode: Episode) -> F32:
        spent = np.exp(rolling(filled(episode.node)[:, LOCAL], ROUNDS))
        relative = spent.min(axis=1, keepdims=True) / spent
        best = np.minimum.accumulate(np.where(np.arange(len(spent))[:, None] < ROUNDS, np.inf, spent), axis=0)
        individual = np.where(np.isfinite(best), best / spent, 1.0)
        # all slow down together where kernels wait for each other: what the whole job shares is nobody's
        individual = individual / np.maximum(np.median(individual, axis=1, keepdims=True), 1e-6)
        return np.asarray(1.0 - np.minimum(relative, individual), dtype=np.float32)
