"""The line that runs live on every series, as it is: no season, no windows, one report an event."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from benchmarks.detect.methods.base import F64, Family, Method
from detectors.threshold.single import not_yet_reported, tail_scores

_FLOOR = 0.01


class OursThresholdLive(Method):
    name: ClassVar[str] = "ours-threshold-live"
    family: ClassVar[Family] = "uni"
    paper: ClassVar[str] = "this project: the line of dynamic_threshold alone"
    ours: ClassVar[bool] = True
    online: ClassVar[bool] = True
    calibrated: ClassVar[bool] = True
    depends: ClassVar[tuple[str, ...]] = tuple(
        f"detectors.threshold.{part}" for part in ("single", "lines", "places", "tails", "shifts")
    )

    def fit(self, train: F64, seed: int) -> None:
        del seed
        self.history = train[:, 0]
        low, high = np.percentile(self.history, [5, 95])
        self.size = float(high - low) or float(np.std(self.history)) or 1.0

    def score(self, test: F64) -> F64:
        values = np.concatenate([self.history, test[:, 0]]) / self.size
        scores = tail_scores(values[:, None], np.array([_FLOOR], np.float32), np.array([False]))[:, 0]
        return not_yet_reported(scores[len(self.history) :], max(len(self.history) // 2, 1))
