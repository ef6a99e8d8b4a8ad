"""Control chart: distance from an exponentially weighted mean over the exponentially weighted deviation."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign

SPAN = 100


class Ewma(Method):
    """The largest column counts; the row itself is not in its mean. A floor of 5 % of the training spread stands for no spread."""

    name = "ewma"
    family = "any"
    paper = "EWMA chart (Roberts 1959), span 100"
    online = True
    calibrated = True
    needs = ("pandas",)

    def fit(self, train: F64, seed: int) -> None:
        self.history = train[-10 * SPAN :]
        spread = train.std(axis=0)
        self.floor = np.where(spread > 0, 0.05 * spread, 1.0)

    def score(self, test: F64) -> F64:
        frame = foreign("pandas").DataFrame(np.concatenate([self.history, test]))
        weighted = frame.ewm(span=SPAN)
        mean, spread = weighted.mean().shift(1), weighted.std().shift(1)
        z = ((frame - mean).abs() / np.maximum(spread.fillna(0.0), self.floor)).fillna(0.0).to_numpy()
        return np.asarray(z.max(axis=1)[-len(test) :], np.float64)
