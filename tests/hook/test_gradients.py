"""The communication hook: the same gradients as without it, norms within a budget, NaN named in its step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trainwarden_hook.environment import Environment
from trainwarden_hook.gradients import MAX_FAILURES, SAMPLE_PARTS, GradientTap, Stride
from trainwarden_hook.job import Job
from trainwarden_hook.rows import Row
from trainwarden_hook.scalars import DeviceScalar, here, is_bad, read

from trainwarden.embedded.ports import free_port


class Bucket:
    """What DDP hands to a hook."""

    def __init__(self, buffer: torch.Tensor, last: bool = True) -> None:
        self._buffer = buffer
        self._last = last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return self._last


class Group:
    """A process group of one that adds nothing."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(tensors)
        return type("Work", (), {"get_future": lambda _: future})()


def one_step(tap: GradientTap, *buffers: torch.Tensor, must: bool = False) -> tuple[Any, Any]:
    tap.begin(must)
    for number, buffer in enumerate(buffers):
        tap(None, Bucket(buffer, number == len(buffers) - 1))  # type: ignore[arg-type]
    return tap.local_norm(), tap.reduced_norm(must)


def test_norms_before_and_after_the_average() -> None:
    tap = GradientTap(4, Group())
    local, reduced = one_step(tap, torch.full((9,), 2.0), torch.full((16,), -1.0))
    assert local == pytest.approx(math.sqrt(9 * 4 + 16))
    assert reduced == pytest.approx(local / 4)
    assert tap.handed_ns <= tap.reduced_ns


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norms_of_other_kinds(dtype: torch.dtype) -> None:
    local, _ = one_step(GradientTap(1, Group()), torch.full((10000,), 0.5, dtype=dtype))
    assert local == pytest.approx(50.0, rel=1e-3)


def expensive() -> GradientTap:
    tap = GradientTap(1, Group())
    tap.local_stride.every = tap.reduced_stride.every = 1000
    tap.settle = lambda *_: None  # type: ignore[method-assign]
    return tap


def test_between_measurements_a_good_norm_is_absent_and_nan_is_told() -> None:
    tap = expensive()
    assert one_step(tap, torch.ones(1000)) == (None, None)
    local, _ = one_step(tap, torch.full((1000,), math.nan))
    assert math.isnan(local)
    local, _ = one_step(tap, torch.full((1000,), math.inf))
    assert math.isinf(local) or math.isnan(local)


def test_nan_that_came_through_the_backward_pass_is_told_when_nothing_else_may_be_afforded() -> None:
    tap = expensive()
    tap.sample_stride.every = 10**9
    for step in range(20):
        assert one_step(tap, torch.ones(9), torch.ones(5000))[0] is None, step
    local, _ = one_step(tap, torch.full((9,), math.nan), torch.full((5000,), math.nan))
    assert math.isnan(local)


def test_a_single_nan_is_seen_once_the_parts_have_gone_round() -> None:
    tap = expensive()
    buffers = torch.ones(1000), torch.ones(37)
    buffers[1][36] = math.nan
    seen = [one_step(tap, *buffers)[0] for _ in range(2 * SAMPLE_PARTS + 2)]
    assert any(value is not None and math.isnan(value) for value in seen)


def test_a_step_before_a_save_is_always_measured() -> None:
    local, reduced = one_step(expensive(), torch.ones(100), must=True)
    assert (local, reduced) == (10.0, 10.0)


def test_the_stride_follows_cost_over_allowance() -> None:
    stride = Stride()
    assert stride.due()
    stride.spent(100_000)
    stride.allow(25_000)
    assert stride.every == 4
    assert [stride.due() for _ in range(4)] == [False, False, False, True]


def test_the_budget_lets_cheap_norms_through_and_spreads_dear_ones() -> None:
    tap = GradientTap(1, Group())
    tap.own_ns = 20_000
    tap.local_stride.spent(10_000)
    tap.settle(step_ns=60e6, recorder_ns=40_000)
    assert tap.local_stride.every == 1
    tap.local_stride.spent(10_000_000)
    for _ in range(30):
        tap.local_stride.spent(10_000_000)
    tap.settle(step_ns=60e6, recorder_ns=40_000)
    assert tap.local_stride.every > 50


def test_a_failure_to_measure_is_counted_and_the_average_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.Tensor) -> Any:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr("trainwarden_hook.gradients._square", fail)
    tap, buffer = GradientTap(2, Group()), torch.ones(4)
    for _ in range(5):
        assert one_step(tap, buffer) == (None, None)
    assert tap.failures == MAX_FAILURES
    assert buffer[0].item() == 2.0**-5


@pytest.fixture
def group() -> Iterator[None]:
    port = free_port()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ddp() -> Any:
    torch.manual_seed(3)
    return DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.ReLU(), torch.nn.Linear(300, 4))
    )


@pytest.mark.usefixtures("group")
def test_gradients_with_the_hook_are_bit_for_bit_those_without() -> None:
    plain, hooked = ddp(), ddp()
    tap = GradientTap(1, hooked.process_group)
    hooked.register_comm_hook(None, lambda state, bucket: tap(state, bucket))  # noqa: PLW0108
    for _ in range(3):
        x = torch.randn(32, 8)
        for model in (plain, hooked):
            model.zero_grad()
        tap.begin()
        plain(x).square().mean().backward()
        hooked(x).square().mean().backward()
        for a, b in zip(plain.parameters(), hooked.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        total = torch.sqrt(sum((p.grad.square().sum() for p in hooked.parameters()), torch.zeros(())))
        assert tap.reduced_norm(must_measure=True) == pytest.approx(float(total), rel=1e-5)


@pytest.mark.parametrize(("value", "told"), [(3.0, None), (math.nan, "nan"), (math.inf, "inf")])
def test_the_norm_of_a_part_is_told_only_if_it_is_not_finite(value: float, told: str | None) -> None:
    on_its_way = DeviceScalar(torch.tensor(value), lambda: True, lambda: None)
    times = {"began_ns": 0, "entered_ns": 1, "ended_ns": 9, "wall_ns": 9, "checkpoint_ns": 0, "cpu_ns": 5, "own_ns": 1}
    when = {"handed_ns": 0, "reduced_ns": 0, "backward_left_ns": 0, "parts": [0, 0, 0, 0]}
    made = Row('{"t":"step"', 3, False, norm_local=on_its_way, partial=True, **times, **when)  # type: ignore[arg-type]
    row = json.loads(made.body())
    assert row.get("grad_norm_local") == told


def test_a_number_on_its_way_from_a_device_is_never_waited_for() -> None:
    arrived = [False]
    value = DeviceScalar(torch.tensor(2.5), lambda: arrived[0], lambda: arrived.__setitem__(0, True))
    assert not here(value)
    assert read(value) is None
    assert not is_bad(value)
    assert arrived[0], "before a save it is waited for"
    assert read(value) == 2.5


def test_a_glance_reads_each_kind_of_number_as_what_it_is() -> None:
    tap = expensive()
    tap.sample_stride.every = 1000
    assert one_step(tap, torch.ones(8)) == (None, None)
    wide = torch.ones(8, dtype=torch.float64)
    wide[7] = math.nan
    local, _ = one_step(tap, wide)
    assert local is not None
    assert math.isnan(local)


def test_a_glance_follows_the_bucket_where_it_goes_and_never_reads_memory_that_was_freed() -> None:
    """DDP makes its buckets anew after the first step, other ones, maybe where the old ones lay."""
    tap = expensive()
    tap.sample_stride.every = 1000
    for count in (64, 8, 4096, 1, 0, 64):
        assert one_step(tap, torch.ones(count)) == (None, None)
        assert tap._seen is not None
        assert tap._seen_at == tap._seen.data_ptr(), "what is read by its address is held"
        local, _ = one_step(tap, torch.full((count,), math.nan))
        assert (local is not None) == (count > 0)


def test_a_norm_that_cannot_be_put_together_costs_the_norm_only() -> None:
    tap = GradientTap(1, Group())
    tap.begin(must_measure=True)
    tap._squares[:] = [torch.ones(()), object()]
    assert tap.local_norm() is None
    assert tap.failures == 1


class Sharded(torch.nn.Linear):
    """Has hooks of its own kind, as FullyShardedDataParallel: ours would break its backward pass."""

    process_group = None

    def register_comm_hook(self, state: object, hook: object) -> None:
        raise AssertionError("our hook is for DistributedDataParallel only")


def test_a_wrapper_that_is_not_ddp_is_left_alone() -> None:
    job = Job(Environment("j", "n0", 0, 0, 0, 1, None, None, None, None, 60.0))
    job.tap_gradients(Sharded(2, 2))
    assert job.recorder.tap is None


@pytest.mark.parametrize(("said", "told"), [(8, 8), (8.0, 8), (torch.tensor(8), 8), (True, 1), ("many", None)])
def test_the_number_of_samples_may_be_any_number(said: Any, told: int | None) -> None:
    job = Job(Environment("j", "n0", 0, 0, 0, 1, None, None, None, None, 60.0))
    rows: list[Row] = []
    job.recorder.outbox.put = rows.append  # type: ignore[method-assign, assignment]
    with job.step(1) as step:
        step.report(loss=1.0, samples=said)
    assert json.loads(rows[0].body()).get("samples") == told
