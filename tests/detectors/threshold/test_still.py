"""Stuck, missing and reset series; the season and windows of single series."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detectors.contract import run
from detectors.synthetic import SyntheticCluster
from detectors.threshold import season, single, subsequence
from detectors.threshold.stale import StaleSeriesDetector, false_per_day
from detectors.threshold.still import LOOK_EVERY, Broken, Stillness

RISK = 1e-9


def looked(values: np.ndarray) -> list[Broken]:
    """One look at all series per row of ticks × series."""
    still = Stillness.of(values.shape[1], 1)
    return [still.step(row.reshape(-1, 1).astype(np.float32), RISK, slice(0, values.shape[1])) for row in values]


def moving(ticks: int, series: int) -> np.ndarray:
    return np.random.default_rng(0).normal(5.0, 1.0, (ticks, series))


def test_series_that_always_moved_and_stands_still_is_stuck() -> None:
    values = moving(120, 3)
    values[90:, 1] = values[90, 1]
    found = looked(values)
    assert found[-1].stuck.tolist() == [[1, 0]]
    assert not any(len(broken.stuck) for broken in found[:95])
    assert found[-1].stuck_score[0] > 9


def test_series_that_never_moves_is_not_stuck() -> None:
    values = moving(400, 2)
    values[:, 0] = 0.5
    assert not any(len(broken.stuck) for broken in looked(values))


def test_series_sampled_more_slowly_than_looked_at_is_not_stuck() -> None:
    values = np.repeat(moving(60, 1), 6, axis=0)
    assert not any(len(broken.stuck) for broken in looked(values))


def test_series_that_stops_is_absent_and_one_that_often_pauses_is_not() -> None:
    values = moving(400, 2)
    values[::2, 1] = np.nan
    values[380:] = np.nan
    found = looked(values)
    assert found[-1].absent.tolist() == [[0, 0]]


def test_counter_that_jumps_back_is_reset_and_a_gauge_that_falls_is_not() -> None:
    values = np.column_stack([np.cumsum(np.arange(100.0)), moving(100, 1)[:, 0] + 50])
    values[80:, 0] -= values[80, 0] - 3.0
    values[80:, 1] = 1.0
    found = looked(values)
    assert [tick for tick, broken in enumerate(found) if len(broken.reset)] == [80]
    assert found[80].reset.tolist() == [[0, 0]]


def test_every_row_is_looked_at_once_a_round() -> None:
    still = Stillness.of(10, 1)
    rows = [row for tick in range(LOOK_EVERY) for row in range(*still.due(tick).indices(10))]
    assert sorted(rows) == list(range(10))


def test_rows_kept_and_added_keep_what_is_known() -> None:
    still = Stillness.of(2, 1)
    still.step(np.array([[1.0], [2.0]], np.float32), RISK, slice(0, 2))
    grown = still.grown(3, 2)
    assert grown.last[:2, 0].tolist() == [1.0, 2.0]
    assert np.isnan(grown.last[2]).all()
    assert grown.kept(np.array([False, True, False])).last[:, 0].tolist() == [2.0]


def healthy_kinds(looks: int, each: int) -> np.ndarray:
    """Series that repeat themselves in health: by chance, in whole degrees of a slow drift, by moods, and with holes; looks × series."""
    rng = np.random.default_rng(8)
    coarse = rng.integers(0, 3, (looks, each)).astype(float)
    drift = np.zeros((looks, each))
    for look in range(1, looks):
        drift[look] = 0.97 * drift[look - 1] + rng.normal(0, 0.5, each)
    mood = np.cumsum(rng.random((looks, each)) < 0.02, axis=0) % 2
    moody = np.where(mood == 1, rng.normal(0, 1, (looks, each)), np.round(rng.normal(0, 0.4, (looks, each))))
    holes = np.where(rng.random((looks, each)) < 0.3, np.nan, rng.normal(0, 1, (looks, each)))
    return np.hstack([coarse, 40 + np.round(drift), moody + 5, holes])


def test_runs_of_healthy_series_are_no_commoner_than_the_risk_says() -> None:
    """The stated rate rests on the tail of the law of runs: at risks at which it can be counted it is held to, whatever kind of series."""
    looks, each, risk = 1500, 60, 1e-3
    values, still = healthy_kinds(looks, each).astype(np.float32), Stillness.of(4 * each, 1)
    found: set[tuple[int, int, str]] = set()
    for row in values:
        broken = still.step(row[:, None], risk, slice(0, 4 * each))
        for why, pairs, runs in (("stuck", broken.stuck, still.run), ("absent", broken.absent, still.away)):
            found |= {(int(series), int(still.looks[series, 0] - runs[series, 0]), why) for series, _ in pairs.tolist()}
    allowed = 4 * each * false_per_day(risk) * looks / (86_400 / LOOK_EVERY)
    assert len(found) <= allowed
    of_kind = [sum(series // each == kind for series, _, _ in found) / each / looks for kind in range(4)]
    assert max(of_kind) <= risk
    for _ in range(80):
        broken = still.step(values[-1][:, None], risk, slice(0, 4 * each))
    assert set(range(each)) <= {series for series, _ in broken.stuck.tolist()}, (
        "the same law finds what does stand still"
    )


def test_the_stated_rate_covers_a_node_of_two_thousand_series() -> None:
    assert 2000 * false_per_day(StaleSeriesDetector().settings.risk) <= StaleSeriesDetector.false_alarms_per_node_day


# --- single series --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [30, 144])
def test_period_is_found_in_noise(period: int) -> None:
    rng = np.random.default_rng(0)
    values = np.sin(np.arange(8 * period) * 2 * np.pi / period) + rng.normal(0, 0.3, 8 * period)
    assert season.find_period(values) % period in {0, 1, period - 1}


def test_noise_and_constants_have_no_period() -> None:
    assert season.find_period(np.random.default_rng(0).normal(size=500)) == 0
    assert season.find_period(np.ones(500)) == 0


def daily(days: int = 14) -> np.ndarray:
    rows = days * 96
    shape = np.clip(np.sin(np.arange(rows) * 2 * np.pi / 96), 0, None)
    return 50 + 30 * shape + np.random.default_rng(1).normal(0, 1, rows)


def test_day_without_its_peak_is_far_from_its_season_though_no_value_is_extreme() -> None:
    values = daily()
    values[960:1056] = 50.0
    far = season.seasonal_distance(values, 300)
    peak = slice(960 + 15 - 300, 960 + 33 - 300)
    assert far[peak].min() > 10
    assert np.median(far[:600]) < 2


def test_new_shape_is_far_from_past_windows() -> None:
    values = daily()
    values[1000:1040] += np.tile([15.0, -15.0], 20)
    far = subsequence.window_distance(values, 300, 24)
    assert far[705:735].min() > 2 * np.quantile(far[:690], 0.99)


@pytest.mark.parametrize("score", [single.region_scores, single.event_scores])
def test_scores_use_no_later_rows(score: object) -> None:
    assert callable(score)
    values = daily(8)
    whole = score(values, 200)
    for cut in (355, 600):
        np.testing.assert_allclose(score(values[:cut], 200), whole[: cut - 200], rtol=1e-9, atol=1e-12)
    assert np.isfinite(whole).all()


def test_event_is_reported_once_and_early() -> None:
    values = daily()
    values[1100:1130] += 60.0
    scores = single.event_scores(values, 300)
    top = int(np.argmax(scores))
    assert 800 <= top < 815
    assert (scores[820:900] == 0).mean() > 0.9


def test_too_short_a_history_is_refused() -> None:
    with pytest.raises(ValueError, match="rows of history"):
        single.region_scores(np.arange(50.0), 5)


def test_what_a_process_holds_may_stand_after_it_grew() -> None:
    """The memory of a rank moves while caches fill, and then stands for hours."""
    at_rest, rng = SyntheticCluster(seed=4).frames(240), np.random.default_rng(1)
    frames = []
    for second, frame in enumerate(frame for frame in at_rest if frame.ticks):
        tick = frame.ticks[0]
        process = tick.families["process"]
        grown = 4e8 + (rng.normal(0, 1e6, len(process.entities)) if second < 120 else 0.0) + 0.0 * process.values[:, 0]
        wider = replace(
            process,
            metrics=(*process.metrics, "rss_bytes"),
            values=np.hstack([process.values, grown[:, None].astype(np.float32)]),
        )
        frames.append(replace(frame, ticks=(replace(tick, families={"process": wider}),), steps=()))
    assert run(StaleSeriesDetector(), frames) == []
