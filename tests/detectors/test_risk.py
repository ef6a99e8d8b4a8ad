"""The cluster's budget of false alarms: split, kept on heavy-tailed noise, and spent."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from detectors.risk import (
    DETECTOR_SHARES,
    Clustering,
    Spending,
    brier,
    calibration_error,
    family_budget,
    line_for,
    poisson_at_least,
    promised_per_day,
    reliability,
    risk_per_tick,
    tail_line,
)
from trainwarden.clock import NS_PER_S

SERIES, DAY_TICKS = 10_000 * 30, 86_400
Noise = NDArray[np.float64]


def student(rng: np.random.Generator, count: int) -> Noise:
    return np.abs(rng.standard_t(3, count))


def lognormal(rng: np.random.Generator, count: int) -> Noise:
    return np.asarray(rng.lognormal(0, 1, count))


def contaminated(rng: np.random.Generator, count: int) -> Noise:
    return np.abs(rng.standard_normal(count) * np.where(rng.random(count) < 0.01, 10.0, 1.0))


def true_tail(noise: object, line: float, rng: np.random.Generator) -> float:
    draws = noise(rng, 1_000_000)  # type: ignore[operator]
    return float((draws > line).mean())


def test_the_parts_add_up_to_the_whole() -> None:
    assert sum(DETECTOR_SHARES.values()) == pytest.approx(1.0)
    assert sum(family_budget(name, 4.0) for name in DETECTOR_SHARES) == pytest.approx(4.0)
    for ticks in (1, 3, 10):
        spent = risk_per_tick(1.0, SERIES, run_ticks=ticks) ** ticks * SERIES * DAY_TICKS
        assert spent == pytest.approx(1.0)


def test_more_series_and_shorter_ticks_make_each_line_stricter() -> None:
    assert risk_per_tick(1.0, 1000) < risk_per_tick(1.0, 100)
    assert risk_per_tick(1.0, 100, interval_s=1.0) < risk_per_tick(1.0, 100, interval_s=10.0)
    assert risk_per_tick(1.0, 100, run_ticks=5, clustering=0.5) < risk_per_tick(1.0, 100, run_ticks=5)
    assert risk_per_tick(1.0, 0) == risk_per_tick(1.0, 1)


@pytest.mark.long
@pytest.mark.parametrize("noise", [student, lognormal, contaminated])
def test_a_day_of_ten_thousand_gpus_and_thirty_metrics_does_not_page(noise: object) -> None:
    """26 billion healthy ticks, of which only those beyond the line are drawn: how many, where, and which of them stand in a row."""
    rng = np.random.default_rng(4)
    line = line_for(1.0, SERIES, supported_risk=1e-4)
    height = tail_line(noise(rng, 1_000_000), line.risk_per_tick)  # type: ignore[operator]
    beyond = true_tail(noise, height, rng)
    count = rng.binomial(SERIES * DAY_TICKS, beyond)
    places = np.unique(rng.integers(0, SERIES * (DAY_TICKS + line.run_ticks), count))
    runs = int((places[line.run_ticks - 1 :] - places[: len(places) - line.run_ticks + 1] == line.run_ticks - 1).sum())
    assert poisson_at_least(runs, 1.0) > 1e-3, f"{runs} false incidents in a day, one was allowed"
    assert count > 100_000, "the test drew nothing beyond the line: it proves nothing"


@pytest.mark.parametrize("memory", [0.0, 0.8])
def test_noise_that_comes_in_runs_keeps_the_budget(memory: float) -> None:
    """Heavy-tailed noise with memory; the clustering is measured on the first third, the budget is held on the rest."""
    rng, series, ticks = np.random.default_rng(9), 2000, 9000
    level, run, before = np.zeros(series), np.zeros(series, dtype=int), np.zeros(series, dtype=bool)
    seen, pool, incidents, clustering = [], 0.0, 0, Clustering()
    budget_per_day = 8.0 * DAY_TICKS / (ticks - 3000)
    for tick in range(ticks):
        level = memory * level + rng.standard_t(4, series)
        if tick < 1500:
            seen.append(np.abs(level))
            continue
        if tick == 1500:
            pool = tail_line(np.concatenate(seen[300:]), 1e-3)
        over = np.abs(level) > pool
        if tick < 3000:
            clustering.see(before, over)
            before = over
            continue
        if tick == 3000:
            line = line_for(budget_per_day, series, clustering=clustering.value, supported_risk=1e-3)
            pool = tail_line(np.concatenate(seen[300:]), line.risk_per_tick)
            over = np.abs(level) > pool
        run = np.where(over, run + 1, 0)
        incidents += int((run == line.run_ticks).sum())
    assert clustering.value > 0.1 if memory else clustering.value < 0.1
    assert poisson_at_least(incidents, 8.0) > 1e-3, f"{incidents} false incidents where 8 were allowed"


def test_without_persistence_a_fixed_three_sigma_line_would_page_all_day() -> None:
    """What the budget is for: the common rule on the same noise."""
    rng = np.random.default_rng(2)
    draws = rng.standard_t(3, 1_000_000)
    assert (np.abs(draws) > 3 * draws.std()).mean() * SERIES * DAY_TICKS > 1e7


def test_tail_line_needs_samples_and_ignores_what_is_absent() -> None:
    with pytest.raises(ValueError, match="expected at least 1000"):
        tail_line(np.ones(10), 1e-6)
    scores = student(np.random.default_rng(1), 50_000)
    holed = np.concatenate([scores, np.full(1000, np.nan)])
    assert tail_line(holed, 1e-6) == tail_line(scores, 1e-6) > tail_line(scores, 1e-4)


def test_spending_is_bounded_whatever_the_noise() -> None:
    purse, said = Spending(budget_per_day=2.0), 0
    for second in range(0, 10 * DAY_TICKS, 60):
        said += purse.admit(second * NS_PER_S)
    assert said <= 3 + 2.0 * 10
    assert said >= 2.0 * 10
    assert purse.held == 10 * DAY_TICKS // 60 - said


def test_true_opinions_cost_nothing() -> None:
    purse = Spending(budget_per_day=0.1)
    for second in range(200):
        assert purse.admit(second * NS_PER_S)
        purse.confirm()


def test_risk_shrinks_as_the_purse_empties_and_a_clock_that_goes_back_fills_nothing() -> None:
    purse = Spending(budget_per_day=1.0)
    factors = [purse.factor(0)]
    while purse.admit(0):
        factors.append(purse.factor(0))
    assert factors[0] == 1.0
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == pytest.approx(0.01)
    assert not purse.admit(-5 * NS_PER_S)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(purse), type=Spending)
    assert again == purse


def test_clustering_is_cautious_while_little_is_known_and_forgets() -> None:
    meter = Clustering()
    assert meter.value == 0.5
    yes, no = np.ones(100, dtype=bool), np.zeros(100, dtype=bool)
    for _ in range(50):
        meter.see(yes, no, memory=1000)
    assert meter.value < 0.01
    for _ in range(50):
        meter.see(yes, yes, memory=1000)
    assert meter.value > 0.9


def test_promises_add_up() -> None:
    assert promised_per_day({"a": 1e-4, "b": 3e-4}, 1250) == pytest.approx(0.5)


def test_reliability_of_a_calibrated_and_of_a_boastful_detector() -> None:
    rng = np.random.default_rng(3)
    sure = rng.uniform(0.05, 0.95, 5000)
    honest = (rng.random(5000) < sure).tolist()
    boast = (rng.random(5000) < sure - 0.3).tolist()
    table = reliability(sure.tolist(), honest)
    assert sum(row.count for row in table) == 5000
    assert sum(row.right_low <= row.confidence <= row.right_high for row in table) >= 8
    assert calibration_error(table) < 0.03
    assert calibration_error(reliability(sure.tolist(), boast)) > 0.2
    assert brier(sure.tolist(), honest) < brier(sure.tolist(), boast)
    assert np.isnan(brier([], []))
    assert np.isnan(calibration_error([]))
