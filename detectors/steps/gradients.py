"""Sizes of the ranks' own gradients, each against its peers': what a rank that computes wrong changes first."""

from __future__ import annotations

import msgspec
import numpy as np

from detectors.state import Array, nan_array
from detectors.steps.peers import Groups

_FORGETTING = 0.01
_FLOOR = 0.02
_MOST_ODD_SHARE = 0.25


class GradientSizes(msgspec.Struct):
    """Usual place and spread of each rank's log norm among its peers' (arrays over ranks), and how long it has been away from it.

    `newest` is the log of the ratio to the peers' median in the last step, `run` the number of odd steps in a row.
    """

    steps: int = 0
    level: Array = msgspec.field(default_factory=lambda: nan_array(0))
    spread: Array = msgspec.field(default_factory=lambda: nan_array(0))
    newest: Array = msgspec.field(default_factory=lambda: nan_array(0))
    run: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def take(self, norms: Array, groups: Groups, ratio: float, deviations: float, warm_steps: int) -> None:
        """One step's local norms; NaN and zero say nothing."""
        apart = nan_array(len(norms))
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(norms > 0, np.log(norms), np.nan)
        for members in groups:
            known = logs[members][np.isfinite(logs[members])]
            if known.size >= 3:
                apart[members] = logs[members] - np.median(known)
        self.newest = apart
        if self.steps == 0 or len(self.level) != len(norms):
            self.level, self.spread, self.run = (
                np.nan_to_num(apart),
                np.zeros(len(norms)),
                np.zeros(len(norms), dtype=np.int64),
            )
            self.steps = 1
            return
        self._judge(apart, ratio, deviations, warm_steps)

    def odd_since(self, steps: int) -> list[int]:
        """Ranks that have been odd for so many steps, unless many are: then the data are odd, not the ranks."""
        odd = np.flatnonzero(self.run >= steps)
        return odd.tolist() if len(odd) <= max(1, _MOST_ODD_SHARE * len(self.run)) else []

    def _judge(self, apart: Array, ratio: float, deviations: float, warm_steps: int) -> None:
        away = np.abs(apart - self.level)
        limit = np.maximum(np.log(ratio), deviations * np.maximum(self.spread, _FLOOR))
        odd = (away > limit) & (self.steps >= warm_steps)
        known = np.isfinite(apart)
        self.run = np.where(odd, self.run + 1, np.where(known, 0, self.run))
        weight = max(1.0 / (self.steps + 1), _FORGETTING)
        learns = known & ~odd
        self.level = np.where(learns, self.level + weight * (apart - self.level), self.level)
        self.spread = np.where(learns, self.spread + weight * (1.2533 * away - self.spread), self.spread)
        self.steps += 1
