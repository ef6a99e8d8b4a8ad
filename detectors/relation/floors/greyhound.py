"""A change of the job's pace, verified, then who moved away from the group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from detectors.relation.features import LOCAL
from detectors.relation.floors.base import F32, Episode, Floor, among, filled, rolling

HAZARD = 1.0 / 50.0
VERIFIED_RATIO = 1.1
ROUNDS = 2
LONGEST = 120


class Greyhound(Floor):
    """Local time over the group's median, while the job's step time stands verified above what it was before a change point."""

    name = "greyhound"
    paper = "Greyhound (ATC'25): Bayesian online change points, verified at 10 %, then the group's median; steps give the period"
    verified_ratio = VERIFIED_RATIO

    def score(self, episode: Episode) -> F32:
        local = rolling(filled(episode.node)[:, LOCAL], ROUNDS)
        over = local - among(local, episode.graph.group_of("dp"))[0]
        return np.where(self._slow(episode)[:, None], over, 0.0).astype(np.float32)

    def _slow(self, episode: Episode) -> NDArray[np.bool_]:
        pace = filled(episode.step_ms[:, None].astype(np.float32))[:, 0].astype(np.float64)
        run_lengths = change_points(np.log(np.maximum(pace, 1e-3)))
        slow = np.zeros(len(pace), dtype=np.bool_)
        usual = float(np.median(pace[2 : max(episode.warm, 3)]))
        for t in range(episode.warm, len(pace)):
            since = max(t - run_lengths[t], 0)
            slow[t] = bool(np.mean(pace[since : t + 1]) > self.verified_ratio * usual)
        return slow


class GreyhoundSensitive(Greyhound):
    """The same with verification at 2 %: at 10 % it is blind below 1.1 by design."""

    name = "greyhound_2"
    paper = "Greyhound with its verification lowered to 2 %"
    verified_ratio = 1.02


def change_points(values: NDArray[np.float64]) -> list[int]:
    """Most likely run length at each time (Adams and MacKay 2007), Gaussian with unknown mean and known spread."""
    spread = max(1.4826 * float(np.median(np.abs(np.diff(values)))) / 2**0.5, 1e-3)
    belief, means, counts = np.ones(1), np.array([values[0]]), np.ones(1)
    found = []
    for value in values:
        deviation = spread * np.sqrt(1.0 + 1.0 / counts)
        likely = np.exp(-0.5 * np.square(np.clip((value - means) / deviation, -12, 12))) / deviation
        grown, anew = belief * likely * (1 - HAZARD), float((belief * likely).sum() * HAZARD)
        belief = np.concatenate([[anew], grown])[:LONGEST]
        belief /= max(belief.sum(), 1e-300)
        means = np.concatenate([[value], (means * counts + value) / (counts + 1)])[:LONGEST]
        counts = np.concatenate([[1.0], counts + 1])[:LONGEST]
        found.append(int(np.argmax(belief)))
    return found
