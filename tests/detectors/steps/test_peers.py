"""Who is compared with whom: stages, work, ranks that were never healthy, causes that several share."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.steps.peers import excess_in_groups, peer_groups
from detectors.steps.straggler import StragglerDetector
from tests.detectors.steps.jobs import JOB, frames, local_times, run, spoken, topology_of
from trainwarden.topology import JobLayout

TWO_STAGES = {"dp": "4", "pp": "2"}


def straggler(local: np.ndarray, attributes: dict[str, str] | None = None, **rest: int) -> list[tuple[str, str]]:  # type: ignore[type-arg]
    return spoken(run(StragglerDetector(), frames(local, topology_of(local.shape[1], attributes), **rest)))  # type: ignore[arg-type]


def test_excess_is_counted_within_groups_only() -> None:
    values = np.array([[1.0, 2.0, 4.0, 10.0, 11.0, 13.0]])
    groups = [np.array([0, 1, 2]), np.array([3, 4, 5])]
    np.testing.assert_allclose(excess_in_groups(values, groups), [[-2.0, -0.5, 2.5, -2.0, -0.5, 2.5]])


def test_missing_ranks_do_not_disturb_the_others() -> None:
    values = np.array([[1.0, np.nan, 4.0, 10.0]])
    np.testing.assert_allclose(excess_in_groups(values, [np.arange(4)]), [[-6.0, np.nan, -1.5, 7.5]])


def layout(ranks: int, attributes: dict[str, str], per_node: int) -> JobLayout:
    found = topology_of(ranks, attributes, per_node).job(JOB)
    assert found is not None
    return found


def test_peers_on_one_node_are_no_measure_of_that_node() -> None:
    nodes = [f"n{rank // 2}" for rank in range(4)]
    groups, same_work = peer_groups(layout(4, {"tp": "2", "pp": "2"}, 2), nodes)
    assert [members.tolist() for members in groups] == [[0, 1, 2, 3]]
    assert not same_work


def test_stages_are_groups_when_the_layout_is_known() -> None:
    groups, same_work = peer_groups(layout(8, TWO_STAGES, 1), [f"n{rank}" for rank in range(8)])
    assert [members.tolist() for members in groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert same_work


def test_a_rank_slow_from_the_first_step_stands_apart_from_its_peers() -> None:
    local = local_times(80, 8)
    local[:, 2] *= 1.6
    assert straggler(local, TWO_STAGES) == [("compute_slow", "n2")]


def test_and_is_found_when_steps_take_most_of_a_minute() -> None:
    local = local_times(30, 8, step_ms=40_000.0)
    local[:, 2] *= 1.6
    assert straggler(local, TWO_STAGES) == [("compute_slow", "n2")]


def test_nobody_knows_whether_ranks_of_an_unknown_layout_do_the_same_work() -> None:
    local = local_times(80, 8)
    local[:, 2] *= 1.6
    assert straggler(local) == []


def test_stable_unequal_workers_are_no_stragglers() -> None:
    local = local_times(120, 10) * np.array([0.7, 0.68, 0.75, 0.86, 0.85, 0.91, 0.84, 0.85, 0.84, 1.0])
    assert straggler(local, {"dp": "10"}) == []


def test_a_heavy_stage_is_nobodys_fault() -> None:
    local = local_times(80, 8)
    local[:, 4:] *= 1.6
    assert straggler(local, TWO_STAGES) == []


def test_a_rank_that_still_waits_for_a_heavier_stage_costs_nothing() -> None:
    local = local_times(120, 8)
    local[:, 4:] *= 1.6
    local[60:, 1] *= 1.25
    assert straggler(local, TWO_STAGES) == []


@pytest.mark.parametrize("attributes", [None, {"dp": "8"}])
def test_several_nodes_that_become_slow_together_have_a_shared_cause(attributes: dict[str, str] | None) -> None:
    local = local_times(120, 8)
    local[60:, :3] *= 1.5
    assert straggler(local, attributes) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_job_that_becomes_restless_has_no_culprit(seed: int) -> None:
    """Calm first, then one step in two hits somebody hard, by lot: some rank is always ahead of its usual place for a while."""
    random = np.random.default_rng(seed)
    local = local_times(900, 10)
    late = random.lognormal(0.0, 1.2, (600, 10)) * (random.random((600, 1)) < 0.5)
    local[300:] *= 1.0 + late
    assert [said for said in straggler(local) if said != ("job_slow", JOB)] == []


def test_two_that_become_slow_one_after_the_other_are_both_named_the_lesser_one_too() -> None:
    """The greater is the slowest in every step: once it is suspected it stands in nobody's light."""
    local = local_times(200, 8)
    local[60:, 1] *= 2.0
    local[90:, 5] *= 1.4
    assert straggler(local) == [("compute_slow", "n1"), ("compute_slow", "n5")]


def test_more_work_excuses() -> None:
    local = local_times(120, 4)
    local[60:, 2] *= 1.5
    heavier = {"samples": 96}
    found = frames(local, topology_of(4), lambda step, rank: heavier if rank == 2 and step >= 60 else {"samples": 64})
    assert spoken(run(StragglerDetector(), found)) == []


def test_less_work_does_not_accuse() -> None:
    local = local_times(120, 4)
    local[60:, 2] *= 0.8
    lighter = {"samples": 32}
    found = frames(local, topology_of(4), lambda step, rank: lighter if rank == 2 and step >= 60 else {"samples": 64})
    assert spoken(run(StragglerDetector(), found)) == []


def test_a_layout_that_becomes_known_later_begins_a_new_comparison() -> None:
    local = local_times(160, 8)
    local[:, 2] *= 1.6
    unknown, known = topology_of(8), topology_of(8, TWO_STAGES)
    given = list(frames(local, unknown))
    later = list(frames(local, known))
    half = len(given) // 2
    assert spoken(run(StragglerDetector(), iter([*given[:half], *later[half:]]))) == [("compute_slow", "n2")]
