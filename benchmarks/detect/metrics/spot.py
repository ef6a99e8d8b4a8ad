"""The label-free line: SPOT (Siffer et al., KDD 2017) over a method's scores, the same for every method.

The scores of the end of the training rows set the first line; while the test rows pass, scores between the tail's start and the line
join the tail and move the line, scores above the line are alarms and are not learnt. The Pareto tail is fitted by probability-weighted
moments (Hosking and Wallis, 1987), which have a closed form and stay sane with the few excesses a short probation leaves.
"""

from __future__ import annotations

from bisect import insort

import numpy as np
from numpy.typing import NDArray

from benchmarks.detect.methods.base import F64

TAIL_START = 0.98
FEWEST_EXCESSES = 10
SHAPE_RANGE = (-0.5, 0.9)


class Spot:
    """A line that a score crosses with probability `risk` when nothing is wrong."""

    def __init__(self, calibration: F64, risk: float) -> None:
        self.risk = risk
        self.seen = len(calibration)
        start = min(TAIL_START, 1 - FEWEST_EXCESSES / max(self.seen, FEWEST_EXCESSES + 1))
        self.tail_start = float(np.quantile(calibration, start))
        self.excesses = sorted((calibration[calibration > self.tail_start] - self.tail_start).tolist())
        self.line = self.tail_line()

    def tail_line(self) -> float:
        """Score exceeded with probability `risk`, from the fitted tail."""
        if not self.excesses:
            return self.tail_start
        shape, scale = pareto(np.array(self.excesses))
        rarity = self.risk * self.seen / len(self.excesses)
        stretch = -np.log(rarity) if abs(shape) < 1e-9 else (rarity**-shape - 1) / shape
        return self.tail_start + max(scale * float(stretch), 0.0)

    def alarms(self, scores: F64) -> NDArray[np.bool_]:
        """Alarm or not for each score, in order; the line moves on the way."""
        out = np.zeros(len(scores), bool)
        tail = np.flatnonzero(scores > self.tail_start)
        before = 0
        for row in tail.tolist():
            self.seen += row - before
            before = row
            out[row] = scores[row] > self.line
            if not out[row]:
                self.learn(float(scores[row]))
        return out

    def learn(self, score: float) -> None:
        """Add one score of the tail that is no alarm."""
        insort(self.excesses, score - self.tail_start)
        self.line = self.tail_line()


def pareto(excesses: F64) -> tuple[float, float]:
    """Shape and scale of the generalised Pareto distribution of sorted positive excesses."""
    count = len(excesses)
    mean = float(excesses.mean())
    upper = float(np.mean(excesses * (1 - (np.arange(1, count + 1) - 0.35) / count)))
    spread = mean - 2 * upper
    if spread <= 0:
        return SHAPE_RANGE[0], mean
    shape = float(np.clip(2 - mean / spread, *SHAPE_RANGE))
    return shape, mean * (1 - shape)
