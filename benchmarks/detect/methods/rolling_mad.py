"""Rolling robust z: distance from the median of the last rows over their median absolute deviation."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign

WINDOW = 288
NORMAL = 1.4826


class RollingMad(Method):
    """The largest column counts; the row itself is not in its window. A floor of 5 % of the training spread stands for no spread."""

    name = "rolling-mad"
    family = "any"
    paper = "median and MAD of the last 288 rows"
    online = True
    calibrated = True
    needs = ("pandas",)

    def fit(self, train: F64, seed: int) -> None:
        self.history = train[-2 * WINDOW :]
        spread = train.std(axis=0)
        self.floor = np.where(spread > 0, 0.05 * spread, 1.0)

    def score(self, test: F64) -> F64:
        frame = foreign("pandas").DataFrame(np.concatenate([self.history, test]))
        middle = frame.rolling(WINDOW, min_periods=1).median().shift(1)
        deviation = (frame - middle).abs()
        spread = NORMAL * deviation.rolling(WINDOW, min_periods=1).median().shift(1)
        z = (deviation / np.maximum(spread.fillna(0.0), self.floor)).fillna(0.0).to_numpy()
        return np.asarray(z.max(axis=1)[-len(test) :], np.float64)
