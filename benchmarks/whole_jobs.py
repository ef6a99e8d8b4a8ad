"""Step times of whole jobs, published by who ran them, beside simulated ones: how much a healthy job's own step moves.

Part of `python -m benchmarks.simulator_realism`. The other step series there are of ranks; these are what a job reports for all its
ranks together: MLPerf training logs (each step of three runs on 512 GPUs, means of 32 steps of two smaller ones) and the reference
values of Megatron-LM's release tests on DGX H100 (single steps, each 5th or each 100th).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from collectors.simulated.noise import F64
from collectors.simulated.run import build
from collectors.simulated.spec import Spec

STEPS = Path(__file__).parent / "data" / "whole_jobs" / "steps.csv"
NEIGHBOURS = 31
WARM_SHARE = 0.05
"""The first steps are many times slower (92 s for a median of 9 in the mixtral job); no series is judged by them."""


@dataclass(frozen=True)
class Whole:
    """How a job's step differs from its neighbours in time: logarithm over their running median, [step]."""

    name: str
    residual: F64


@dataclass(frozen=True)
class Pair:
    """A published series and how its counterpart is simulated: profile, nodes, and the `mean` of how many steps one value is."""

    job: str
    profile: str
    nodes: int
    mean: int = 1


PAIRS = (
    Pair("mlperf-405b-theia", "pipeline", 64),
    Pair("mlperf-405b-tyche-0", "pipeline", 64),
    Pair("mlperf-8b-128gpu", "dense", 16, mean=32),
    Pair("megatron-mixtral-8x7b", "moe", 16),
    Pair("megatron-gpt-15b", "dense", 16),
    Pair("megatron-t5", "dense", 8),
)
MADE_STEPS = 250


def residual(seconds: F64) -> F64:
    """Logarithm of each step time over the running median of 31 around it, without the first twentieth.

    Examples
    --------
    >>> residual(np.full(60, 2.0)).any()
    np.False_
    """
    logs = np.log(seconds[max(5, int(WARM_SHARE * len(seconds))) :])
    middle = pd.Series(logs).rolling(NEIGHBOURS, center=True, min_periods=8).median().to_numpy()
    return np.asarray(logs - middle)


def published(job: str) -> Whole:
    """A job of the file.

    Raises
    ------
    ValueError
        When the file has no such job.
    """
    rows = pd.read_csv(STEPS)
    if job not in set(rows.job):
        raise ValueError(f"{STEPS.name} has no job {job!r}; it has {', '.join(sorted(set(rows.job)))}")
    return Whole(job, residual(rows.seconds[rows.job == job].to_numpy(dtype=np.float64)))


def simulated(pair: Pair, steps: int = MADE_STEPS, seed: int = 5) -> Whole:
    """Durations of whole training steps of one simulated healthy job."""
    spec = Spec(nodes=pair.nodes + 1, seed=seed, jobs=f"{pair.nodes}:{pair.profile}", light_share=0.0, idle_share=0.0)
    simulator = build(spec, "none", 40_000.0)
    found: list[float] = []
    while len(found) < steps * pair.mean:
        found += [ended.past.outcome.finish for ended in simulator.advance().steps if ended.past.phase == "train"]
    means = np.array(found[: steps * pair.mean]).reshape(steps, pair.mean).mean(axis=1)
    return Whole(f"simulated {pair.profile}", residual(means))


def described(one: Whole) -> dict[str, float]:
    """Spread by the middle and by all, the upper tail, how often a step is 3 or 10 % slow, memory at one step."""
    r = one.residual
    return {
        "middle spread": float(1.4826 * np.median(np.abs(r))), "spread": float(r.std()), "p99": float(np.quantile(r, 0.99)),
        "3 % slow": float(np.mean(r > np.log(1.03))), "10 % slow": float(np.mean(r > np.log(1.1))),
        "memory 1": float(np.corrcoef(r[:-1], r[1:])[0, 1]),
    }  # fmt: skip


def compared(steps: int = MADE_STEPS) -> list[tuple[Whole, Whole]]:
    """All published series, each with the simulated one that is meant to be like it."""
    return [(published(pair.job), simulated(pair, steps if pair.mean == 1 else steps // 3)) for pair in PAIRS]
