"""Range-based F1, events, NAB's score, the label-free line and the paired comparison, by hand-computed cases and known properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.detect.methods.base import F64
from benchmarks.detect.metrics import nab
from benchmarks.detect.metrics.compare import paired
from benchmarks.detect.metrics.events import event_score, joined
from benchmarks.detect.metrics.ranges import range_score
from benchmarks.detect.metrics.spot import Spot, pareto


def alarms_at(rows: int, *where: int) -> NDArray[np.bool_]:
    out = np.zeros(rows, bool)
    out[list(where)] = True
    return out


def test_ranges_by_hand() -> None:
    # span of 4: two pieces cover 3 rows -> 0.2 + 0.8 * (3/4)/2; the other span is missed. Runs: {2} inside, {4,5} one of two inside
    got = range_score(alarms_at(20, 2, 4, 5), ((2, 4), (10, 13)))
    assert got.recall == pytest.approx((0.2 + 0.8 * (2 / 3) / 2) / 2)
    assert got.precision == pytest.approx((1 + 1 / 2) / 2)
    assert got.f1 == pytest.approx(2 * got.precision * got.recall / (got.precision + got.recall))


def test_ranges_are_perfect_on_the_truth_and_nothing_on_silence() -> None:
    truth = alarms_at(30, 3, 4, 5, 20)
    assert range_score(truth, ((3, 5), (20, 20))).f1 == 1.0
    assert range_score(np.zeros(30, bool), ((3, 5),)).f1 == 0.0


def test_events_by_hand() -> None:
    got = event_score(alarms_at(200, 12, 13, 60, 63, 150), ((10, 20), (62, 70), (90, 95)), step_s=30.0)
    assert (got.found, got.events, got.delays_s) == (2, 3, (60.0, 30.0))
    assert got.false_alarms == 1  # row 150; 60 joins 63, which is inside a span
    assert got.false_alarms_per_day == pytest.approx(1 / (200 * 30 / 86_400))


def test_an_alarm_that_outlasts_its_event_is_not_false() -> None:
    assert event_score(alarms_at(50, *range(15, 40)), ((10, 20),), 1.0).false_alarms == 0


def test_alarms_close_together_are_one() -> None:
    assert joined(alarms_at(40, 1, 6, 20, 26)) == ((1, 6), (20, 20), (26, 26))


def test_recall_of_no_events_is_unknown() -> None:
    assert np.isnan(event_score(alarms_at(10), (), 1.0).recall)


def test_nab_gives_100_for_the_first_row_of_every_window_and_0_for_silence() -> None:
    file = nab.nab_file(100, ((20, 29), (70, 79)))
    assert nab.score_at([file], [alarms_at(100, 20, 70)]) == pytest.approx(100.0)
    assert nab.score_at([file], [alarms_at(100)]) == 0.0


def test_nab_by_hand() -> None:
    # middle of a window of 10 (5 rows from its right edge inclusive): 2 s(2.5) - 1 over 2 s(5) - 1; a false row far from any: -0.11
    file = nab.nab_file(200, ((50, 59),))
    worth = (2 / (1 + np.exp(-2.5)) - 1) / (2 / (1 + np.exp(-5)) - 1)
    assert file.worth[55] == pytest.approx(worth)
    assert file.worth[0] == pytest.approx(-0.11)
    assert file.worth[150] == pytest.approx(-0.11)
    assert file.worth[60] == pytest.approx(0.11 * (2 / (1 + np.exp(5 / 9)) - 1))
    assert nab.score_at([file], [alarms_at(200, 3, 55)]) == pytest.approx(100 * (worth + 1 - 0.11) / 2)


def test_nab_counts_only_the_earliest_alarm_of_a_window() -> None:
    file = nab.nab_file(100, ((20, 39),))
    assert nab.score_at([file], [alarms_at(100, 22, 30, 38)]) == nab.score_at([file], [alarms_at(100, 22)])


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_nab_best_threshold_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    files = [nab.nab_file(60, ((10, 19),)), nab.nab_file(80, ((30, 34), (60, 70))), nab.nab_file(40, ())]
    scores: list[F64] = [np.round(rng.random(len(file.worth)), 1) for file in files]
    tried = {line: nab.score_at(files, [one >= line for one in scores]) for line in np.unique(np.concatenate(scores))}
    best = nab.best_score(files, scores)
    assert best.score == pytest.approx(max(0.0, *tried.values()))
    if np.isfinite(best.threshold):
        assert tried[best.threshold] == pytest.approx(best.score)


def test_spot_is_crossed_about_as_often_as_its_risk_says() -> None:
    # 200 expected; leaving alarms out of the tail, as SPOT does, lets the line sink: up to three times as many
    rng = np.random.default_rng(0)
    crossed = [Spot(rng.exponential(size=5000), 1e-3).alarms(rng.exponential(size=20_000)).sum() for _ in range(10)]
    assert 100 < sum(crossed) < 600


def test_spot_names_the_outlier_and_does_not_learn_it() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=2000)
    scores[700] = scores[900] = 30.0
    spot = Spot(rng.normal(size=1000), 1e-4)
    assert {700, 900} <= set(np.flatnonzero(spot.alarms(scores)).tolist())
    assert spot.excesses[-1] < 10


def test_spot_follows_a_tail_that_is_heavier_than_the_calibration() -> None:
    rng = np.random.default_rng(2)
    still, moving = Spot(rng.normal(size=1000), 1e-4), Spot(rng.normal(size=1000), 1e-4)
    first = moving.line
    moving.alarms(rng.normal(scale=1.3, size=5000))
    assert moving.line > first
    assert still.line == pytest.approx(still.tail_line())


def test_spot_on_constant_scores_alarms_at_any_rise() -> None:
    assert Spot(np.zeros(500), 1e-4).alarms(np.array([0.0, 1e-6, 0.0])).tolist() == [False, True, False]


def test_pareto_finds_shape_and_scale() -> None:
    uniform = np.random.default_rng(5).random(200_000)
    shape, scale = pareto(np.sort(2.0 * (uniform**-0.2 - 1) / 0.2))
    assert (shape, scale) == pytest.approx((0.2, 2.0), abs=0.05)


def test_paired_by_hand() -> None:
    got = paired(np.array([0.5, 0.6, 0.7]), np.array([0.4, 0.5, 0.6]))
    assert got.mean == pytest.approx(0.1)
    assert (got.low, got.high) == pytest.approx((0.1, 0.1))
    assert got.p == pytest.approx(0.25)  # all three of the same sign: 2 / 2**3
    assert got.series == 3


def test_paired_interval_holds_zero_when_neither_is_better() -> None:
    rng = np.random.default_rng(6)
    got = paired(rng.normal(size=40), rng.normal(size=40))
    assert got.low < 0 < got.high
    assert paired(np.ones(5), np.ones(5)).p == 1.0
