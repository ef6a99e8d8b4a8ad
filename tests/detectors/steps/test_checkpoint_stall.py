"""Saves that take too long, and those that are only long."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from detectors.steps.checkpoint_stall import CheckpointStallDetector
from tests.detectors.steps.jobs import JOB, frames, local_times, run, spoken, topology_of
from trainwarden.records import EntityKind, Verdict

STEPS, RANKS, EVERY = 600, 4, 20
Took = Callable[[int, int], float]


def said(took_ms: Took) -> list[Verdict]:
    """`took_ms(number of the save, rank)`."""
    local = local_times(STEPS, RANKS, step_ms=200.0)
    for step in range(0, STEPS, EVERY):
        local[step] += [took_ms(step // EVERY, rank) for rank in range(RANKS)]

    def extra(step: int, rank: int) -> dict[str, float]:
        return {"checkpoint_ms": took_ms(step // EVERY, rank)} if step % EVERY == 0 else {}

    return run(CheckpointStallDetector(), frames(local, topology_of(RANKS), extra))


def usual(number: int, rank: int) -> float:
    return 1500.0 * float(np.exp(0.1 * np.random.default_rng([number, rank]).normal()))


def test_two_slow_saves_in_a_row_are_said_of_the_job_and_taken_back() -> None:
    verdicts = said(lambda number, rank: usual(number, rank) * (5.0 if 12 <= number < 16 else 1.0))
    assert spoken(verdicts) == [("checkpoint_stall", JOB)]
    assert verdicts[0].entity.kind is EntityKind.JOB
    assert verdicts[-1].clears


def test_a_rank_that_saves_slowly_alone_is_named() -> None:
    verdicts = said(lambda number, rank: usual(number, rank) * (6.0 if number >= 12 and rank == 2 else 1.0))
    assert spoken(verdicts) == [("checkpoint_stall", "n2")]
    assert verdicts[0].rank == 2


@pytest.mark.parametrize(("factor", "expected"), [(5.0, []), (20.0, [("checkpoint_stall", JOB)])])
def test_one_slow_save_is_a_hiccup_unless_it_is_extreme(factor: float, expected: list[tuple[str, str]]) -> None:
    assert spoken(said(lambda number, rank: usual(number, rank) * (factor if number == 12 else 1.0))) == expected


def test_saves_of_milliseconds_may_take_ten_times_as_long() -> None:
    assert said(lambda number, rank: 20.0 * (10.0 if number >= 12 else 1.0)) == []


def test_saves_that_vary_much_are_left_alone() -> None:
    assert said(lambda number, rank: usual(number, 0) * float(np.exp(np.random.default_rng(number).normal()))) == []


def test_only_one_rank_writes() -> None:
    verdicts = said(lambda number, rank: (usual(number, 0) * (6.0 if number >= 12 else 1.0)) if rank == 0 else 0.0)
    assert spoken(verdicts) == [("checkpoint_stall", JOB)]
