"""Matrix profile (stumpy): distance of each window to its nearest neighbour anywhere in the series, as TSB-AD runs it."""

from __future__ import annotations

import os

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign
from benchmarks.detect.metrics.vus import period


class StumpyProfile(Method):
    """Sees the whole series at once; a window's score belongs to its middle row."""

    name = "stumpy-profile"
    family = "uni"
    paper = "stumpy (Yeh et al. 2016), window of one period; transductive"
    needs = ("stumpy",)
    depends = ("benchmarks.detect.metrics.vus",)

    @classmethod
    def prepare(cls) -> None:
        os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")
        foreign("stumpy").stump(np.random.default_rng(0).normal(size=64), m=8)

    def fit(self, train: F64, seed: int) -> None:
        self.history = train[:, 0]

    def score(self, test: F64) -> F64:
        values = np.concatenate([self.history, test[:, 0]])
        width = max(min(period(values), len(values) // 4), 4)
        profile = foreign("stumpy").stump(values, m=width)[:, 0].astype(np.float64)
        profile[~np.isfinite(profile)] = 0.0
        out = np.full(len(values), profile.min())
        out[width // 2 : len(values) - width + width // 2 + 1] = profile
        return out[-len(test) :]
