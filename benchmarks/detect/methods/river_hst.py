"""Half-space trees of river: an online forest that forgets."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign


class RiverHst(Method):
    """Columns scaled to 0..1 by the training rows; each row is scored, then learnt."""

    name = "river-hst"
    family = "any"
    paper = "river HalfSpaceTrees (Tan et al. 2011), 25 trees, window 250"
    online = True
    seeded = True
    needs = ("river",)

    @classmethod
    def prepare(cls) -> None:
        foreign("river.anomaly")

    def fit(self, train: F64, seed: int) -> None:
        self.low = train.min(axis=0)
        self.span = np.where(train.max(axis=0) > self.low, train.max(axis=0) - self.low, 1.0)
        self.trees = foreign("river.anomaly").HalfSpaceTrees(n_trees=25, height=8, window_size=250, seed=seed)
        for row in self.scaled(train):
            self.trees.learn_one(row)

    def score(self, test: F64) -> F64:
        out = np.zeros(len(test))
        for at, row in enumerate(self.scaled(test)):
            out[at] = self.trees.score_one(row)
            self.trees.learn_one(row)
        return out

    def scaled(self, rows: F64) -> list[dict[int, float]]:
        """Rows as river takes them: a dictionary each, values clipped to 0..1."""
        scaled = np.clip((rows - self.low) / self.span, 0.0, 1.0)
        return [dict(enumerate(row)) for row in scaled.tolist()]
