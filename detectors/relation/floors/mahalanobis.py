"""Distance from the other nodes over all metrics at once."""

from __future__ import annotations

import numpy as np

from detectors.relation.floors.base import F32, Episode, Floor, all_metrics, rolling

ROUNDS = 4


class Mahalanobis(Floor):
    """Distance of a node's means of 20 s from the job's median, with the covariance of the job's nodes."""

    name = "mahalanobis"
    paper = "Minder's baseline (NSDI'25); robust centre, ridge of 1 % on the covariance"

    def score(self, episode: Episode) -> F32:
        metrics = rolling(all_metrics(episode), ROUNDS)
        return np.stack([_distances(row.T.astype(np.float64)) for row in metrics]).astype(np.float32)


def _distances(rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> F32:
    away = rows - np.median(rows, axis=0)
    scale = np.maximum(1.4826 * np.median(np.abs(away), axis=0), 1e-3)
    units = np.clip(away / scale, -30.0, 30.0)
    covariance = np.cov(np.clip(units, -3.0, 3.0), rowvar=False) + 0.01 * np.eye(units.shape[1])
    return np.asarray(
        np.sqrt(np.maximum((units @ np.linalg.inv(covariance) * units).sum(axis=1), 0.0)), dtype=np.float32
    )
