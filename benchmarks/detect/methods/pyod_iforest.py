"""Isolation forest of pyod, fitted on the training rows, with the settings TSB-AD tuned."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign
from benchmarks.detect.methods.windows import continued
from benchmarks.detect.metrics.vus import period


class PyodIforest(Method):
    """Many columns: 25 trees on each row, 80 % of the columns. One column: 150 trees on the window of one period."""

    name = "pyod-iforest"
    family = "any"
    paper = "pyod IForest (Liu et al. 2008), settings of TSB-AD"
    online = True
    seeded = True
    needs = ("pyod",)
    depends = ("benchmarks.detect.methods.windows", "benchmarks.detect.metrics.vus")

    @classmethod
    def prepare(cls) -> None:
        foreign("pyod.models.iforest")

    def fit(self, train: F64, seed: int) -> None:
        self.history = train
        single = train.shape[1] == 1
        self.width = min(period(train[:, 0]), len(train) // 3) if single else 1
        settings = {"n_estimators": 150} if single else {"n_estimators": 25, "max_features": 0.8}
        self.model = foreign("pyod.models.iforest").IForest(random_state=seed, **settings)
        self.model.fit(continued(train, train, self.width)[self.width - 1 :])

    def score(self, test: F64) -> F64:
        return np.asarray(self.model.decision_function(continued(self.history, test, self.width)), np.float64)
