"""Single steps in which one rank alone took far longer: what medians over steps do not see."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.state import Array
from detectors.steps.assembly import DATA, JointStep
from detectors.steps.blocks import Usual
from detectors.steps.peers import Floats
from trainwarden.clock import NS_PER_S

_MOST = 2048
_SPIKE_SHARE, _SPIKE_GAIN = 0.01, 0.15
"""A rank's spike level is what one step in a hundred exceeds, tracked with this gain (in usual steps)."""
_HEARD_SHARE = 0.95
_BURST_GAP_NS = 1_500_000_000
_SMALL_JOB = 16


class Stall(msgspec.Struct):
    """One step in which one rank alone took far longer."""

    at_ns: int
    rank: int
    excess_ms: float
    data: bool


def spike_level(old: Array, excess: Floats, step_ms: float) -> Array:
    """The level that one step in a hundred of each rank exceeds, moved by what these steps (steps × ranks) show."""
    above = np.mean(excess > old, axis=0)
    return np.asarray(np.maximum(0.0, old + _SPIKE_GAIN * step_ms * (above - _SPIKE_SHARE)))


def found_in(steps: list[JointStep], excess: Floats, usual: Usual, spike_ms: Array) -> list[Stall]:
    """Stalls in these steps; `excess` is the local excess over each rank's usual place (steps × ranks)."""
    limit = np.maximum(
        8.0 * usual.limit_scale(usual.step_ms), max(0.6 * usual.step_ms, 1.5 * float(np.median(spike_ms)))
    )
    stalls = []
    for row, rank in np.argwhere(np.nan_to_num(excess) > limit)[-_MOST:]:
        local = float(excess[row, rank])
        data = float(np.nan_to_num(steps[row].values[DATA, rank])) > 0.5 * local
        stalls.append(Stall(steps[row].started_at_ns, int(rank), local, data))
    return stalls


def heard(steps: list[JointStep]) -> NDArray[np.bool_]:
    """Which steps (nearly) every rank reported: a stall of a rank that nobody heard would make another's look singular."""
    return np.array([np.isfinite(step.values[0]).mean() >= _HEARD_SHARE for step in steps], dtype=np.bool_)


def recent(stalls: list[Stall], now_ns: int, window_s: float) -> list[Stall]:
    """Those of the last `window_s`, at most a bounded number."""
    horizon_ns = now_ns - int(window_s * NS_PER_S)
    return [stall for stall in stalls if stall.at_ns >= horizon_ns][-_MOST:]


def singular_rank(stalls: list[Stall], world: int, share: float, risk: float) -> int:
    """The rank that has nearly all stalls, unlikely by chance; -1 when there is none.

    In a large job others have a few as well: there it must have four times as many as anybody else.
    """
    counts = np.bincount([stall.rank for stall in stalls], minlength=world)
    rank = int(np.argmax(counts))
    mine, total = int(counts[rank]), len(stalls)
    others = int(np.delete(counts, rank).max()) if world > 1 else 0
    alone = mine >= share * total or (world > _SMALL_JOB and mine >= 4 * max(others, 1))
    return rank if mine and alone and world * chance_of(mine, total, 1.0 / world) <= risk else -1


def chance_of(count: int, total: int, share: float) -> float:
    """Probability that `count` or more of `total` independent stalls fall on a rank that draws each with probability `share`.

    Examples
    --------
    >>> chance_of(3, 3, 0.25)
    0.015625
    """
    if share >= 1.0:
        return 1.0
    choose, odds = math.lgamma, (math.log(share), math.log1p(-share))
    logs = (choose(total + 1) - choose(k + 1) - choose(total - k + 1) + k * odds[0] + (total - k) * odds[1]
            for k in range(count, total + 1))  # fmt: skip
    return round(min(1.0, sum(map(math.exp, logs))), 12)


def bursts(stalls: list[Stall]) -> list[list[Stall]]:
    """Stalls in groups, parted by calm of at least 1.5 s."""
    groups: list[list[Stall]] = []
    for stall in stalls:
        if not groups or stall.at_ns - groups[-1][-1].at_ns > _BURST_GAP_NS:
            groups.append([])
        groups[-1].append(stall)
    return groups
