"""Steps folded into short blocks, and each rank's usual place among its peers."""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import structs

from detectors.robust import median_of_known
from detectors.state import Array, nan_array
from detectors.steps.assembly import BACKWARD, DATA, DURATION, FORWARD, LOCAL, WAIT, WORK, JointStep
from detectors.steps.peers import Floats, Groups, excess_in_groups

SCALE_OF_MAD = 1.4826
SCALE_OF_MEAN_DEVIATION = 1.2533
FLOOR_SHARE_OF_STEP = 0.015
"""No rank is steadier than this share of a step: below it, timer and scheduler noise decide."""
PHASES = (DATA, FORWARD, BACKWARD)
"""Phases that are judged by themselves, in the order of `Block.phases`."""


class Block(msgspec.Struct):
    """What one block of steps says about each rank. Arrays over ranks, milliseconds, float32 (many blocks are kept).

    `step_ms` and `data_ms` are the middle of all ranks: the step, and its wait for input.
    `excess`, `phases` (phases × ranks) and `wait_excess` are medians over the steps of the distance to the other peers' median. `slowest`
    and `phase_slowest` count the `steps` in which a rank was farther behind its usual place than all peers that nobody suspects.
    """

    start_ns: int
    end_ns: int
    step_ms: float
    data_ms: float
    local_ms: Array
    excess: Array
    phases: Array
    wait_excess: Array
    steps: int = 0
    slowest: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    phase_slowest: Array = msgspec.field(default_factory=lambda: np.zeros((len(PHASES), 0), dtype=np.int32))


def slowest_of_peers(behind: Floats, suspected: Array, groups: Groups) -> Array:
    """In how many steps each rank was behind all its peers; what suspected ranks do stands in nobody's light.

    Parameters
    ----------
    behind
        Distance from the usual place, steps × ranks, NaN where unknown.
    suspected
        Ranks (boolean) that the others need not beat.

    Examples
    --------
    >>> behind = np.array([[0.0, 3.0, 9.0], [1.0, 0.0, 9.0]])
    >>> slowest_of_peers(behind, np.array([False, False, True]), [np.arange(3)])
    array([1, 1, 2], dtype=int32)
    """
    order = np.concatenate(groups)
    starts = np.cumsum([0, *(len(members) for members in groups[:-1])])
    known = np.where(np.isnan(behind), -np.inf, behind)[:, order]
    most = np.maximum.reduceat(np.where(suspected[order], -np.inf, known), starts, axis=1)
    sizes = np.diff([*starts, len(order)])
    found = np.zeros(behind.shape[1], dtype=np.int32)
    found[order] = ((known >= np.repeat(most, sizes, axis=1)) & np.isfinite(known)).sum(axis=0)
    return found


def fold(steps: list[JointStep], groups: Groups) -> tuple[Block, Floats, Floats]:
    """A block from plain steps of one attempt, oldest first; the local excess of each rank in each step (steps × ranks), and that of its
    phases (phases × steps × ranks)."""  # fmt: skip
    values = np.stack([step.values for step in steps])
    excess = excess_in_groups(values[:, LOCAL], groups)
    durations = values[:, DURATION]
    last = steps[-1]
    end_ns = last.started_at_ns + int(np.nan_to_num(_median(durations[-1])) * 1e6)
    values[:, DATA] = np.nan_to_num(values[:, DATA])
    phases = np.stack([excess_in_groups(values[:, phase], groups) for phase in PHASES])
    local, behind, wait = (
        _middle(part) for part in (values[:, LOCAL], excess, excess_in_groups(values[:, WAIT], groups))
    )
    by_phase = np.stack([_middle(part) for part in phases])
    waits = float(np.nan_to_num(_median(values[:, DATA])))
    block = Block(steps[0].started_at_ns, end_ns, _median(durations), waits, local, behind, by_phase, wait, len(steps))
    return block, excess, phases


def divided_by_work(step: JointStep, groups: Groups) -> JointStep:
    """The step with local times relieved of what more work than the peers' explains.

    Only more work excuses. Less work must not accuse: part of a step costs the same however few samples it has, so a rank whose share was
    cut would look slow per sample.
    """
    work = step.values[WORK]
    if not np.isfinite(work).any() or np.nanmin(work) == np.nanmax(work):
        return step
    values = step.values.copy()
    for members in groups:
        known = work[members][np.isfinite(work[members])]
        if known.size:
            more = np.maximum(np.nan_to_num(work[members] / np.median(known), nan=1.0), 1.0)
            values[np.ix_(np.array([LOCAL, FORWARD, BACKWARD]), members)] /= more
    return structs.replace(step, values=values)


class Usual(msgspec.Struct):
    """Each rank's usual distance from its peers, learnt with forgetting; arrays over ranks, milliseconds.

    Innovations are clipped, so a fault moves the line slowly; frozen ranks do not move it at all.
    """

    blocks: int = 0
    step_ms: float = 0.0
    data_ms: float = 0.0
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

        return Usual(self.blocks, self.step_ms, self.data_ms, take(self.excess, 0.0), take(self.scale, _typical(self.scale)),
                     take(self.local_ms, _typical(self.local_ms)), take(self.wait_excess, 0.0))  # fmt: skip

    def learn(self, block: Block, frozen: Array, forgetting: float, hold: bool = False) -> None:
        """Move towards `block`, except for ranks in `frozen` (boolean); with `hold` the times of the whole job stay."""
        if self.blocks == 0:
            self._start(block)
            return
        weight = max(1.0 / (self.blocks + 1), forgetting)
        bound = 3.0 * self.limit_scale(block.step_ms) if self.blocks > 3 else np.full_like(self.scale, np.inf)
        open_ranks = ~frozen & np.isfinite(block.excess)
        self.excess, self.scale = moved(self.excess, self.scale, block.excess, bound, weight, open_ranks)
        self.local_ms = _towards(self.local_ms, block.local_ms, weight, open_ranks)
        self.wait_excess = _towards(self.wait_excess, block.wait_excess, weight, open_ranks)
        if not hold and not frozen.any():
            self.step_ms += weight * (min(block.step_ms, 2.0 * self.step_ms) - self.step_ms)
            self.data_ms += weight * (min(block.data_ms, 2.0 * self.data_ms + 0.05 * self.step_ms) - self.data_ms)
        self.blocks += 1

    def limit_scale(self, step_ms: float) -> Array:
        """Scale with its floor."""
        return np.maximum(self.scale, FLOOR_SHARE_OF_STEP * max(step_ms, self.step_ms))

    def already_slow(self, groups: Groups, ratio: float, deviations: float) -> Array:
        """Ranks (boolean) that stand apart from peers who keep together, though they were never seen to be better.

        A rank does when its local time is above `ratio` times its peers' median and `deviations` robust deviations away from it. Where
        the peers differ much among themselves nobody stands apart, nor where more than a third would.
        """
        apart = np.zeros(len(self.local_ms), dtype=np.bool_)
        for members in groups:
            if len(members) < 3:
                continue
            local = self.local_ms[members]
            middle = float(np.median(local))
            spread = max(SCALE_OF_MAD * float(np.median(np.abs(local - middle))), 0.02 * middle)
            found = (local > ratio * middle) & (local - middle > deviations * spread)
            apart[members] = found & (3 * found.sum() <= len(members))
        return apart

    def expect_like_peers(self, ranks: Array, groups: Groups) -> None:
        """From now on these ranks (boolean) are expected where their peers are."""
        for members in groups:
            mine = members[ranks[members]]
            self.excess[mine], self.wait_excess[mine] = 0.0, 0.0
            self.local_ms[mine] = np.median(self.local_ms[members])

    def _start(self, block: Block) -> None:
        self.step_ms, self.data_ms = block.step_ms, block.data_ms
        self.excess, self.local_ms = (np.nan_to_num(v).astype(np.float64) for v in (block.excess, block.local_ms))
        self.wait_excess = np.nan_to_num(block.wait_excess).astype(np.float64)
        self.scale = np.zeros_like(self.excess)
        self.blocks = 1


def moved(place: Array, scale: Array, seen: Array, bound: Array, weight: float, where: Array) -> tuple[Array, Array]:
    """A usual place and its scale, moved towards what was seen, by innovations within `bound`, where `where` is true."""
    away = np.clip(seen - place, -bound, bound)
    wider = scale + weight * (SCALE_OF_MEAN_DEVIATION * np.abs(away) - scale)
    return np.where(where, place + weight * away, place), np.where(where, wider, scale)


def _middle(values: Floats) -> Array:
    return np.asarray(values[0] if len(values) == 1 else median_of_known(values), dtype=np.float32)


def _towards(old: Array, new: Array, weight: float, where: Array) -> Array:
    moved = old + weight * (new - old)
    return np.where(where & np.isfinite(moved), moved, old)


def _typical(values: Array) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _median(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")
