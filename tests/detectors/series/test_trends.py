"""Slopes, exact tests and growth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from detectors.series.trends import (
    dispersion,
    excess_p,
    gamma_of_rates,
    gauss_line,
    growth,
    is_step,
    largest_jump,
    paired_slope,
)


def one(value: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([value])


@given(st.integers(1, 30), st.integers(0, 200), st.floats(1, 1e4), st.floats(1, 1e6))
@settings(max_examples=60, deadline=None)
def test_the_count_test_is_the_binomial_tail(recent: int, past: int, recent_s: float, past_s: float) -> None:
    found = excess_p(one(recent), one(recent_s), one(past), one(past_s))[0]
    expected = stats.binom.sf(recent - 1, recent + past, recent_s / (recent_s + past_s))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-300)


def test_the_count_test_keeps_its_level() -> None:
    rng = np.random.default_rng(1)
    recent, past = rng.poisson(4.0, 20_000), rng.poisson(40.0, 20_000)
    p = excess_p(recent.astype(float), np.full(20_000, 1.0), past.astype(float), np.full(20_000, 10.0))
    for level in (0.1, 0.01, 0.001):
        assert (p <= level).mean() <= 1.3 * level


def test_without_past_nothing_is_known() -> None:
    assert excess_p(one(50.0), one(60.0), one(0.0), one(0.0))[0] == 1.0
    assert excess_p(one(0.0), one(60.0), one(0.0), one(600.0))[0] == 1.0


@given(st.floats(-5, 5), st.floats(-100, 100), st.integers(0, 10))
@settings(max_examples=40, deadline=None)
def test_the_slope_of_a_line_survives_gross_errors(slope: float, start: float, wrong: int) -> None:
    values = start + slope * np.arange(60.0)
    values[np.random.default_rng(wrong).choice(60, wrong, replace=False)] = 1e6
    assert paired_slope(values[None, :])[0] == pytest.approx(slope, abs=1e-6)


def test_the_slope_of_an_unknown_row_is_unknown() -> None:
    values = np.full((2, 20), np.nan)
    values[1, ::2] = np.arange(10.0)
    assert np.isnan(paired_slope(values)[0])
    assert paired_slope(values)[1] == pytest.approx(0.5)


def test_a_step_jumps_and_a_ramp_does_not() -> None:
    step, ramp = np.repeat([0.0, 10.0], 30), np.linspace(0, 10, 60)
    jumps = largest_jump(np.stack([step, ramp]))
    assert jumps[0] == 10.0
    assert jumps[1] < 0.5


def test_growth_is_found_and_its_error_is_honest() -> None:
    rng = np.random.default_rng(2)
    time = np.arange(60.0)
    found = [growth(rng.poisson(np.exp(0.05 * (time - 59)) * 20).astype(float)) for _ in range(60)]
    assert np.mean([g.rate for g in found]) == pytest.approx(0.05, rel=0.1)
    assert np.mean([g.now for g in found]) == pytest.approx(20, rel=0.1)
    flat = [growth(rng.poisson(3.0, 60).astype(float)).z for _ in range(300)]
    assert np.mean(np.abs(flat) > 2.0) < 0.1


def test_growth_of_nothing_is_none() -> None:
    assert growth(np.zeros(60)).z == 0.0
    assert growth(np.full(60, np.nan)).rate == 0.0


def test_bursts_are_told_from_single_events() -> None:
    rng = np.random.default_rng(3)
    single = rng.poisson(5.0, (1, 400)).astype(float)
    burst = 8.0 * rng.poisson(5.0 / 8, (1, 400))
    assert dispersion(single)[0] < 1.4
    assert dispersion(burst)[0] > 5.0
    assert dispersion(np.full((1, 4), np.nan))[0] == 1.0


def test_the_spread_of_rates_is_that_of_the_parts() -> None:
    rng = np.random.default_rng(4)
    seconds = np.full(400, 1e5)
    alike = gamma_of_rates(rng.poisson(1e-3 * seconds).astype(float), seconds)
    spread = gamma_of_rates(rng.poisson(rng.gamma(2.0, 5e-4, 400) * seconds).astype(float), seconds)
    assert alike[1] > 20 * spread[1], "like parts tell more about each other"
    assert spread[0] == pytest.approx(2.0, rel=0.3)
    assert gamma_of_rates(np.ones(2), np.ones(2)) == (0.0, 0.0)
    assert gamma_of_rates(np.zeros(5), np.full(5, 10.0)) == (0.0, 50.0)


def test_the_line_of_a_risk() -> None:
    assert gauss_line(0.5) == pytest.approx(0.0)
    assert stats.norm.sf(gauss_line(1e-9)) == pytest.approx(1e-9)


@pytest.mark.parametrize("at", [9, 15, 22])
@pytest.mark.parametrize("then_per_h", [0.0, 4.0])
def test_a_step_in_noise_is_a_step_wherever_it_lies_and_even_if_a_drift_follows(at: int, then_per_h: float) -> None:
    rng, minute = np.random.default_rng([at, int(then_per_h)]), np.arange(30)
    level = 6.0 * (minute >= at) + then_per_h / 60.0 * np.maximum(minute - at, 0)
    assert is_step(level + 0.5 * rng.normal(size=(20, 30))).all()


@pytest.mark.parametrize("course", ["ramp", "climb", "late"])
def test_what_goes_on_rising_is_no_step(course: str) -> None:
    rng, share = np.random.default_rng(5), np.linspace(0.0, 1.0, 30)
    level = {
        "ramp": share, "climb": np.expm1(3.0 * share) / np.expm1(3.0), "late": np.maximum(share - 0.4, 0.0) / 0.6,
    }[course]  # fmt: skip
    rows = 8.0 * level + 0.5 * rng.normal(size=(20, 30))
    rows[:, [7, 8]] -= 5.0  # a dip of two minutes, as when a checkpoint is written
    assert not is_step(rows).any()


def test_too_few_points_are_no_step() -> None:
    assert not is_step(np.array([[0.0] * 3 + [9.0] * 4 + [np.nan] * 20])).any()
