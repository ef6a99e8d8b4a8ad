"""The DDP communication hook: when this rank was ready, and how large its gradients were.

It averages exactly as DDP does without a hook (multiply by 1/world, then sum).
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import GradBucket
    from torch.futures import Future

NORM_BUDGET_RATIO = 0.001


class Stride:
    """How often a measurement may be made so that it costs at most its share of a step.

    Cheap ones are made at every step; a cost of k times the budget means every k-th step.
    """

    def __init__(self, budget_ratio: float) -> None:
        self._budget_ratio = budget_ratio
        self._cost_ns = 0.0
        self._count = 0
        self.every = 1

    def due(self) -> bool:
        """Whether to measure in this step."""
        self._count += 1
        return self._count >= self.every

    def spent(self, cost_ns: float, step_ns: float) -> None:
        """Account for a measurement."""
        self._count = 0
        self._cost_ns = cost_ns if self._cost_ns == 0 else 0.8 * self._cost_ns + 0.2 * cost_ns
        if step_ns > 0:
            self.every = max(1, round(self._cost_ns / (self._budget_ratio * step_ns)))


class GradientTap:
    """Per-step record, filled by the hook, emptied by the step.

    ``handed_ns`` and ``reduced_ns`` are `time.perf_counter_ns` values, 0 when the hook has not run.
    """

    def __init__(self, world: int, group: Any = None) -> None:
        self._scale = 1.0 / world
        self._group = group
        self.handed_ns = 0
        self.reduced_ns = 0
        self.own_ns = 0
        self.local_stride = Stride(NORM_BUDGET_RATIO)
        self.reduced_stride = Stride(NORM_BUDGET_RATIO)
        self._measure = True
        self._squares: list[Any] = []
        self._buckets: list[torch.Tensor] = []
        self._norm_ns = 0

    def begin(self) -> None:
        """Forget the step before."""
        self.handed_ns = self.reduced_ns = self.own_ns = self._norm_ns = 0
        self._squares.clear()
        self._buckets.clear()
        self._measure = self.local_stride.due()

    def __call__(self, _: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """Handle one bucket: note, scale, reduce."""
        import torch.distributed as dist

        started = time.perf_counter_ns()
        buffer = bucket.buffer()
        if self._measure:
            self._squares.append(_square(buffer))
            self._norm_ns += time.perf_counter_ns() - started
        self._buckets.append(buffer)
        self.own_ns += time.perf_counter_ns() - started
        buffer.mul_(self._scale)
        if bucket.is_last():
            self.handed_ns = time.perf_counter_ns()
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        return work.get_future().then(self._done)

    def _done(self, future: Future[list[torch.Tensor]]) -> torch.Tensor:
        tensors = future.value()
        self.reduced_ns = time.perf_counter_ns()
        return tensors[0]

    def local_norm(self, step_ns: float) -> Any:
        """Norm before the reduction (number or device tensor); ``None`` when not measured in this step."""
        if not self._squares:
            return None
        started = time.perf_counter_ns()
        norm = _root(self._squares)
        self._norm_ns += time.perf_counter_ns() - started
        self.local_stride.spent(self._norm_ns, step_ns)
        self.own_ns += time.perf_counter_ns() - started
        return norm

    def reduced_norm(self, step_ns: float) -> Any:
        """Norm of the averaged gradients; must be asked after the backward and before they are cleared."""
        if not self._buckets or not self.reduced_stride.due():
            return None
        started = time.perf_counter_ns()
        norm = _root([_square(buffer) for buffer in self._buckets])
        spent = time.perf_counter_ns() - started
        self.reduced_stride.spent(spent, step_ns)
        self.own_ns += spent
        return norm


def _square(buffer: torch.Tensor) -> Any:
    """Sum of squares: a number on the CPU, a tensor (no synchronisation) on a device."""
    import torch

    if buffer.dtype == torch.float32:
        square = torch.dot(buffer, buffer)
    else:
        square = torch.linalg.vector_norm(buffer, dtype=torch.float32).square()
    return square.item() if buffer.device.type == "cpu" else square


def _root(squares: list[Any]) -> Any:
    total = sum(squares[1:], start=squares[0])
    if isinstance(total, float):
        return math.sqrt(total) if total >= 0 else math.nan
    return total.sqrt()
