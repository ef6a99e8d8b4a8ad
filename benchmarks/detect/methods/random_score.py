"""Random numbers: what every metric must rank last."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method


class RandomScore(Method):
    """Uniform numbers that know nothing."""

    name = "random"
    family = "any"
    paper = "uniform random numbers"
    online = True
    seeded = True
    calibrated = True

    def fit(self, train: F64, seed: int) -> None:
        self.seed = seed

    def score(self, test: F64) -> F64:
        return np.random.default_rng([self.seed, len(test)]).random(len(test))
