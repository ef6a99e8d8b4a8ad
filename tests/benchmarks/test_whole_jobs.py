"""Published step times of whole jobs, and what is said of them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.whole_jobs import PAIRS, Pair, Whole, described, published, residual, simulated


def test_every_pair_names_a_job_of_the_file_with_enough_steps() -> None:
    assert min(len(published(pair.job).residual) for pair in PAIRS) >= 79
    with pytest.raises(ValueError, match="has no job 'mlperf-9b'"):
        published("mlperf-9b")


def test_a_slow_drift_is_no_residual_and_a_slow_step_is() -> None:
    seconds = 2.0 * np.exp(np.linspace(0, 0.5, 400))
    seconds[300] *= 1.2
    found = residual(seconds)
    assert found.max() == pytest.approx(np.log(1.2), abs=0.01)
    assert described(Whole("", found))["10 % slow"] == pytest.approx(1 / len(found))


def test_a_healthy_simulated_job_moves_as_little_as_published_ones() -> None:
    made = described(simulated(Pair("", "moe", 8), 60))
    assert described(published("mlperf-405b-theia"))["middle spread"] < made["middle spread"]
    assert made["middle spread"] < described(published("megatron-t5"))["middle spread"]
