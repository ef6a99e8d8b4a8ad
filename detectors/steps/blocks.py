"""Steps folded into short blocks, and each rank's usual place among its peers."""

from __future__ import annotations

import msgspec
import numpy as np

from detectors.robust import median_of_known
from detectors.state import Array, nan_array
from detectors.steps.assembly import DATA, DURATION, LOCAL, WAIT, JointStep, excess_over_peers

SCALE_OF_MAD = 1.4826
SCALE_OF_MEAN_DEVIATION = 1.2533
FLOOR_SHARE_OF_STEP = 0.015
"""No rank is steadier than this share of a step: below it, timer and scheduler noise decide."""


class Block(msgspec.Struct):
    """What one block of steps says about each rank. Arrays over ranks, milliseconds.

    `excess`, `data_excess` and `wait_excess` are medians over the steps of the distance to the other ranks' median.
    """

    start_ns: int
    end_ns: int
    step_ms: float
    local_ms: Array
    excess: Array
    data_excess: Array
    wait_excess: Array


def fold(steps: list[JointStep]) -> Block:
    """A block from plain steps of one attempt, oldest first."""
    values = np.stack([step.values for step in steps])
    excess = excess_over_peers(values[:, LOCAL])
    durations = values[:, DURATION]
    last = steps[-1]
    end_ns = last.started_at_ns + int(_median(durations[-1]) * 1e6)
    data, wait = excess_over_peers(np.nan_to_num(values[:, DATA])), excess_over_peers(values[:, WAIT])
    return Block(steps[0].started_at_ns, end_ns, _median(durations), median_of_known(values[:, LOCAL]), median_of_known(excess),
                 median_of_known(data), median_of_known(wait))  # fmt: skip


def step_excess(steps: list[JointStep]) -> Array:
    """Local excess of each rank in each step (steps × ranks)."""
    return excess_over_peers(np.stack([step.values[LOCAL] for step in steps]))


class Usual(msgspec.Struct):
    """Each rank's usual distance from its peers, learnt with forgetting; arrays over ranks, milliseconds.

    Innovations are clipped, so a fault moves the line slowly; frozen ranks do not move it at all.
    """

    blocks: int = 0
    step_ms: float = 0.0
    excess: Array = msgspec.field(default_factory=lambda: nan_array(0))
    scale: Array = msgspec.field(default_factory=lambda: nan_array(0))
    local_ms: Array = msgspec.field(default_factory=lambda: nan_array(0))
    wait_excess: Array = msgspec.field(default_factory=lambda: nan_array(0))

    def resized(self, places: list[int]) -> Usual:
        """The same knowledge for another set of ranks: `places[i]` is the old number of new rank i, -1 for a newcomer."""
        pick = np.array(places, dtype=np.int64)

        def take(values: Array, default: float) -> Array:
            padded = np.append(values, default)
            return padded[np.where(pick >= 0, pick, len(values))]

        return Usual(self.blocks, self.step_ms, take(self.excess, 0.0), take(self.scale, _typical(self.scale)),
                     take(self.local_ms, _typical(self.local_ms)), take(self.wait_excess, 0.0))  # fmt: skip

    def learn(self, block: Block, frozen: Array, forgetting: float) -> None:
        """Move towards `block`, except for ranks in `frozen` (boolean)."""
        if self.blocks == 0:
            self._start(block)
            return
        weight = max(1.0 / (self.blocks + 1), forgetting)
        bound = 3.0 * self.limit_scale(block.step_ms) if self.blocks > 3 else np.full_like(self.scale, np.inf)
        open_ranks = ~frozen & np.isfinite(block.excess)
        away = np.clip(block.excess - self.excess, -bound, bound)
        self.excess = np.where(open_ranks, self.excess + weight * away, self.excess)
        self.scale = np.where(
            open_ranks, self.scale + weight * (SCALE_OF_MEAN_DEVIATION * np.abs(away) - self.scale), self.scale
        )
        self.local_ms = _towards(self.local_ms, block.local_ms, weight, open_ranks)
        self.wait_excess = _towards(self.wait_excess, block.wait_excess, weight, open_ranks)
        if not frozen.any():
            self.step_ms += weight * (min(block.step_ms, 2.0 * self.step_ms) - self.step_ms)
        self.blocks += 1

    def limit_scale(self, step_ms: float) -> Array:
        """Scale with its floor."""
        return np.maximum(self.scale, FLOOR_SHARE_OF_STEP * max(step_ms, self.step_ms))

    def _start(self, block: Block) -> None:
        self.step_ms = block.step_ms
        self.excess, self.local_ms = np.nan_to_num(block.excess), np.nan_to_num(block.local_ms)
        self.wait_excess = np.nan_to_num(block.wait_excess)
        self.scale = np.zeros_like(self.excess)
        self.blocks = 1


def _towards(old: Array, new: Array, weight: float, where: Array) -> Array:
    moved = old + weight * (new - old)
    return np.where(where & np.isfinite(moved), moved, old)


def _typical(values: Array) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _median(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")
