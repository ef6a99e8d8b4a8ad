"""The same KNN on single values, without windows: what the windows add."""

from __future__ import annotations

from benchmarks.detect.methods.base import F64, Method
from benchmarks.detect.methods.pyod_knn import PyodKnn


class PyodKnnPlain(Method):
    """One column only; each value by itself."""

    name = "pyod-knn-plain"
    family = "uni"
    paper = "pyod KNN on single values, mean of 50 neighbours"
    online = True
    needs = ("pyod",)
    depends = ("benchmarks.detect.methods.pyod_knn",)

    @classmethod
    def prepare(cls) -> None:
        PyodKnn.prepare()

    def fit(self, train: F64, seed: int) -> None:
        self.model = PyodKnn(windowed=False)
        self.model.fit(train, seed)

    def score(self, test: F64) -> F64:
        return self.model.score(test)
