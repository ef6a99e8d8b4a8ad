"""Our streaming line on one series: one report an event, as early as it stands out; built for NAB's score."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from benchmarks.detect.methods.base import F64, Family, Method
from detectors.threshold.single import event_scores


class OursThresholdEvents(Method):
    name: ClassVar[str] = "ours-threshold-events"
    family: ClassVar[Family] = "uni"
    paper: ClassVar[str] = "this project: season and window distances with extreme-value tails, one report an event"
    ours: ClassVar[bool] = True
    online: ClassVar[bool] = True
    calibrated: ClassVar[bool] = True
    depends: ClassVar[tuple[str, ...]] = tuple(
        f"detectors.threshold.{part}"
        for part in ("single", "season", "subsequence", "lines", "places", "tails", "shifts")
    )

    def fit(self, train: F64, seed: int) -> None:
        del seed
        self.history = train

    def score(self, test: F64) -> F64:
        return event_scores(np.concatenate([self.history, test])[:, 0], len(self.history))
