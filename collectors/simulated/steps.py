"""One training step of one job: who computes how long, who waits for whom, when it is over.

Four barriers: tensor-parallel ranks meet in every micro-batch, expert groups exchange tokens in every micro-batch, stages hand over to
their neighbours, and the replicas of a stage meet when gradients are reduced. At the end all ranks meet (gradient norm), so that the
next step begins everywhere at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collectors.simulated import schedule
from collectors.simulated.noise import F64

BACKWARD = 2.0
"""Work of a backward pass, in forward passes."""


@dataclass(frozen=True)
class Work:
    """What a step has to do, in seconds. Shapes: P stages, D replicas, T tensor places, M micro-batches.

    Attributes
    ----------
    forward_s
        [P, D, M] of a healthy GPU.
    slow
        [P, D, T] factor of each rank's computing; 1 is a healthy GPU.
    pause_s
        [P, D, T] a single stall, in the first micro-batch.
    data_s
        [P, D, T] waiting for input.
    tensor_s, hop_s
        [P, D] exchange within a tensor group per micro-batch; hand-over to the next stage.
    experts
        [P, D, M] factor of an expert's load; ones where there are none.
    reduce_s
        [P, T] reduction of gradients among replicas.
    ep
        Replicas of one expert group.
    backward
        Work of the backward pass in forward passes; 0 in evaluation.
    """

    forward_s: F64
    slow: F64
    pause_s: F64
    data_s: F64
    tensor_s: F64
    hop_s: F64
    experts: F64
    reduce_s: F64
    optimizer_s: float
    ep: int = 1
    backward: float = BACKWARD


@dataclass(frozen=True)
class Outcome:
    """What a step was like: seconds after its begin, shaped [P, D, T] unless said otherwise.

    Attributes
    ----------
    data, forward, backward
        Durations as a rank's own clock sees them; waiting within a tensor or expert group is inside, as on a real GPU stream.
    own
        Computing of the rank alone: what it would take by itself.
    arrived
        The last gradient is handed over.
    reducing
        [P, T] moment from which gradients really flow: the last of the group has arrived.
    reduced
        [P, T] end of the reduction.
    finish
        End of the step, the same for all.
    """

    data: F64
    forward: F64
    backward: F64
    own: F64
    arrived: F64
    reducing: F64
    reduced: F64
    finish: float

    @property
    def wait(self) -> F64:
        """From handing over the last gradient to the end of the reduction."""
        return self.reduced[:, None, :] - self.arrived

    @property
    def optimizer(self) -> F64:
        """From the end of the reduction to the end of the step: norm over all ranks, then the optimizer."""
        return np.broadcast_to((self.finish - self.reduced)[:, None, :], self.arrived.shape)


def run(work: Work) -> Outcome:
    """Let the barriers fall one after the other."""
    slowest = work.slow.max(axis=2)
    load = work.forward_s * work.experts
    alone = load * slowest[:, :, None]
    smooth = _expert_barrier(alone, work.ep) + work.tensor_s[:, :, None]
    alone[:, :, 0] += work.pause_s.max(axis=2)
    forward = _expert_barrier(alone, work.ep) + work.tensor_s[:, :, None]
    ended = schedule.run(work.data_s.max(axis=2), forward, smooth * work.backward, work.hop_s)
    arrived = np.repeat(ended[:, :, None], work.slow.shape[2], axis=2)
    reducing = arrived.max(axis=1)
    reduced = reducing + work.reduce_s
    own = load.sum(axis=2)[:, :, None] * work.slow * (1.0 + work.backward) + work.pause_s
    return Outcome(
        work.data_s, _per_rank(forward, arrived), _per_rank(smooth, arrived) * work.backward, own, arrived, reducing, reduced,
        float(reduced.max()) + work.optimizer_s,
    )  # fmt: skip


def _per_rank(spent: F64, like: F64) -> F64:
    return np.broadcast_to(spent.sum(axis=2)[:, :, None], like.shape)


def _expert_barrier(alone: F64, ep: int) -> F64:
    """Every micro-batch ends with the slowest replica of its expert group."""
    if ep == 1:
        return alone
    stages, replicas, micro_batches = alone.shape
    groups = alone.reshape(stages, replicas // ep, ep, micro_batches)
    return np.repeat(groups.max(axis=2), ep, axis=1)
