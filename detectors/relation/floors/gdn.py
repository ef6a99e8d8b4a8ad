"""Forecast from the nodes that resemble one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.relation.floors.base import F32, Episode, Floor, all_metrics, rolling

ROUNDS = 4


class Gdn(Floor):
    """Largest error over metrics, in robust units of that metric's errors, mean of 20 s."""

    name = "gdn"
    paper = "GDN (AAAI'21) re-implemented; resemblance from the warm-up so that unseen nodes have one, 8 neighbours, window 5"

    def __init__(self) -> None:
        self._net: Any = None

    def fit(self, healthy: Sequence[Episode], seed: int = 0) -> None:
        from models import floors

        series = [changes(episode) for episode in healthy]
        neighbours = [self._neighbours(one, episode) for one, episode in zip(series, healthy, strict=True)]
        self._net = floors.train_gdn(series, neighbours, seed)

    def score(self, episode: Episode) -> F32:
        from models import floors

        series = changes(episode)
        return robust_largest(floors.gdn_errors(self._net, series, self._neighbours(series, episode)))

    @staticmethod
    def _neighbours(series: F32, episode: Episode) -> NDArray[np.int64]:
        from models import floors

        past = series[2 : max(episode.warm, 8)]
        return floors.resembling(past.transpose(1, 0, 2).reshape(past.shape[1], -1))


def changes(episode: Episode) -> F32:
    """rounds × nodes × metrics: distance from the node's own warm-up, in units of the job's spread."""
    metrics = all_metrics(episode).transpose(0, 2, 1)
    past = metrics[2 : max(episode.warm, 8)]
    away = metrics - np.median(past, axis=0)
    scale = np.maximum(1.4826 * np.median(np.abs(away[2 : max(episode.warm, 8)]), axis=(0, 1)), 0.002)
    return np.clip(away / scale, -30.0, 30.0).astype(np.float32) / 3.0


def robust_largest(errors: F32) -> F32:
    """rounds × nodes × channels → rounds × nodes: the largest robust z over channels, smoothed."""
    smooth = rolling(errors, ROUNDS)
    middle = np.median(smooth, axis=1, keepdims=True)
    spread = np.maximum(1.4826 * np.median(np.abs(smooth - middle), axis=1, keepdims=True), 0.03)
    return np.asarray(((smooth - middle) / spread).max(axis=2), dtype=np.float32)
