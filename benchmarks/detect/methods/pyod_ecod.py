"""ECOD of pyod, fitted on the training rows."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign
from benchmarks.detect.methods.windows import continued
from benchmarks.detect.metrics.vus import period


class PyodEcod(Method):
    """Many columns: each row by itself. One column: the window of one period that ends at the row."""

    name = "pyod-ecod"
    family = "any"
    paper = "pyod ECOD (Li et al., TKDE 2022), defaults"
    online = True
    needs = ("pyod",)
    depends = ("benchmarks.detect.methods.windows", "benchmarks.detect.metrics.vus")

    @classmethod
    def prepare(cls) -> None:
        foreign("pyod.models.ecod")

    def fit(self, train: F64, seed: int) -> None:
        self.history = train
        self.width = min(period(train[:, 0]), len(train) // 3) if train.shape[1] == 1 else 1
        self.model = foreign("pyod.models.ecod").ECOD()
        self.model.fit(continued(train, train, self.width)[self.width - 1 :])

    def score(self, test: F64) -> F64:
        return np.asarray(self.model.decision_function(continued(self.history, test, self.width)), np.float64)
