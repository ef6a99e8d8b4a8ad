"""adtk's SeasonalAD: residual of a classic seasonal decomposition whose season is found in the training rows."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign


class AdtkSeasonal(Method):
    """Where adtk finds no season in the training rows it refuses; then the distance from the training median is the score."""

    name = "adtk-seasonal"
    family = "uni"
    paper = "adtk 0.6 SeasonalAD"
    online = True
    needs = ("adtk", "pandas")

    @classmethod
    def prepare(cls) -> None:
        foreign("adtk.transformer")

    def fit(self, train: F64, seed: int) -> None:
        self.rows = len(train)
        self.model = foreign("adtk.transformer").ClassicSeasonalDecomposition(trend=False)
        try:
            residual = np.asarray(self.model.fit_transform(self.series(train, 0)), np.float64)
        except Exception as refusal:  # adtk raises the bare class; on a constant it trips over an empty list
            if "seasonality" not in str(refusal) and not isinstance(refusal, IndexError):
                raise
            self.model, residual = None, train[:, 0]
        self.centre = float(np.median(residual))
        self.unit = float(np.subtract(*np.quantile(residual, [0.75, 0.25]))) or 1.0

    def score(self, test: F64) -> F64:
        residual = test[:, 0]
        if self.model is not None:
            residual = np.asarray(self.model.transform(self.series(test, self.rows)), np.float64)
        return np.abs(residual - self.centre) / self.unit

    def series(self, rows: F64, start: int) -> object:
        """As adtk takes them: with a time index that goes on from fit to score."""
        pandas = foreign("pandas")
        first = pandas.Timestamp("2020") + pandas.Timedelta(minutes=start)
        return pandas.Series(rows[:, 0], index=pandas.date_range(first, periods=len(rows), freq="min"))
