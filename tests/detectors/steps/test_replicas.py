"""Replicas that should be equal: checksums within their group, sizes of gradients against the peers'."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.steps.corruption import CorruptionDetector
from detectors.steps.gradients import GradientSizes
from tests.detectors.steps.jobs import Extra, frames, local_times, run, spoken, topology_of

STEPS, RANKS = 240, 8
TWO_STAGES = {"dp": "4", "pp": "2"}


def said(extra: Extra, attributes: dict[str, str] | None = None) -> list[tuple[str, str]]:
    local = local_times(STEPS, RANKS, step_ms=100.0)
    return spoken(run(CorruptionDetector(), frames(local, topology_of(RANKS, attributes), extra)))


def norms(odd: dict[tuple[int, int], float]) -> Extra:
    rng = np.random.default_rng(0)
    usual = 0.5 * np.exp(0.3 * rng.normal(size=(STEPS, RANKS)))
    return lambda step, rank: {"grad_norm_local": float(usual[step, rank] * odd.get((step, rank), 1.0))}


def test_gradients_of_one_rank_that_stay_out_of_proportion_are_corrupt() -> None:
    odd = {(step, 3): 40.0 for step in range(150, STEPS)}
    assert said(norms(odd)) == [("silent_corruption", "n3")]


def test_gradients_that_vanish_are_as_odd() -> None:
    odd = {(step, 3): 1e-4 for step in range(150, STEPS)}
    assert said(norms(odd)) == [("silent_corruption", "n3")]


def test_one_wild_batch_is_none() -> None:
    assert said(norms({(160, 3): 40.0, (170, 5): 100.0, (171, 5): 30.0})) == []


def test_a_rank_with_other_data_is_odd_by_nature() -> None:
    assert said(norms({(step, 3): 40.0 for step in range(STEPS)})) == []


def test_all_gradients_that_grow_are_the_jobs_affair() -> None:
    assert said(norms({(step, rank): 40.0 for step in range(150, STEPS) for rank in range(RANKS)})) == []


def sums(odd: int = -1, stage_of: int = 4) -> Extra:
    def extra(step: int, rank: int) -> dict[str, float]:
        return (
            {"param_checksum": 1.0 + rank // stage_of + (0.5 if rank == odd and step >= 100 else 0.0)}
            if step % 5 == 0
            else {}
        )

    return extra


@pytest.mark.parametrize("odd", [1, 6])
def test_stages_hold_different_parameters_and_replicas_equal_ones(odd: int) -> None:
    assert said(sums(odd), TWO_STAGES) == [("silent_corruption", f"n{odd}")]
    assert said(sums(), TWO_STAGES) == []


def test_without_a_layout_sharded_parameters_say_nothing() -> None:
    assert said(sums(1)) == []


def test_sizes_need_three_peers() -> None:
    sizes = GradientSizes()
    for _ in range(300):
        sizes.take(np.array([1.0, 9.0]), [np.arange(2)], 8.0, 12.0, 100)
    assert sizes.odd_since(1) == []


def pair(odd_norm: float) -> list[str]:
    """What is said of two replicas of which rank 1 differs from step 100 on; its gradients grow as much as told."""
    rng = np.random.default_rng(0)
    usual = 0.5 * np.exp(0.1 * rng.normal(size=(STEPS, 2)))
    tell = sums(odd=1)

    def extra(step: int, rank: int) -> dict[str, float]:
        norm = usual[step, rank] * (odd_norm if rank == 1 and step >= 100 else 1.0)
        return {**tell(step, rank), "grad_norm_local": float(norm)}

    local = local_times(STEPS, 2, step_ms=100.0)
    verdicts = run(CorruptionDetector(), frames(local, topology_of(2), extra))
    assert [verdict.kind for verdict in verdicts] == ["silent_corruption"]
    return [verdicts[0].entity.name, verdicts[0].text]


def test_of_two_replicas_the_one_whose_gradients_left_their_size_is_the_likelier() -> None:
    name, text = pair(30.0)
    assert name == "n1"
    assert "rank 0 on n0 and rank 1 on n1 differ" in text
    assert "rank 1 have left their usual size" in text


def test_of_two_replicas_that_differ_otherwise_neither_is_blamed_and_both_are_named() -> None:
    name, text = pair(1.0)
    assert name not in ("n0", "n1")
    assert text.endswith("two replicas cannot say which is wrong")
