"""Tails: the closed-form fit against scipy, and the line it gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import genpareto

from detectors.threshold import tails
from detectors.threshold.tails import Tails

samples = hnp.arrays(np.float64, (3, 16), elements=st.floats(0.0, 1e3, width=32))


@pytest.mark.parametrize("shape", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("scale", [0.3, 5.0])
def test_fit_finds_the_law_that_scipy_drew_from(shape: float, scale: float) -> None:
    drawn = genpareto.rvs(shape, scale=scale, size=(2000, tails.BATCH), random_state=np.random.default_rng(1))
    l1, l2 = (moment.mean(keepdims=True) for moment in tails.l_moments(drawn))
    found_scale, found_shape = tails.pareto_of(l1, l2)
    assert found_shape[0] == pytest.approx(shape, abs=0.04)
    assert found_scale[0] == pytest.approx(scale, rel=0.06)


def test_fit_of_one_large_sample_agrees_with_maximum_likelihood() -> None:
    drawn = genpareto.rvs(0.25, scale=2.0, size=20_000, random_state=np.random.default_rng(2))
    scale, shape = tails.pareto_of(*tails.l_moments(drawn[None]))
    ml_shape, _, ml_scale = genpareto.fit(drawn, floc=0)
    assert shape[0] == pytest.approx(ml_shape, abs=0.03)
    assert scale[0] == pytest.approx(ml_scale, rel=0.04)


@pytest.mark.parametrize("shape", [0.001, 0.2, 0.5])
def test_survival_is_scipys_and_excess_is_its_inverse(shape: float) -> None:
    at, one = np.array([0.0, 0.5, 3.0, 40.0]), np.ones(4)
    found = tails.survival(at, 1.7 * one, shape * one)
    assert found == pytest.approx(np.log10(genpareto.sf(at, shape, scale=1.7)), rel=1e-6, abs=1e-9)
    assert tails.excess_at(found, 1.7 * one, shape * one) == pytest.approx(at, rel=1e-6, abs=1e-9)


@given(samples, st.sampled_from([0.25, 1.0, 8.0]), st.floats(0.0, 100.0))
def test_l_moments_follow_scale_and_shift(drawn: np.ndarray, scale: float, shift: float) -> None:
    l1, l2 = tails.l_moments(drawn)
    moved1, moved2 = tails.l_moments(scale * drawn + shift)
    assert moved1 == pytest.approx(scale * l1 + shift, rel=1e-6, abs=1e-6)
    assert moved2 == pytest.approx(scale * l2, rel=1e-6, abs=1e-5)
    assert (l2 >= -1e-9).all()


@settings(max_examples=30)
@given(st.lists(st.floats(0.0, 50.0, width=32), min_size=20, max_size=200), st.sampled_from([1e-3, 1e-5, 1e-7]))
def test_score_grows_with_height_and_meets_the_risk_at_the_line(excesses: list[float], risk: float) -> None:
    fitted, at = filled(excesses)
    line = fitted.height(*at, risk)
    assert fitted.score(*at, line)[0] == pytest.approx(-np.log10(risk), rel=1e-3)
    scores = [float(fitted.score(*at, np.array([height], np.float32))[0]) for height in np.linspace(1.0, 100.0, 30)]
    assert scores == sorted(scores)
    assert fitted.height(*at, risk / 10)[0] > line[0]


def test_young_series_borrow_the_law_of_like_ones() -> None:
    alike = Tails.of(2, 1, alike=True)
    rng = np.random.default_rng(0)
    zero, old = np.zeros(1, np.int64), np.full(1, 1e4, np.float32)
    for excess in 5.0 * rng.exponential(1.0, 800):
        alike.add(zero, zero, zero, np.array([excess], np.float32), old)
    alike.level[:] = 3.0
    other = np.ones(1, np.int64)
    assert alike.height(zero, other, zero, 1e-4)[0] == pytest.approx(alike.height(zero, zero, zero, 1e-4)[0], rel=0.2)
    assert alike.height(zero, other, zero, 1e-4)[0] > 2 * Tails.of(1, 1).height(zero, zero, zero, 1e-4)[0]


def filled(excesses: list[float]) -> tuple[Tails, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    made, zero = Tails.of(1, 1), np.zeros(1, np.int64)
    for excess in excesses:
        made.add(zero, zero, zero, np.array([excess], np.float32), np.full(1, 1e4, np.float32))
    made.level[:] = 2.0
    return made, (zero, zero, zero)
