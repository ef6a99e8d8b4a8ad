"""Two replicas that differ: the sums cannot say which is wrong, the size of each rank's own gradients may lean to one."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from detectors.state import Array, nan_array

_FORGETTING = 0.05
_WARM_STEPS = 20
_TIMES = 2.0
_LEANS_BY = math.log(_TIMES)


class OwnSizes(msgspec.Struct):
    """How far each rank's local gradient norm is from its own usual size, in logarithms."""

    steps: int = 0
    level: Array = msgspec.field(default_factory=lambda: nan_array(0))
    away: Array = msgspec.field(default_factory=lambda: nan_array(0))

    def take(self, norms: Array) -> None:
        """One step's local norms; NaN and zero say nothing."""
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(norms > 0, np.log(norms), np.nan)
        if len(self.level) != len(logs):
            self.steps, self.level, self.away = 0, logs, nan_array(len(logs))
        known = np.isfinite(logs)
        if not known.any():
            return
        self.away = np.where(known, np.abs(logs - self.level), self.away)
        moved = self.level + _FORGETTING * (logs - self.level)
        self.level = np.where(known, np.where(np.isfinite(self.level), moved, logs), self.level)
        self.steps += 1

    def leaning(self, ranks: list[int]) -> int | None:
        """The rank whose gradients left their usual size twice as far as those of the others, if one has; else None."""
        if self.steps < _WARM_STEPS or len(self.away) <= max(ranks):
            return None
        away = np.nan_to_num(self.away[ranks])
        first, second = np.argsort(away)[::-1][:2]
        return ranks[int(first)] if away[first] - away[second] > _LEANS_BY else None
