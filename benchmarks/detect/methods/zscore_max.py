"""One line of numpy: distance from the training mean in training standard deviations, the largest column."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method
from benchmarks.detect.methods.windows import standardised


class ZscoreMax(Method):
    """Absolute z of each column against the training rows, then the largest column."""

    name = "zscore-max"
    family = "any"
    paper = "absolute z-score, the largest column"
    online = True
    calibrated = True
    depends = ("benchmarks.detect.methods.windows",)

    def fit(self, train: F64, seed: int) -> None:
        self.train = train

    def score(self, test: F64) -> F64:
        return np.asarray(np.abs(standardised(self.train, test)[1]).max(axis=1), np.float64)
