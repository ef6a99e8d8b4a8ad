"""Jumps of loss and gradient norm, and the many movements that are none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from detectors.steps.loss_spike import LossSpikeDetector
from tests.detectors.steps.jobs import JOB, Extra, frames, local_times, run, spoken, topology_of
from trainwarden.records import Verdict

STEPS, RANKS = 700, 4
Course = Callable[[int], float]


def extra(
    loss: Course, norm: Course = lambda step: 0.5, noise: float = 0.03, lone: dict[int, float] | None = None
) -> Extra:
    rng = np.random.default_rng(3)
    wild = np.exp(noise * rng.normal(size=(STEPS, RANKS, 2)))

    def row(step: int, rank: int) -> dict[str, float]:
        own = (lone or {}).get(rank, 1.0) if step >= 400 else 1.0
        return {
            "loss": float(loss(step) * wild[step, rank, 0] * own),
            "grad_norm": float(norm(step) * wild[step, 0, 1]),
        }

    return row


def said(given: Extra) -> list[Verdict]:
    return run(LossSpikeDetector(), frames(local_times(STEPS, RANKS, step_ms=80.0), topology_of(RANKS), given))


def falling(step: int) -> float:
    return 2.0 + 8.0 * float(np.exp(-step / 60))


def test_a_loss_that_doubles_is_said_within_a_few_steps_and_taken_back() -> None:
    verdicts = said(extra(lambda step: falling(step) * (2.0 if 400 <= step < 450 else 1.0)))
    assert spoken(verdicts) == [("loss_spike", JOB)]
    assert "from 2" in verdicts[0].text
    assert verdicts[-1].clears


def test_a_gradient_norm_five_times_its_size_is_said() -> None:
    verdicts = said(extra(falling, lambda step: 2.5 if step >= 400 else 0.5))
    assert spoken(verdicts) == [("loss_spike", JOB)]
    assert "gradient norm" in verdicts[0].text


def test_a_young_loss_and_a_noisy_loss_are_no_spikes() -> None:
    assert said(extra(falling, noise=0.2)) == []
    assert said(extra(lambda step: 2.0 * (3.0 if 50 <= step < 80 else 1.0))) == []


def test_single_wild_steps_are_none() -> None:
    assert said(extra(lambda step: falling(step) * (4.0 if step % 100 < 2 else 1.0))) == []


def test_one_rank_alone_is_not_all_replicas() -> None:
    assert said(extra(falling, lone={2: 5.0})) == []


def test_a_slow_rise_and_fall_is_the_course_of_the_loss() -> None:
    assert said(extra(lambda step: 2.0 + 0.2 * float(np.sin(step / 80)))) == []


def test_a_loss_that_is_not_a_number_is_another_detectors_affair() -> None:
    assert said(extra(lambda step: float("nan") if step >= 400 else falling(step))) == []
