"""Our window score of one series: how unusual the last stretch is; built for ranking stretches (VUS-PR)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from benchmarks.detect.methods.base import F64, Family, Method
from detectors.threshold.single import region_scores


class OursThresholdRegions(Method):
    name: ClassVar[str] = "ours-threshold-regions"
    family: ClassVar[Family] = "uni"
    paper: ClassVar[str] = "this project: online window PCA and seasonal distance, mean of the last 200 rows"
    ours: ClassVar[bool] = True
    online: ClassVar[bool] = True
    depends: ClassVar[tuple[str, ...]] = tuple(
        f"detectors.threshold.{part}" for part in ("single", "season", "subsequence")
    )

    def fit(self, train: F64, seed: int) -> None:
        del seed
        self.history = train

    def score(self, test: F64) -> F64:
        return region_scores(np.concatenate([self.history, test])[:, 0], len(self.history))
