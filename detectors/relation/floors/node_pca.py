"""Each node against its own past."""

from __future__ import annotations

import numpy as np

from detectors.relation.floors.base import F32, Episode, Floor, all_metrics, rolling

COMPONENTS = 3
ROUNDS = 4


class NodePca(Floor):
    """Residual outside the first three principal components of the node's own warm-up."""

    name = "node_pca"
    paper = "per-node PCA, as in RUAD's and the M100 studies' baselines"

    def score(self, episode: Episode) -> F32:
        metrics = all_metrics(episode)
        past = metrics[2 : max(episode.warm, 8)]
        centre, scale = past.mean(axis=0), np.maximum(past.std(axis=0), 0.02)
        units = np.clip((metrics - centre) / scale, -30.0, 30.0).transpose(2, 0, 1)
        _, _, axes = np.linalg.svd(units[:, 2 : max(episode.warm, 8)], full_matrices=False)
        kept = axes[:, :COMPONENTS]
        inside = np.einsum("nck,nkt->nct", kept.transpose(0, 2, 1), np.einsum("nkc,ntc->nkt", kept, units)).transpose(
            0, 2, 1
        )
        return rolling(np.square(units - inside).mean(axis=2).T, ROUNDS)
