"""Machines of one job behave alike: denoise each metric, and see who is far from all others for long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from detectors.relation.features import CLOCK, LOCAL, OWN, POWER
from detectors.relation.floors.base import F32, Episode, Floor, all_metrics, rolling

METRICS = (LOCAL, OWN, CLOCK, POWER, 8, 9, 10)
"""Node channels, then round trip, marks and errors of the worst rail: of Minder's seven, what this project collects."""
CONTINUITY_ROUNDS = 6
TRAINING_WINDOWS = 20_000


class Minder(Floor):
    """Largest normalised distance, over metrics, of a node's denoised window from those of the others; mean of 30 s."""

    name = "minder"
    paper = "Minder (NSDI'25) re-implemented: LSTM-VAE per metric, window 8, hidden 4, latent 8; continuity of 30 s instead of 4 min"

    def __init__(self) -> None:
        self._nets: dict[int, Any] = {}

    def fit(self, healthy: Sequence[Episode], seed: int = 0) -> None:
        from models import floors

        stream = np.random.default_rng(seed)
        for metric in METRICS:
            windows = np.concatenate([_windows(_normal(episode)[:, metric], 3) for episode in healthy])
            self._nets[metric] = floors.train_vae(windows[stream.permutation(len(windows))[:TRAINING_WINDOWS]], seed)

    def score(self, episode: Episode) -> F32:
        from models import floors

        values = _normal(episode)
        rounds, nodes = values.shape[0], values.shape[2]
        found = np.zeros((rounds, nodes), dtype=np.float32)
        for metric in METRICS:
            windows = _windows(values[:, metric], 1)
            clean = floors.denoised(self._nets[metric], windows).reshape(-1, nodes, floors.MINDER_WINDOW)
            away = np.abs(clean - np.median(clean, axis=1, keepdims=True)).mean(axis=2)
            spread = np.maximum(away.mean(axis=1, keepdims=True) + away.std(axis=1, keepdims=True), 1e-3)
            found[floors.MINDER_WINDOW - 1 :] = np.maximum(found[floors.MINDER_WINDOW - 1 :], away / spread)
        return rolling(found, CONTINUITY_ROUNDS)


def _normal(episode: Episode) -> F32:
    """Each metric scaled by its spread over the job's nodes in the warm-up."""
    metrics = all_metrics(episode)
    past = metrics[2 : max(episode.warm, 4)]
    centre = np.median(past, axis=(0, 2))[None, :, None]
    scale = np.maximum(1.4826 * np.median(np.abs(past - centre), axis=(0, 2)), 0.005)[None, :, None]
    return np.asarray(np.clip((metrics - centre) / scale, -30.0, 30.0) / 3.0, dtype=np.float32)


def _windows(series: F32, stride: int) -> F32:
    """rounds × nodes → windows × 8, rounds first, every `stride`-th round."""
    view = np.lib.stride_tricks.sliding_window_view(series, 8, axis=0)[::stride]
    return np.ascontiguousarray(view.reshape(-1, 8))
