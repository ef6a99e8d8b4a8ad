"""Prophet: how far outside its own forecast interval a value lies; refitted whenever the history has doubled."""

from __future__ import annotations

import logging
import warnings

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign

MOST_HISTORY = 3000


class ProphetInterval(Method):
    """Forecasts from what is known, refits after as many new rows as it was fitted on (at most the last 3,000)."""

    name = "prophet"
    family = "uni"
    paper = "Prophet (Taylor and Letham 2018), 99 % interval, defaults otherwise"
    online = True
    needs = ("prophet", "pandas")

    @classmethod
    def prepare(cls) -> None:
        for noisy in ("cmdstanpy", "prophet", "prophet.plot"):
            logging.getLogger(noisy).setLevel(logging.CRITICAL)
        foreign("prophet")

    def fit(self, train: F64, seed: int) -> None:
        self.history = train[:, 0]
        self.seed = seed

    def score(self, test: F64) -> F64:
        values = np.concatenate([self.history, test[:, 0]])
        out, known = [], len(self.history)
        while known < len(values):
            ahead = min(known, MOST_HISTORY, len(values) - known)
            out.append(self.distance(values, known, ahead))
            known += ahead
        return np.concatenate(out)

    def distance(self, values: F64, known: int, ahead: int) -> F64:
        """Distance from the forecast over half the interval's width, for the `ahead` rows after the `known` ones."""
        start = max(known - MOST_HISTORY, 0)
        stamps = foreign("pandas").Timestamp("2020") + foreign("pandas").to_timedelta(
            np.arange(len(values)) * self.step_s, unit="s"
        )
        frame = foreign("pandas").DataFrame({"ds": stamps, "y": values})
        np.random.seed(self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = foreign("prophet").Prophet(interval_width=0.99, uncertainty_samples=200)
            model.fit(frame.iloc[start:known])
            forecast = model.predict(frame.iloc[known : known + ahead][["ds"]])
        half = np.maximum((forecast["yhat_upper"] - forecast["yhat_lower"]).to_numpy() / 2, 1e-9)
        return np.asarray(np.abs(values[known : known + ahead] - forecast["yhat"].to_numpy()) / half, np.float64)
