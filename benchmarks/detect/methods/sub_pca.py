"""Sub-PCA: PCA on sliding windows of one column, as TSB-AD's leading univariate method; sees the whole series at once."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method
from benchmarks.detect.methods.pca_tsb import eigen_distance
from benchmarks.detect.methods.windows import centred, embed
from benchmarks.detect.metrics.vus import period


class SubPca(Method):
    """Windows of one period (by autocorrelation), all components weighted by the inverse of their share of variance."""

    name = "sub-pca"
    family = "uni"
    paper = "TSB-AD (NeurIPS 2024), Sub-PCA; transductive"
    needs = ("sklearn",)
    depends = (
        "benchmarks.detect.methods.windows",
        "benchmarks.detect.methods.pca_tsb",
        "benchmarks.detect.metrics.vus",
    )

    def fit(self, train: F64, seed: int) -> None:
        self.history = train

    def score(self, test: F64) -> F64:
        rows = np.concatenate([self.history, test])
        width = min(period(rows[:, 0]), len(rows) // 3)
        return centred(eigen_distance(embed(rows, width), None), width)[-len(test) :]
