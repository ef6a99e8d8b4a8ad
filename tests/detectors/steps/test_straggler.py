"""Who computes too long, and the many cases in which nobody does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.steps.peers import excess_over_peers
from detectors.steps.straggler import StragglerDetector
from detectors.synthetic import Scene, SyntheticCluster
from trainwarden.clock import NS_PER_S
from trainwarden.records import Verdict

Script = Callable[[int], Scene | None]


def said(script: Script, seconds: int = 60, nodes: int = 4, seed: int = 3) -> list[Verdict]:
    detector = StragglerDetector()
    return [v for frame in SyntheticCluster(nodes, seed).frames(seconds, script) for v in detector.update(frame)]


def spoken(verdicts: list[Verdict]) -> list[tuple[str, str]]:
    return sorted({(v.kind, v.entity.name) for v in verdicts if not v.clears})


@pytest.mark.parametrize("guilty", [0, 3])
@pytest.mark.parametrize("nodes", [2, 4, 9])
def test_slow_rank_is_named_whatever_the_size(guilty: int, nodes: int) -> None:
    guilty = min(guilty, nodes - 1)
    verdicts = said(lambda now: Scene(compute_ms={guilty: 30.0}) if now >= 30 else None, 45, nodes)
    assert spoken(verdicts) == [("compute_slow", f"n{guilty}")]
    assert verdicts[0].window_end_ns - verdicts[0].onset_at_ns < 12 * NS_PER_S


def test_time_lost_in_the_loader_is_told_from_time_lost_in_computing() -> None:
    assert spoken(said(lambda now: Scene(data_ms={1: 40.0}) if now >= 30 else None, 45)) == [("data_slow", "n1")]


def test_onset_is_estimated_to_two_seconds() -> None:
    verdicts = said(lambda now: Scene(compute_ms={2: 40.0}) if now >= 30 else None, 45)
    clean = said(lambda now: None, 31)
    assert not clean
    start = 1_700_000_030
    assert abs(verdicts[0].onset_at_ns / NS_PER_S - start) <= 2


def test_ranks_unequal_by_design_are_left_alone() -> None:
    assert spoken(said(lambda now: Scene(compute_ms={2: 30.0}), 120)) == []


def test_hiccup_of_three_seconds_is_none() -> None:
    assert spoken(said(lambda now: Scene(compute_ms={2: 200.0}) if 30 <= now < 33 else None, 60)) == []


def test_slow_network_blames_no_rank() -> None:
    assert spoken(said(lambda now: Scene(network_ms=400.0) if now >= 30 else None, 90)) == [("job_slow", "synthetic")]


def test_everybody_waiting_for_input_is_the_storage() -> None:
    everybody = Scene(data_ms={rank: 40.0 for rank in range(4)})
    assert spoken(said(lambda now: everybody if now >= 30 else None, 90)) == [("data_slow", "synthetic")]


def test_everybody_slow_alike_blames_no_rank() -> None:
    everybody = Scene(compute_ms={rank: 30.0 for rank in range(4)})
    assert spoken(said(lambda now: everybody if now >= 30 else None, 90)) == []


def test_bursts_that_medians_do_not_see_are_found() -> None:
    script: Script = lambda now: Scene(data_ms={3: 150.0}) if now >= 30 and now % 4 == 0 else None  # noqa: E731
    verdicts = said(script, 60)
    assert spoken(verdicts) == [("data_slow", "n3")]
    assert verdicts[0].window_end_ns < (1_700_000_030 + 16) * NS_PER_S


def test_recovered_rank_is_taken_back() -> None:
    verdicts = said(lambda now: Scene(compute_ms={2: 40.0}) if 30 <= now < 50 else None, 70)
    assert verdicts[-1].clears
    assert verdicts[-1].entity.name == "n2"


def test_lasting_fault_is_said_again_now_and_then() -> None:
    verdicts = said(lambda now: Scene(compute_ms={2: 40.0}) if now >= 30 else None, 90)
    assert 3 <= len(verdicts) <= 8
    assert len({v.verdict_id for v in verdicts}) == len(verdicts)


def test_usual_place_survives_a_restart_on_other_ranks() -> None:
    def script(now: int) -> Scene:
        if now < 40:
            return Scene()
        return Scene(members=(3, 0, 2), attempt=1, compute_ms={2: 30.0})

    verdicts = said(script, 60)
    assert spoken(verdicts) == [("compute_slow", "n2")]
    assert verdicts[0].rank == 2
    assert verdicts[0].attempt == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 7), st.integers(1, 5), st.integers(0, 10_000))
def test_excess_is_the_distance_to_the_median_of_the_others(ranks: int, steps: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 9, (steps, ranks)).astype(float)
    expected = np.stack([values[:, i] - np.median(np.delete(values, i, axis=1), axis=1) for i in range(ranks)], axis=1)
    np.testing.assert_allclose(excess_over_peers(values), expected)
