"""Work that is divided unequally is told from nodes that are slow, and from noise."""

from __future__ import annotations

import numpy as np

from detectors.steps.imbalance import ImbalanceDetector
from tests.detectors.steps.jobs import JOB, Floats, frames, local_times, run, spoken, topology_of
from trainwarden.records import EntityKind, Verdict

TWO_STAGES = {"dp": "4", "pp": "2"}


def said(local: Floats, attributes: dict[str, str] | None = None) -> list[Verdict]:
    return run(ImbalanceDetector(), frames(local, topology_of(local.shape[1], attributes)))


def unequal_batches(steps: int, replicas: int, stages: int) -> Floats:
    """One batch in each step costs much more, on every stage that it goes through."""
    rng = np.random.default_rng(1)
    cost = np.ones((steps, replicas))
    cost[np.arange(steps), rng.integers(0, replicas, steps)] = 1.5
    return local_times(steps, replicas * stages, step_ms=1000.0) * np.tile(cost, stages)


def test_a_stage_whose_members_are_slow_alike_has_too_much_work() -> None:
    local = local_times(80, 8)
    local[:, 4:] *= 1.5
    verdicts = said(local, TWO_STAGES)
    assert spoken(verdicts) == [("imbalance", JOB)]
    assert verdicts[0].entity.kind is EntityKind.JOB
    assert "stage 1" in verdicts[0].text


def test_one_slow_member_is_not_the_stage() -> None:
    local = local_times(80, 4)
    local[:, 2] *= 1.8
    assert said(local, {"dp": "2", "pp": "2"}) == []


def test_a_stage_on_one_node_may_be_that_node() -> None:
    local = local_times(80, 4)
    local[:, 2:] *= 1.5
    topology = topology_of(4, {"tp": "2", "pp": "2"}, per_node=2)
    assert run(ImbalanceDetector(), frames(local, topology)) == []


def test_batches_that_cost_unequally_much_agree_between_stages() -> None:
    verdicts = said(unequal_batches(60, 8, 2), {"dp": "8", "pp": "2"})
    assert spoken(verdicts) == [("imbalance", JOB)]
    assert "batches" in verdicts[0].text


def test_batches_are_known_by_their_samples_too() -> None:
    local = unequal_batches(60, 8, 1)
    work = np.where(local > 1250.0, 96, 64)
    found = frames(local, topology_of(8), lambda step, rank: {"samples": int(work[step, rank])})
    assert spoken(run(ImbalanceDetector(), found)) == [("imbalance", JOB)]


def test_a_noisy_machine_has_no_witness() -> None:
    assert said(unequal_batches(60, 8, 1)) == []
    rng = np.random.default_rng(2)
    noisy = local_times(60, 16) * (1.0 + 0.5 * (rng.random((60, 16)) < 0.1))
    assert said(noisy, {"dp": "8", "pp": "2"}) == []


def test_divided_anew_it_is_taken_back() -> None:
    local = local_times(240, 8)
    local[:100, 4:] *= 1.5
    assert said(local, TWO_STAGES)[-1].clears
