"""Production traces with a known cause: the right worker, or nobody, also with other numbers, other speeds and lost rows."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="the ByteDance traces are parquet: install the extra 'bench'")

from benchmarks.detect import steps_data, steps_real
from benchmarks.detect.steps_data import F64, Job, Times
from benchmarks.detect.steps_real import EXPECTED, false_isolations, judge, replay
from detectors.base import Detector, registry

DETECTORS: list[type[Detector]] = [
    kind for kind in registry().all().values() if kind.__module__.startswith("detectors.steps.")
]


@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
def test_bytedance(name: str) -> None:
    job = steps_data.bytedance(name)
    outcome = judge(job, replay(job, DETECTORS), EXPECTED[name])
    assert outcome.right, outcome.line()


@pytest.mark.parametrize("number", [1, 2])
def test_alibaba(number: int) -> None:
    job = steps_data.alibaba(number)
    outcome = judge(job, replay(job, DETECTORS), EXPECTED[job.name])
    assert outcome.right, outcome.line()


@cache
def times_of(name: str) -> tuple[Times, int]:
    return steps_data.bytedance_times(name)


def changed(name: str, columns: list[int], factor: float, lost: float) -> Job:
    """The trace with its ranks in another order, all times multiplied, and some rows lost."""
    times, dp = times_of(name)
    gone = np.random.default_rng(1).random(times.forward.shape) < lost

    def turned(values: F64) -> F64:
        return np.where(gone, np.nan, values * factor)[:, columns]

    ranks = len(columns)
    nodes = tuple(f"dp{rank % dp}-stage{rank // dp}" for rank in columns)
    places = ";".join(f"{rank % dp} {rank // dp}" for rank in columns)
    moved = Times(
        times.numbers,
        turned(times.forward),
        turned(times.backward),
        turned(times.optimizer),
        times.duration[:, columns] * factor,
    )
    assert ranks == times.forward.shape[1]
    return steps_data.job_of(name, moved, nodes, {"coordinates": f"dp pp;{places}"})


@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
@pytest.mark.parametrize(("factor", "lost"), [(0.7, 0.0), (1.5, 0.02), (0.25, 0.0)])
def test_bytedance_with_other_numbers_and_speeds(name: str, factor: float, lost: float) -> None:
    order = np.random.default_rng(5).permutation(times_of(name)[0].forward.shape[1]).tolist()
    job = changed(name, order, factor, lost)
    outcome = judge(job, replay(job, DETECTORS), EXPECTED[name])
    assert outcome.right, outcome.line()


@pytest.mark.parametrize("variation", [0.02, 0.3, 1.5, 2.9])
def test_drawn_times_vary_as_they_should_and_are_positive(variation: float) -> None:
    values = steps_data.with_variation(np.full(50, variation), np.random.default_rng(0))
    assert (values > 0).all()
    np.testing.assert_allclose(values.std(axis=1) / values.mean(axis=1), variation, rtol=1e-3)


def test_nobody_is_isolated_where_nobody_stays_slow() -> None:
    found = false_isolations(list(steps_data.drawn_jobs(2)), DETECTORS)
    assert found["worker_steps"] > 10_000
    assert found["false_isolations"] == 0


def test_a_wrong_isolation_is_told_from_a_right_one() -> None:
    job = steps_data.bytedance("ST")
    outcome = judge(job, [], steps_real.Expected(said=("imbalance",)))
    assert outcome.right is False
    assert "isolates nobody" in outcome.line()
