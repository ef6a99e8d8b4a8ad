"""Barriers: who waits for whom when one rank is slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from collectors.simulated import schedule
from collectors.simulated.steps import Outcome, Work, run


def work(stages: int = 1, replicas: int = 4, places: int = 1, micro: int = 4, ep: int = 1) -> Work:
    group, rank = np.zeros((stages, replicas)), np.zeros((stages, replicas, places))
    return Work(np.full((stages, replicas, micro), 0.1), rank + 1.0, rank, rank, group, group,
                np.ones((stages, replicas, micro)), np.full((stages, places), 0.05), 0.01, ep)  # fmt: skip


def slowed(base: Work, stage: int, replica: int, place: int, factor: float) -> Outcome:
    slow = base.slow.copy()
    slow[stage, replica, place] = factor
    return run(replace(base, slow=slow))


def test_all_alike_means_nobody_waits_longer_than_the_reduction() -> None:
    outcome = run(work())
    assert outcome.wait == pytest.approx(0.05)
    assert outcome.finish == pytest.approx(4 * 0.3 + 0.05 + 0.01)


def test_a_slow_replica_waits_least_and_the_others_wait_for_it() -> None:
    usual, outcome = run(work()), slowed(work(), 0, 2, 0, 1.5)
    others = [0, 1, 3]
    assert outcome.wait[0, 2, 0] == pytest.approx(0.05)
    assert outcome.wait[0, others, 0] == pytest.approx(0.05 + 4 * 0.3 * 0.5)
    assert outcome.own[0, others] == pytest.approx(usual.own[0, others]), "the others compute as before"
    assert outcome.finish - usual.finish == pytest.approx(4 * 0.3 * 0.5)


def test_tensor_peers_are_held_in_every_micro_batch() -> None:
    outcome = slowed(work(replicas=2, places=8), 0, 0, 3, 2.0)
    inside = outcome.forward + outcome.backward
    assert inside[0, 0] == pytest.approx(np.full(8, inside[0, 0, 3])), "the whole tensor group looks slow from outside"
    assert outcome.own[0, 0, 3] == pytest.approx(2 * outcome.own[0, 0, 0]), "only one of them computes longer"
    assert inside[0, 1] == pytest.approx(np.full(8, 4 * 0.3)), "the other replica does not"


def test_a_slow_stage_holds_its_pipeline_and_then_the_other_replicas() -> None:
    base = work(stages=4, replicas=2, micro=8)
    usual, outcome = run(base), slowed(base, 1, 0, 0, 1.5)
    assert np.all(outcome.arrived[:, 0] > usual.arrived[:, 0] + 0.5), "all stages of its replica hand over late"
    assert outcome.arrived[:, 1] == pytest.approx(usual.arrived[:, 1])
    assert np.all(outcome.wait[:, 1] > outcome.wait[:, 0] + 0.5)
    assert outcome.own[[0, 2, 3]] == pytest.approx(usual.own[[0, 2, 3]])


def test_expert_groups_wait_for_their_slowest_member_only() -> None:
    base = work(replicas=8, ep=4)
    experts = np.ones((1, 8, 4))
    experts[0, 1, 2] = 3.0
    outcome = run(replace(base, experts=experts))
    assert outcome.forward[0, :4] == pytest.approx(0.4 + 0.2)
    assert outcome.forward[0, 4:] == pytest.approx(0.4)


def test_a_slow_network_moves_no_local_time_and_no_arrival() -> None:
    usual, outcome = run(work()), run(replace(work(), reduce_s=np.full((1, 1), 0.5)))
    assert outcome.arrived == pytest.approx(usual.arrived)
    assert outcome.own == pytest.approx(usual.own)
    assert outcome.wait == pytest.approx(usual.wait + 0.45)


def test_a_pause_strikes_once_not_in_the_backward_pass_too() -> None:
    pause = np.zeros((1, 4, 1))
    pause[0, 1, 0] = 0.7
    assert run(replace(work(), pause_s=pause)).finish - run(work()).finish == pytest.approx(0.7)


@pytest.mark.parametrize(("stages", "micro"), [(2, 2), (4, 8), (8, 16), (4, 2)])
def test_a_pipeline_takes_as_long_as_the_textbook_says(stages: int, micro: int) -> None:
    ended = schedule.run(
        np.zeros((stages, 1)), np.full((stages, 1, micro), 1.0), np.full((stages, 1, micro), 2.0), np.zeros((stages, 1))
    )
    assert ended.max() == pytest.approx(3.0 * (micro + stages - 1))
    assert len(schedule.order(stages, micro)) == 2 * stages * micro
