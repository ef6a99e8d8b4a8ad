"""SPOT of libspot on the raw value, one for each tail: where the value lies between the middle and the two lines."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign

RISK = 1e-4
LEVEL = 0.98


class LibspotTwoSided(Method):
    """Per column, the largest counts; the lines learn as they go, alarms are not learnt. Above 1 is an alarm of libspot's own.

    A line nearer to the median than 5 % of the training spread (columns that hardly move) counts as that far away.
    """

    name = "libspot"
    family = "any"
    paper = "libspot (Siffer et al. 2017), both tails, risk 1e-4"
    online = True
    calibrated = True
    needs = ("libspot",)

    def fit(self, train: F64, seed: int) -> None:
        self.middle = np.median(train, axis=0)
        self.upper = [Line(column, low=False) for column in train.T]
        self.lower = [Line(column, low=True) for column in train.T]

    def score(self, test: F64) -> F64:
        columns = [
            np.maximum(up.place(column, middle), low.place(column, middle))
            for up, low, column, middle in zip(self.upper, self.lower, test.T, self.middle.tolist(), strict=True)
        ]
        return np.asarray(np.max(columns, axis=0), np.float64)


class Line:
    """One tail's moving line. libspot refuses columns without a tail (few distinct values); their line stays at the extreme seen."""

    def __init__(self, column: F64, low: bool) -> None:
        self.low = low
        self.spot = foreign("libspot").Spot(q=RISK, low=low, discard_anomalies=True, level=LEVEL, max_excess=200)
        self.extreme = float(column.min() if low else column.max())
        self.least_reach = 0.05 * float(column.std()) or 1.0
        try:
            self.spot.fit(np.ascontiguousarray(column))
        except RuntimeError:
            self.spot = None

    def place(self, column: F64, middle: float) -> F64:
        """Distance from the middle towards the line, in units of the line's own distance: 0 the middle, 1 the line."""
        lines = np.full(len(column), self.extreme)
        if self.spot is not None:
            for at, value in enumerate(column.tolist()):
                lines[at] = self.spot.anomaly_threshold
                self.spot.step(value)
        side = -1.0 if self.low else 1.0
        reach = side * np.maximum(side * (lines - middle), self.least_reach)
        return np.asarray(np.clip(np.nan_to_num((column - middle) / reach), 0.0, 1e3), np.float64)
