"""DSPOT of ads-evt: SPOT on the value less its moving average, both tails."""

from __future__ import annotations

import logging

import numpy as np

from benchmarks.detect.methods.base import F64, Method, foreign

DEPTH = 10


class AdsEvtDspot(Method):
    """Where the value lies in the moving band; above 1 is an alarm of the package's own."""

    name = "ads-evt-dspot"
    family = "uni"
    paper = "ads-evt bidSPOT (Siffer et al. 2017), depth 10, risk 1e-4"
    online = True
    calibrated = True
    needs = ("ads_evt",)

    @classmethod
    def prepare(cls) -> None:
        logging.disable(logging.CRITICAL)
        foreign("ads_evt")

    def fit(self, train: F64, seed: int) -> None:
        self.history = train[:, 0]

    def score(self, test: F64) -> F64:
        model = foreign("ads_evt").bidSPOT(q=1e-4, depth=DEPTH)
        model.fit(self.history, test[:, 0])
        model.initialize()
        with np.errstate(all="ignore"):
            band = model.run()
        upper, lower = np.array(band["upper_thresholds"]), np.array(band["lower_thresholds"])
        half = np.maximum((upper - lower) / 2, 1e-9)
        out = np.abs(test[:, 0] - (upper + lower) / 2) / half
        return np.asarray(np.clip(np.nan_to_num(out, nan=0.0, posinf=1e3), 0.0, 1e3), np.float64)
