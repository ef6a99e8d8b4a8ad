"""The rule most dashboards have: a fixed line above and below what was seen before."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method


class StaticRule(Method):
    """How far outside the training range the value lies, in units of that range; the largest column counts."""

    name = "static-rule"
    family = "any"
    paper = "fixed minimum and maximum of the training rows"
    online = True
    calibrated = True

    def fit(self, train: F64, seed: int) -> None:
        self.low, self.high = train.min(axis=0), train.max(axis=0)
        self.range = np.where(self.high > self.low, self.high - self.low, 1.0)

    def score(self, test: F64) -> F64:
        outside = np.maximum(test - self.high, self.low - test) / self.range
        return np.asarray(outside.max(axis=1), np.float64)
