"""adtk's PersistAD: each row against the median of the 10 before, in units of the training rows' usual difference."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign

WINDOW = (10, 1)


class AdtkPersist(Method):
    """The statistic of adtk's detector; its last step, a cut at a multiple of the interquartile range, is our common line instead."""

    name = "adtk-persist"
    family = "uni"
    paper = "adtk 0.6 PersistAD, window 10"
    online = True
    needs = ("adtk", "pandas")

    @classmethod
    def prepare(cls) -> None:
        foreign("adtk.transformer")

    def fit(self, train: F64, seed: int) -> None:
        self.history = train[-2 * sum(WINDOW) :]
        low, high = np.quantile(self.differences(train), [0.25, 0.75])
        self.centre, self.unit = high, (high - low) or 1.0

    def score(self, test: F64) -> F64:
        rows = np.concatenate([self.history, test])
        return np.asarray((self.differences(rows)[-len(test) :] - self.centre) / self.unit, np.float64)

    def differences(self, rows: F64) -> F64:
        """Absolute difference of the two windows' medians, known at the last row of the second."""
        series = foreign("pandas").Series(
            rows[:, 0], index=foreign("pandas").date_range("2020", periods=len(rows), freq="min")
        )
        rolling = foreign("adtk.transformer").DoubleRollingAggregate(
            agg="median", window=WINDOW, min_periods=(1, 1), center=False, diff="l1"
        )
        return np.nan_to_num(np.asarray(rolling.transform(series), np.float64))
