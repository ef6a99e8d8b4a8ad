"""PCA of pyod, fitted on the training rows."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign
from benchmarks.detect.methods.windows import continued
from benchmarks.detect.metrics.vus import period


class PyodPca(Method):
    """Many columns: each row by itself, 25 % of the variance. One column: the window of one period that ends at the row."""

    name = "pyod-pca"
    family = "any"
    paper = "pyod PCA (Shyu et al. 2003), settings of TSB-AD"
    online = True
    needs = ("pyod",)
    depends = ("benchmarks.detect.methods.windows", "benchmarks.detect.metrics.vus")

    @classmethod
    def prepare(cls) -> None:
        foreign("pyod.models.pca")

    def fit(self, train: F64, seed: int) -> None:
        self.history = train
        self.width = min(period(train[:, 0]), len(train) // 3) if train.shape[1] == 1 else 1
        self.model = foreign("pyod.models.pca").PCA(n_components=None if train.shape[1] == 1 else 0.25, random_state=0)
        self.model.fit(continued(train, train, self.width)[self.width - 1 :])

    def score(self, test: F64) -> F64:
        raw = np.asarray(self.model.decision_function(continued(self.history, test, self.width)), np.float64)
        return np.nan_to_num(raw, nan=0.0, posinf=1e30)
