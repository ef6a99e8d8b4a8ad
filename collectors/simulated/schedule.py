"""One forward, one backward: when each stage of a pipeline works on which micro-batch, for all replicas at once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from collectors.simulated.noise import F64

Operation = tuple[int, bool, int]
"""(stage, is it a backward, micro-batch)."""


@lru_cache(maxsize=64)
def order(stages: int, micro_batches: int) -> tuple[Operation, ...]:
    """All operations of a 1F1B step, each after those it waits for.

    Examples
    --------
    >>> [f"{'B' if b else 'F'}{s}.{m}" for s, b, m in order(2, 1)]
    ['F0.0', 'F1.0', 'B1.0', 'B0.0']
    """
    queues = [_of_stage(stage, stages, micro_batches) for stage in range(stages)]
    done: set[Operation] = set()
    found: list[Operation] = []
    while len(found) < 2 * stages * micro_batches:
        for queue in queues:
            while queue and _needs(queue[0], stages) <= done:
                done.add(queue[0])
                found.append(queue.pop(0))
    return tuple(found)


def _of_stage(stage: int, stages: int, micro_batches: int) -> list[Operation]:
    warm = min(stages - stage - 1, micro_batches)
    queue: list[Operation] = [(stage, False, m) for m in range(warm)]
    for m in range(micro_batches - warm):
        queue += [(stage, False, warm + m), (stage, True, m)]
    return queue + [(stage, True, m) for m in range(micro_batches - warm, micro_batches)]


def _needs(operation: Operation, stages: int) -> set[Operation]:
    stage, backward, m = operation
    if not backward:
        return {(stage - 1, False, m)} if stage else set()
    return {(stage, False, m)} | ({(stage + 1, True, m)} if stage < stages - 1 else set())


def run(begin: F64, forward: F64, backward: F64, hop: F64) -> F64:
    """Moment at which each stage of each replica has finished its last backward.

    Parameters
    ----------
    begin
        [stage, replica] when a stage has its data.
    forward, backward
        [stage, replica, micro-batch] seconds of work.
    hop
        [stage, replica] seconds to hand over from a stage to its neighbour.
    """
    stages, _, micro_batches = forward.shape
    if stages == 1:
        return np.asarray(begin + (forward + backward).sum(axis=2))
    free = list(begin)
    ready: dict[Operation, F64] = {}
    for operation in order(stages, micro_batches):
        stage, is_backward, m = operation
        start = free[stage]
        came = _from_neighbour(operation, ready, hop, stages)
        if came is not None:
            start = np.maximum(start, came)
        free[stage] = start + (backward if is_backward else forward)[stage, :, m]
        ready[operation] = free[stage]
    return np.stack(free)


def _from_neighbour(operation: Operation, ready: dict[Operation, F64], hop: F64, stages: int) -> F64 | None:
    stage, backward, m = operation
    if backward and stage < stages - 1:
        return np.asarray(ready[stage + 1, True, m] + hop[stage])
    if not backward and stage > 0:
        return np.asarray(ready[stage - 1, False, m] + hop[stage - 1])
    return None
