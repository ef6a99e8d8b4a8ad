"""Left matrix profile (stumpy): distance of the window that ends at each row to its nearest neighbour in the past."""

from __future__ import annotations

import os

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign
from benchmarks.detect.metrics.vus import period


class StumpyLeft(Method):
    """Computed at once over history and rows, but each row's distance only looks back: the numbers of `stumpy.stumpi`."""

    name = "stumpy-left"
    family = "uni"
    paper = "stumpy (Yeh et al. 2016; STUMPI), window of one period"
    online = True
    needs = ("stumpy",)
    depends = ("benchmarks.detect.metrics.vus",)

    @classmethod
    def prepare(cls) -> None:
        os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")
        foreign("stumpy").stump(np.random.default_rng(0).normal(size=64), m=8)

    def fit(self, train: F64, seed: int) -> None:
        self.history = train[:, 0]
        self.width = max(min(period(self.history), len(train) // 4), 4)

    def score(self, test: F64) -> F64:
        values = np.concatenate([self.history, test[:, 0]])
        left = foreign("stumpy").stump(values, m=self.width)[:, 2].astype(np.int64)
        distances = znorm_distance(values, np.flatnonzero(left >= 0), left[left >= 0], self.width)
        out = np.zeros(len(left))
        out[left >= 0] = distances
        return np.pad(out, (self.width - 1, 0))[-len(test) :]


def znorm_distance(values: F64, first: np.ndarray, second: np.ndarray, width: int) -> F64:
    """Euclidean distance of pairs of z-normalised windows, given where they start."""
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    spread = windows.std(axis=1)
    flat = spread < 1e-12
    a, b = windows[first], windows[second]
    product = np.mean(a * b, axis=1) - a.mean(axis=1) * b.mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = product / (spread[first] * spread[second])
    correlation = np.where(flat[first] | flat[second], np.where(flat[first] & flat[second], 1.0, 0.5), correlation)
    return np.asarray(np.sqrt(np.maximum(2 * width * (1 - correlation), 0.0)), np.float64)
