"""The DDP communication hook: when this rank was ready, and how large its gradients were.

It averages exactly as DDP does without a hook (multiply by 1/world, then sum).
"""

from __future__ import annotations

import ctypes
import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import GradBucket
    from torch.futures import Future

BUDGET_RATIO = 0.0021
LEAST_NORM_RATIO = 0.0003
SAMPLE_SHARE, LOCAL_SHARE, REDUCED_SHARE = 0.5, 0.3, 0.2
SAMPLE_PARTS = 16
GLANCE_NUMBERS = 8
MAX_FAILURES = 3
SETTLE_EVERY = 8
now_ns = time.perf_counter_ns


class Stride:
    """How often a measurement may be made so that it costs at most its share of a step.

    Cheap ones are made at every step; a cost of k times the allowance means every k-th step.
    """

    __slots__ = ("_cost_ns", "_count", "every")

    def __init__(self) -> None:
        self._cost_ns = 0.0
        self._count = 0
        self.every = 1

    def due(self) -> bool:
        """Whether to measure in this step."""
        self._count += 1
        return self._count >= self.every

    def spent(self, cost_ns: float) -> None:
        """Account for a measurement."""
        self._count = 0
        self._cost_ns = 0.8 * self._cost_ns + 0.2 * cost_ns if self._cost_ns else float(cost_ns)

    def allow(self, allowance_ns: float) -> None:
        """Set what a step may pay on average."""
        self.every = max(1, math.ceil(self._cost_ns / max(allowance_ns, 1.0)))


class GradientTap:
    """Per-step record, filled by the hook, emptied by the step.

    The whole norm is measured as often as the budget allows. In the steps between, the local norm is
    reported only if it is not finite. Two things are looked at for that: in every step a few numbers of
    the last bucket, which holds the layers nearest to the input, so that a NaN that came through the loss
    or any activation has reached it; and, as often as the budget allows, a part of another bucket that
    moves on. A rank whose backward pass turns NaN is so named in that very step, however loaded the
    machine is; a lone NaN written into one gradient (a flipped bit) can be missed between measurements.

    ``handed_ns`` and ``reduced_ns`` are `time.perf_counter_ns` values, 0 when the hook has not run.
    ``own_ns`` leaves out scaling and reducing, which DDP does as well without a hook (the scaling
    while it copies); ``scale_ns`` is the scaling, a pass of its own here.
    """

    def __init__(self, world: int, group: Any) -> None:
        self._scale = 1.0 / world
        self._group = group
        self.handed_ns = 0
        self.reduced_ns = 0
        self.own_ns = 0
        self.scale_ns = 0
        self.local_stride = Stride()
        self.reduced_stride = Stride()
        self.sample_stride = Stride()
        self.failures = 0
        self.reduced_due = False
        self._whole = True
        self._part = 0
        self._glances = 0
        self._seen_at = -1
        self._seen: torch.Tensor | None = None
        self._numbers: ctypes.Array[Any] | None = None
        self._gap = 1
        self._look_at = -1
        self._squares: list[Any] = []
        self._buckets: list[torch.Tensor] = []
        self._bucket_count = 1
        self._norm_ns = 0
        self._fixed_ns = 0.0

    def begin(self, must_measure: bool = False) -> None:
        """Forget the step before."""
        if self._buckets:
            self._bucket_count = len(self._buckets)
            self._buckets.clear()
        self.handed_ns = self.reduced_ns = self.own_ns = self.scale_ns = self._norm_ns = 0
        self._squares.clear()
        self._whole = self.local_stride.due() or must_measure
        self.reduced_due = self.reduced_stride.due() or must_measure
        self._glances += 1
        self._look_at = -1
        if not self._whole and self.sample_stride.due():
            self._part += 1
            self._look_at = self._part % self._bucket_count

    def __call__(self, _: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """Handle one bucket: note, scale, reduce."""
        started = now_ns()
        buffer = bucket.buffer()
        buckets = self._buckets
        last = bucket.is_last()
        if self._whole:
            self._measure(buffer)
        elif len(buckets) == self._look_at:
            self._measure(self._some_of(buffer))
        elif last:
            self._glance(buffer)
        buckets.append(buffer)
        scaling = now_ns()
        buffer.mul_(self._scale)
        handed_ns = now_ns()
        if last:
            self.handed_ns = handed_ns
        self.own_ns += scaling - started
        self.scale_ns += handed_ns - scaling
        # The group's own method: the wrapper in torch.distributed costs as much again in Python.
        future: Future[list[torch.Tensor]] = self._group.allreduce([buffer]).get_future()
        return future.then(self._done)

    def _measure(self, buffer: torch.Tensor) -> None:
        if self.failures >= MAX_FAILURES:
            return
        started = now_ns()
        try:
            self._squares.append(_square(buffer))
        except Exception:
            # Nothing measured here may break the backward pass it sits in.
            self.failures += 1
            self._squares.clear()
        self._norm_ns += now_ns() - started

    def _some_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """A sixteenth of a bucket; all of it is seen once in sixteen rounds over the buckets."""
        size = -(-buffer.numel() // SAMPLE_PARTS)
        start = (self._part // self._bucket_count % SAMPLE_PARTS) * size
        return buffer.narrow(0, min(start, buffer.numel() - size), size)

    def _glance(self, buffer: torch.Tensor) -> None:
        """Read a few numbers, spread over the bucket; where they lie moves on.

        Not by an operation of torch where that can be helped: the first one after a step's matrix products
        costs 150 us on a CPU, all of it in cold caches; this costs 20.
        """
        started = now_ns()
        address = buffer.data_ptr()
        if address != self._seen_at:
            self._see(buffer, address)
        if self._numbers is None:
            self._measure(buffer.narrow(0, 0, min(GLANCE_NUMBERS, buffer.numel())))
            return
        total = sum(self._numbers[self._glances % self._gap :: self._gap])
        if total - total != 0:
            self._squares.append(abs(total))
        self._norm_ns += now_ns() - started

    def _see(self, buffer: torch.Tensor, address: int) -> None:
        """Remember the bucket as an array of C numbers, where it is one.

        It is kept alive with them: its memory cannot become another tensor's while it is read by its address.
        """
        import torch

        count = buffer.numel()
        plain = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}.get(buffer.dtype)
        readable = plain is not None and count > 0 and buffer.device.type == "cpu" and buffer.is_contiguous()
        self._seen_at, self._seen, self._gap = address, buffer, max(1, -(-count // GLANCE_NUMBERS))
        self._numbers = (plain * count).from_address(address) if plain is not None and readable else None

    def _done(self, future: Future[list[torch.Tensor]]) -> torch.Tensor:
        tensors = future.value()
        self.reduced_ns = now_ns()
        return tensors[0]

    @property
    def partial(self) -> bool:
        """Whether `local_norm` is that of a part, of use only where it is not finite."""
        return not self._whole

    def local_norm(self) -> Any:
        """Norm before the reduction (number or device tensor); ``None`` when not measured and nothing is wrong.

        That of a part is returned too where telling whether it is finite would wait for a device; see `partial`.
        """
        if not self._squares:
            return None
        started = now_ns()
        try:
            norm = _root(self._squares)
        except Exception:
            # for example buckets on several devices: the step is reported all the same
            self.failures += 1
            return None
        if self._whole:
            self.local_stride.spent(self._norm_ns + now_ns() - started)
        elif self._look_at >= 0:
            self.sample_stride.spent(self._norm_ns + now_ns() - started)
        if not self._whole and isinstance(norm, float) and math.isfinite(norm):
            return None
        return norm

    def reduced_norm(self, must_measure: bool = False) -> Any:
        """Norm of the averaged gradients; must be asked after the backward and before they are cleared."""
        if not self._buckets or self.failures >= MAX_FAILURES or not (self.reduced_due or must_measure):
            return None
        self.reduced_due = False
        started = now_ns()
        try:
            norm = _root([_square(buffer) for buffer in self._buckets])
        except Exception:
            self.failures += 1
            return None
        self.reduced_stride.spent(now_ns() - started)
        return norm

    def settle(self, step_ns: float, recorder_ns: float) -> None:
        """Share what the rest of the hook leaves of the budget between the measurements, one step in eight.

        ``recorder_ns`` is what the step recorder has spent; the norms inside it are small next to their own allowance.
        """
        if self._glances % SETTLE_EVERY:
            return
        fixed_ns = self.own_ns - self._norm_ns + recorder_ns
        self._fixed_ns = 0.8 * self._fixed_ns + 0.2 * fixed_ns if self._fixed_ns else float(fixed_ns)
        left_ns = max(BUDGET_RATIO * step_ns - self._fixed_ns, LEAST_NORM_RATIO * step_ns)
        self.sample_stride.allow(SAMPLE_SHARE * left_ns)
        self.local_stride.allow(LOCAL_SHARE * left_ns)
        self.reduced_stride.allow(REDUCED_SHARE * left_ns)


def _square(buffer: torch.Tensor) -> Any:
    """Sum of squares: a number on the CPU, a tensor (no synchronisation) on a device."""
    import torch

    wide = torch.float64 if buffer.dtype == torch.float64 else torch.float32
    plain = buffer.dtype == torch.float32
    square = torch.dot(buffer, buffer) if plain else torch.linalg.vector_norm(buffer, dtype=wide).square()
    return square.item() if buffer.device.type == "cpu" else square


def _root(squares: list[Any]) -> Any:
    total = sum(squares[1:], start=squares[0])
    if isinstance(total, float):
        return math.sqrt(total) if total >= 0 else math.nan
    return total.sqrt()
