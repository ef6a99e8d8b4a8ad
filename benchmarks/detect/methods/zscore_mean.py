"""One line of numpy: distance from the training mean in training standard deviations, the mean of all columns."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method
from benchmarks.detect.methods.windows import standardised


class ZscoreMean(Method):
    """Absolute z of each column against the training rows, then the mean of all columns."""

    name = "zscore-mean"
    family = "multi"
    paper = "absolute z-score, the mean of all columns"
    online = True
    calibrated = True
    depends = ("benchmarks.detect.methods.windows",)

    def fit(self, train: F64, seed: int) -> None:
        self.train = train

    def score(self, test: F64) -> F64:
        return np.asarray(np.abs(standardised(self.train, test)[1]).mean(axis=1), np.float64)
