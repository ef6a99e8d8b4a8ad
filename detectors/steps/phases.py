"""Each phase of a step judged by itself: one that is steadily longer is plain there, though the noise of the others hides it in the sum.

Looking at several phases is looking more often: the change-point sum must be higher, and chance is shared out among them.
"""

from __future__ import annotations

import msgspec
import numpy as np

from detectors.state import Array, nan_array
from detectors.steps.blocks import FLOOR_SHARE_OF_STEP, PHASES, SCALE_OF_MAD, Block, moved, slowest_of_peers
from detectors.steps.peers import Floats, Groups, excess_in_groups

NAMES = ("loading data", "the forward pass", "the backward pass")
"""Of `PHASES`, in order."""
_RECENT = 6


class PhaseWatch(msgspec.Struct):
    """Phases × ranks: usual distance from the peers and its scale (milliseconds), change-point sum, and the stretch that it stands on."""

    blocks: int = 0
    excess: Array = msgspec.field(default_factory=lambda: nan_array(len(PHASES), 0))
    scale: Array = msgspec.field(default_factory=lambda: nan_array(len(PHASES), 0))
    score: Array = msgspec.field(default_factory=lambda: nan_array(len(PHASES), 0))
    run_start_ns: Array = msgspec.field(default_factory=lambda: np.zeros((len(PHASES), 0), dtype=np.int64))
    run_blocks: Array = msgspec.field(default_factory=lambda: np.zeros((len(PHASES), 0), dtype=np.int64))

    def resized(self, places: list[int]) -> PhaseWatch:
        """The same usual places for another set of ranks: `places[i]` is the old number of new rank i, -1 for a newcomer."""
        if not self.blocks:
            return PhaseWatch()
        pick = np.array(places, dtype=np.int64)
        newcomers = np.where(pick < 0, self.excess.shape[1], pick)
        typical = np.median(self.scale, axis=1, keepdims=True)
        excess = np.concatenate([self.excess, np.zeros_like(typical)], axis=1)[:, newcomers]
        scale = np.concatenate([self.scale, typical], axis=1)[:, newcomers]
        anew = PhaseWatch(self.blocks, excess, scale)
        anew._forget_runs()
        return anew

    def learn(self, block: Block, frozen: Array, forgetting: float, step_ms: float) -> None:
        """Move towards `block`, except for ranks in `frozen` (phases × ranks, boolean)."""
        if self.blocks == 0:
            self.excess = np.nan_to_num(block.phases).astype(np.float64)
            self.scale, self.blocks = np.zeros_like(self.excess), 1
            self._forget_runs()
            return
        weight = max(1.0 / (self.blocks + 1), forgetting)
        bound = 3.0 * self._limit_scale(step_ms) if self.blocks > 3 else np.full_like(self.scale, np.inf)
        where = ~frozen & np.isfinite(block.phases)
        self.excess, self.scale = moved(self.excess, self.scale, block.phases, bound, weight, where)
        self.blocks += 1

    def advance(self, blocks: list[Block], groups: Groups, step_ms: float, allowance: float, limit: float) -> None:
        """Take the newest of `blocks` into the sums."""
        block = blocks[-1]
        z = np.clip((block.phases - self.excess) / self._scale_now(blocks, groups, step_ms), -4.0, 6.0) - allowance
        self.score = np.maximum(0.0, np.minimum(self.score + np.nan_to_num(z), limit))
        running = self.score > 0
        self.run_start_ns = np.where(running & (self.run_blocks == 0), block.start_ns, self.run_start_ns)
        self.run_blocks = np.where(running, self.run_blocks + 1, 0)

    def count_slowest(self, block: Block, excess: Floats, suspected: Array, groups: Groups) -> None:
        """Note in `block` in how many of its steps (`excess`, phases × steps × ranks) each rank was the slowest, phase by phase."""
        behind = excess - self.excess[:, None, :]
        block.phase_slowest = np.stack(
            [slowest_of_peers(*pair, groups) for pair in zip(behind, suspected, strict=True)]
        )

    def forget(self, rank: int) -> None:
        """Nothing is held against this rank any more."""
        self.score[:, rank], self.run_blocks[:, rank] = 0.0, 0

    def _forget_runs(self) -> None:
        self.score = np.zeros_like(self.excess)
        self.run_start_ns, self.run_blocks = (np.zeros(self.excess.shape, dtype=np.int64) for _ in range(2))

    def _limit_scale(self, step_ms: float) -> Array:
        return np.maximum(self.scale, FLOOR_SHARE_OF_STEP * step_ms)

    def _scale_now(self, blocks: list[Block], groups: Groups, step_ms: float) -> Array:
        """Own usual scale, or the spread that the *other* ranks show just now when the machine is restless."""
        own, recent = self._limit_scale(step_ms), np.stack([kept.phases for kept in blocks[-_RECENT:]])
        heard = np.isfinite(recent).all(axis=(0, 2))
        recent = np.nan_to_num(recent)
        spread = SCALE_OF_MAD * np.median(np.abs(recent - np.median(recent, axis=0)), axis=0).astype(np.float64)
        restless = spread - excess_in_groups(spread, groups)
        return np.asarray(np.where(heard[:, None], np.maximum(own, np.nan_to_num(restless)), own))
