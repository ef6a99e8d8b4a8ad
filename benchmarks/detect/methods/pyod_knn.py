"""Distance to the 50 nearest training rows (pyod KNN), with the settings TSB-AD tuned."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign
from benchmarks.detect.methods.windows import continued
from benchmarks.detect.metrics.vus import period


class PyodKnn(Method):
    """Many columns: each row by itself. One column: the window of one period that ends at the row."""

    name = "pyod-knn"
    family = "any"
    paper = "pyod KNN (Ramaswamy et al. 2000), mean of 50 neighbours as TSB-AD"
    online = True
    needs = ("pyod",)
    depends = ("benchmarks.detect.methods.windows", "benchmarks.detect.metrics.vus")
    most_rows = 8000

    def __init__(self, windowed: bool = True) -> None:
        self.windowed = windowed

    @classmethod
    def prepare(cls) -> None:
        foreign("pyod.models.knn")

    def fit(self, train: F64, seed: int) -> None:
        self.history = train
        single = train.shape[1] == 1 and self.windowed
        self.width = min(period(train[:, 0]), len(train) // 3) if single else 1
        windows = continued(train, train, self.width)[self.width - 1 :]
        self.model = foreign("pyod.models.knn").KNN(n_neighbors=min(50, len(windows) - 1), method="mean")
        self.model.fit(windows)

    def score(self, test: F64) -> F64:
        return np.asarray(self.model.decision_function(continued(self.history, test, self.width)), np.float64)
