"""Job-wide seasons and drifts, and the budget of their fits."""

from __future__ import annotations

import pytest

from detectors.base import Frame
from detectors.series.refit import RefitQueue
from detectors.series.scenes import JOB, Fleet, warmed, warmer
from detectors.series.slow import SeasonalBand, SlowSettings
from trainwarden.errors import ConfigError
from trainwarden.records import Entity, EntityKind, Verdict


def said(frames: list[Frame], detector: SeasonalBand) -> list[Verdict]:
    return [verdict for frame in frames for verdict in detector.update(frame)]


def test_what_all_nodes_do_is_said_of_the_job_and_accepted_when_it_lasts() -> None:
    found = said(warmed(nodes=4, minutes=660, since=480, by_c=12.0), SeasonalBand())
    heat = [v for v in found if "module_temp_c" in v.text]
    assert [v.clears for v in heat] == [False, True]
    assert heat[0].entity == Entity(EntityKind.JOB, JOB)
    assert heat[0].window_end_ns - heat[0].onset_at_ns <= 15 * 60 * 10**9


def test_days_and_nights_are_no_news() -> None:
    frames = list(Fleet(4, 1, 9, nuisance=0.0).frames(16 * 60))
    found = [v for v in said(frames, SeasonalBand()) if not v.clears]
    assert len(found) <= SeasonalBand.false_alarms_per_node_day * 4 * 16 / 24
    assert all("disk_used_ratio" in v.text for v in found), "only a disk swept once in sixteen hours may surprise"


def test_what_follows_a_step_is_held_against_the_level_after_it() -> None:
    """A band for which the step was a trend and noise is four times as wide, and has nothing to say of the second one."""
    frames = warmed(nodes=4, minutes=540, since=100, by_c=6.0)
    hotter = [warmer(frame, 5.0) if minute >= 480 else frame for minute, frame in enumerate(frames)]
    assert not [v for v in said(frames, SeasonalBand()) if "module_temp_c" in v.text]
    (found,) = [v for v in said(hotter, SeasonalBand()) if "module_temp_c" in v.text]
    assert found.window_end_ns == hotter[495].ticks[-1].at_ns


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of poly, stl, structural"):
        SeasonalBand(SlowSettings(model="prophet"))


def test_the_queue_serves_the_oldest_and_keeps_to_its_budget() -> None:
    queue = RefitQueue()
    for name in "abcdef":
        queue.ask(name, 30.0)
    ticks = [queue.take(10.0) for _ in range(30)]
    assert [name for tick in ticks for name in tick] == list("abcdef")
    assert max(len(tick) for tick in ticks) == 1
    for spent in range(1, 30):
        assert 30.0 * sum(len(tick) for tick in ticks[:spent]) <= 10.0 * spent


def test_a_dear_fit_waits_until_enough_is_saved() -> None:
    queue = RefitQueue()
    queue.ask("dear", 95.0)
    assert [queue.take(10.0) for _ in range(10)][-1] == ["dear"]
    assert queue.saved == 0.0
