"""Change points against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from detectors.series.change import OnlineShift, bounded, change_points, noise_scale, segment, shift_probability

F64 = NDArray[np.float64]


def cost(values: F64) -> float:
    return float(((values - values.mean()) ** 2).sum())


def brute_segment(values: F64, penalty: float, least: int) -> tuple[float, list[int]]:
    found: list[tuple[float, list[int]]] = []
    for number in range(len(values) // least):
        for cuts in itertools.combinations(range(1, len(values)), number):
            parts = np.split(values, list(cuts))
            if min(len(part) for part in parts) >= least:
                found.append((sum(cost(part) for part in parts) + penalty * number, list(cuts)))
    return min(found)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("least", [1, 2, 3])
def test_the_segmentation_is_the_best_of_all(seed: int, least: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=11) + np.repeat(rng.normal(0, 3, 4), 3)[:11]
    best, cuts = brute_segment(values, 2.0, least)
    assert segment(values, 2.0, least) == cuts, f"the best costs {best}"


def brute_runs(values: F64, hazard: float, wide: float) -> F64:
    """Probability that the newest value's level began with it, one before... by summing over every set of changes."""
    weights = np.zeros(len(values))
    for changes in itertools.product([False, True], repeat=len(values) - 1):
        cuts = [i + 1 for i, change in enumerate(changes) if change]
        chance = math.prod(hazard if change else 1 - hazard for change in changes)
        for part in np.split(values, cuts):
            covariance = np.eye(len(part)) + wide**2
            chance *= math.exp(-0.5 * part @ np.linalg.solve(covariance, part)) / math.sqrt(
                np.linalg.det(2 * np.pi * covariance)
            )
        weights[len(values) - (cuts[-1] if cuts else 0) - 1] += chance
    return np.asarray(weights / weights.sum())


@pytest.mark.parametrize("seed", range(5))
def test_run_lengths_are_those_of_all_histories(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.concatenate([rng.normal(size=4), rng.normal(3, 1, 4)])
    online = OnlineShift(hazard=0.1, wide=3.0)
    for value in values:
        posterior = online.step(float(value))
    np.testing.assert_allclose(posterior, brute_runs(values, 0.1, 3.0), rtol=1e-9)


def test_forgetting_long_runs_loses_no_probability() -> None:
    rng = np.random.default_rng(3)
    short, long = OnlineShift(longest=20), OnlineShift(longest=400)
    for value in rng.normal(size=200).tolist():
        ours, whole = short.step(value), long.step(value)
    assert len(short.log_run) == 20
    assert ours.sum() == pytest.approx(1.0)
    assert ours[:5] == pytest.approx(whole[:5], abs=0.01)


def test_a_spike_is_no_change_and_a_shift_is() -> None:
    rng = np.random.default_rng(5)
    values = rng.normal(size=120)
    values[30] = 40.0
    assert change_points(values) == []
    values[80:] += 5.0
    assert len(found := change_points(values)) == 1
    assert abs(found[0] - 80) <= 1


def test_absent_values_and_constants_have_no_change() -> None:
    assert change_points(np.full(50, 3.0)) == []
    assert change_points(np.full(50, np.nan)) == []
    assert change_points(np.array([1.0])) == []
    assert bounded(np.array([1.0, np.nan]), 1.0).tolist() == [1.0]


def test_the_noise_is_that_about_the_level() -> None:
    rng = np.random.default_rng(7)
    values = rng.normal(0, 2.0, 2000) + np.repeat(rng.normal(0, 100, 10), 200)
    assert noise_scale(values) == pytest.approx(2.0, rel=0.1)


def test_a_shift_just_now_is_probable_and_an_old_one_not() -> None:
    rng = np.random.default_rng(9)
    values = np.concatenate([rng.normal(size=40), rng.normal(4, 1, 30)])
    assert shift_probability(values[:43], since=5) > 0.9
    assert shift_probability(values, since=5) < 0.2
