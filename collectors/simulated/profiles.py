"""Kinds of training job: how its ranks are grouped, how long a step is, how regular it is.

The disorder of a step series is measured on real ones (`benchmarks/simulator_realism.py`): in ByteDance's traces what varies is common
to all ranks and remembers itself (dense, pipeline), or is a replica's own and forgets at once (long sequences); in Alibaba's jobs it is
each worker's own, and workers are unequal for good.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """One kind of job.

    Attributes
    ----------
    tp, pp, ep
        Largest tensor, pipeline and expert groups; reduced to what divides the job.
    step_s
        Range of the undisturbed step.
    micro_batches
        Per step.
    common, common_phi
        Spread and memory of what slows all ranks alike.
    replica
        Spread of a replica's batch length, new at every step.
    rank, rank_phi
        Spread and memory of a rank's own speed.
    unequal
        Lasting differences between nodes; between the GPUs of a node half as much.
    data, tensor, reduce, hop
        Shares of the step: loading, tensor-parallel exchange, gradient reduction, one hand-over between stages.
    experts
        Spread of an expert's load per micro-batch.
    """

    name: str
    tp: int
    pp: int
    ep: int
    step_s: tuple[float, float]
    micro_batches: int
    common: float
    common_phi: float
    replica: float
    rank: float
    rank_phi: float
    unequal: float
    data: float
    tensor: float
    reduce: float
    hop: float = 0.0
    experts: float = 0.0


PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        Profile("dense", 8, 1, 1, (2.0, 6.0), 8, 0.008, 0.80, 0.004, 0.0015, 0.70, 0.006, 0.01, 0.06, 0.08),
        Profile(
            "pipeline", 8, 8, 1, (4.0, 12.0), 16, 0.015, 0.82, 0.004, 0.0015, 0.70, 0.006, 0.005, 0.05, 0.06, 0.002
        ),
        Profile("moe", 4, 2, 8, (3.0, 8.0), 8, 0.010, 0.75, 0.010, 0.004, 0.70, 0.008, 0.01, 0.05, 0.08, 0.003, 0.03),
        Profile("longseq", 8, 2, 1, (3.0, 9.0), 8, 0.004, 0.50, 0.030, 0.003, 0.60, 0.006, 0.01, 0.06, 0.08, 0.003),
        Profile("ddp", 1, 1, 1, (0.8, 2.5), 2, 0.008, 0.70, 0.006, 0.015, 0.65, 0.015, 0.03, 0.0, 0.12),
        Profile("recsys", 1, 1, 1, (0.5, 1.2), 1, 0.010, 0.70, 0.006, 0.028, 0.65, 0.080, 0.08, 0.0, 0.15),
    )
}


def divisor(limit: int, number: int) -> int:
    """The largest divisor of `number` that is at most `limit`.

    Examples
    --------
    >>> divisor(8, 12)
    6
    """
    return max(d for d in range(1, min(limit, number) + 1) if number % d == 0)
