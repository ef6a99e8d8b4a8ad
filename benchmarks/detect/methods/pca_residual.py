"""Plain PCA residual: what the leading components of the training rows cannot explain of a row."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method
from benchmarks.detect.methods.windows import standardised

EXPLAINED_RATIO = 0.9


class PcaResidual(Method):
    """Components for 90 % of the training variance; squared length of the rest, columns standardised by the training rows."""

    name = "pca-residual"
    family = "multi"
    paper = "squared prediction error (Jackson and Mudholkar 1979), fitted on the training rows"
    online = True
    depends = ("benchmarks.detect.methods.windows",)

    def fit(self, train: F64, seed: int) -> None:
        self.train = train
        (scaled,) = standardised(train)
        values, vectors = np.linalg.eigh(np.cov(scaled, rowvar=False))
        kept = int(np.searchsorted(np.cumsum(values[::-1]) / values.sum(), EXPLAINED_RATIO)) + 1
        self.components = vectors[:, ::-1][:, :kept]

    def score(self, test: F64) -> F64:
        scaled = standardised(self.train, test)[1]
        rest = scaled - scaled @ self.components @ self.components.T
        return np.asarray(np.sum(rest**2, axis=1), np.float64)
