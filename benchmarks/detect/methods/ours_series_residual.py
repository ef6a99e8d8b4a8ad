"""Our residual of principal components over several time scales, the core of the live detector `series_residual`."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.detect.methods.base import F64, Family, Method
from detectors.series.residual import ResidualModel


class OursSeriesResidual(Method):
    name: ClassVar[str] = "ours-series-residual"
    family: ClassVar[Family] = "multi"
    paper: ClassVar[str] = "this project: PCA residual of squashed, banded metrics, averaged over ranks"
    ours: ClassVar[bool] = True
    online: ClassVar[bool] = True
    depends: ClassVar[tuple[str, ...]] = ("detectors.series.residual",)

    def fit(self, train: F64, seed: int) -> None:
        del seed
        self.model = ResidualModel()
        self.model.fit(train)

    def score(self, test: F64) -> F64:
        return self.model.score(test)
