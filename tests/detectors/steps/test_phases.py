"""A phase that is steadily longer on one rank is found though the noise of the other phases hides it in the sum."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.steps.phases import PhaseWatch
from detectors.steps.straggler import StragglerDetector
from tests.detectors.steps.jobs import Floats, frames, run, spoken, topology_of
from trainwarden.clock import NS_PER_S
from trainwarden.records import Verdict

STEPS, FROM, RANKS = 900, 500, 4


def noisy_job(more_ms: float, on: tuple[int, ...] = (2,), moved: bool = False, seed: int = 1) -> tuple[Floats, Floats]:
    """Local times in which a steady forward pass of 35 ms lies beside 60 ms that vary by 30, and the forward passes alone."""
    rng = np.random.default_rng(seed)
    forward = rng.normal(35.0, 1.5, (STEPS, RANKS))
    rest = np.maximum(rng.normal(60.0, 30.0, (STEPS, RANKS)), 5.0)
    forward[FROM:, on] += more_ms
    rest[FROM:, on] -= more_ms * moved
    return np.asarray(forward + rest), np.asarray(forward)


def said(local: Floats, forward: Floats | None) -> list[Verdict]:
    def phases(step: int, rank: int) -> dict[str, float | int | str]:
        return {} if forward is None else {"forward_ms": float(forward[step, rank]), "backward_ms": 20.0}

    return run(StragglerDetector(), frames(local, topology_of(RANKS), phases))


@pytest.mark.parametrize("seed", range(3))
def test_a_steady_phase_that_gets_longer_is_named_soon(seed: int) -> None:
    verdicts = said(*noisy_job(14.0, seed=seed))
    assert spoken(verdicts) == [("compute_slow", "n2")]
    first = verdicts[0]
    assert "forward" in first.text
    assert first.window_end_ns - first.onset_at_ns < 10 * NS_PER_S


def test_the_sum_alone_does_not_show_it_as_soon() -> None:
    local, forward = noisy_job(14.0)
    by_sum, by_phase = said(local, None), said(local, forward)
    assert not by_sum or by_sum[0].window_end_ns > by_phase[0].window_end_ns + 5 * NS_PER_S


@pytest.mark.parametrize("seed", range(3))
def test_noise_blames_nobody(seed: int) -> None:
    assert spoken(said(*noisy_job(0.0, seed=seed))) == []


def test_time_that_only_moved_from_one_phase_to_another_costs_nothing() -> None:
    assert spoken(said(*noisy_job(14.0, moved=True))) == []


def test_a_phase_that_is_longer_on_most_ranks_has_a_cause_they_share() -> None:
    assert spoken(said(*noisy_job(14.0, on=(0, 1, 2)))) == []


def test_what_lasts_for_three_seconds_is_a_hiccup() -> None:
    local, forward = noisy_job(0.0)
    local[FROM : FROM + 18, 2] += 14.0
    forward[FROM : FROM + 18, 2] += 14.0
    assert spoken(said(local, forward)) == []


def test_usual_places_go_with_their_ranks() -> None:
    watch = PhaseWatch(3, np.arange(6.0).reshape(3, 2), np.ones((3, 2)))
    moved = watch.resized([1, -1, 0])
    assert moved.excess.tolist() == [[1.0, 0.0, 0.0], [3.0, 0.0, 2.0], [5.0, 0.0, 4.0]]
    assert moved.scale.tolist() == [[1.0, 1.0, 1.0]] * 3
    assert moved.score.shape == moved.run_blocks.shape == (3, 3)
