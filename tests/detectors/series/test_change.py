"""Change points against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from detectors.series.change import bounded, change_points, levelled, memory, noise_scale, segment

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


def wandering(rng: np.random.Generator, count: int, follow: float) -> F64:
    values = rng.normal(size=count + 100)
    for at in range(1, len(values)):
        values[at] = follow * values[at - 1] + math.sqrt(1 - follow**2) * values[at]
    return values[100:]


def test_what_wanders_by_itself_has_not_changed() -> None:
    rng = np.random.default_rng(11)
    wandered = [wandering(rng, 144, 0.6) for _ in range(40)]
    found = [change_points(values) for values in wandered]
    assert sum(map(len, found)) < sum(len(change_points(values, 3 * math.log(144))) for values in wandered) / 10
    assert memory(wandering(rng, 4000, 0.6)) == pytest.approx(0.6, abs=0.1)


def test_what_came_before_a_step_is_moved_to_the_level_after_it() -> None:
    rng = np.random.default_rng(13)
    season = 5.0 * np.sin(np.arange(864) * 2 * np.pi / 288)
    values = season + rng.normal(size=864)
    stepped = values.copy()
    stepped[:500] -= 6.0
    stepped[100:130] = np.nan
    moved = levelled(stepped, season)
    assert np.nanmean(moved[:500] - values[:500]) == pytest.approx(0.0, abs=0.3)
    assert np.isnan(moved[100:130]).all()
    np.testing.assert_array_equal(levelled(values, season), values)


def test_a_ramp_and_a_spike_stay_what_they_are() -> None:
    rng = np.random.default_rng(17)
    ramp = np.linspace(0.0, 12.0, 864) + rng.normal(size=864)
    spiked = rng.normal(size=864)
    spiked[300:303] += 40.0
    for values in (ramp, spiked):
        assert np.abs(levelled(values, np.zeros(864)) - values).max() < 1.0


def test_too_little_has_no_step() -> None:
    for values in (np.zeros(0), np.arange(5.0), np.full(100, np.nan)):
        np.testing.assert_array_equal(levelled(values, np.zeros(len(values))), values)
