"""Parallel layouts: Megatron's numbering, explicit coordinates, and what to do with nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.parallel import AXES, parallel_layout
from trainwarden.records import TopologyEvent
from trainwarden.topology import JobLayout, Topology


def event(attributes: dict[str, str], world: int, attempt: int = 0, at: int = 1) -> TopologyEvent:
    ranks = tuple((rank, f"n{rank // 2}", f"gpu{rank % 2}") for rank in range(world))
    return TopologyEvent(entity="job:j", origin="scheduler", valid_from_ns=at, attempt=attempt, ranks=ranks,
                         attributes=attributes)  # fmt: skip


def layout_of(attributes: dict[str, str], world: int) -> JobLayout:
    topology = Topology()
    topology.apply(event(attributes, world))
    layout = topology.job("j")
    assert layout is not None
    return layout


def test_megatron_numbers_tensor_first_and_stages_last() -> None:
    layout = layout_of({"tp": "2", "dp": "3", "pp": "2"}, 12)
    assert [layout.stage_of(rank) for rank in range(12)] == [0] * 6 + [1] * 6
    assert layout.peers_of(7) == (6, 7, 8, 9, 10, 11)


def test_another_order_is_followed() -> None:
    layout = layout_of({"dp": "2", "pp": "2", "order": "pp-dp"}, 4)
    assert [layout.stage_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert layout.peers_of(3) == (1, 3)


def test_explicit_coordinates_win() -> None:
    layout = layout_of({"coordinates": "dp pp;0 1;0 0;1 1;1 0", "dp": "4"}, 4)
    assert layout.peers_of(0) == (0, 2)
    assert layout.stage_of(2) == 1


def test_experts_that_divide_the_data_axis_are_peers_of_their_like() -> None:
    layout = layout_of({"dp": "4", "ep": "2"}, 4)
    assert layout.peers_of(1) == (1, 3)


def test_replicas_hold_the_same_shard() -> None:
    parallel = parallel_layout({"tp": "2", "dp": "2"}, 4)
    assert parallel is not None
    assert parallel.replica_groups() == (0, 1, 0, 1)
    assert parallel.peer_groups() == (0, 0, 0, 0)


@pytest.mark.parametrize("attributes", [{}, {"tp": "3"}, {"tp": "two"}, {"coordinates": "dp;0;1"}, {"dp": "4", "order": "tp-tp"},
                                        {"dp": "4", "order": "tp-pp"}, {"coordinates": "dp;0;1;x;3"},
                                        {"tp": "²"}, {"dp": "4", "ep": "9" * 5000}, {"dp": "4", "ep": "9" * 400},
                                        {"coordinates": "dp;0;1;²;3"}, {"coordinates": f"dp;0;1;{'9' * 5000};3"},
                                        {"coordinates": f"dp;0;1;{2**70};3"}])  # fmt: skip
def test_an_unknown_layout_is_one_group(attributes: dict[str, str]) -> None:
    layout = layout_of(attributes, 4)
    assert layout.parallel is None
    assert layout.peers_of(2) == (0, 1, 2, 3)
    assert layout.stage_of(2) == 0


def test_a_restart_that_says_nothing_keeps_the_layout_and_a_smaller_world_voids_it() -> None:
    topology = Topology()
    topology.apply(event({"pp": "2", "dp": "2"}, 4))
    topology.apply(event({}, 4, attempt=1, at=2))
    kept = topology.job("j")
    assert kept is not None
    assert kept.stage_of(3) == 1
    topology.apply(event({}, 3, attempt=2, at=3))
    shrunk = topology.job("j")
    assert shrunk is not None
    assert shrunk.parallel is None


@given(st.permutations(AXES), st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_every_rank_has_a_place_of_its_own(order: list[str], sizes: list[int]) -> None:
    world = 1
    for size in sizes:
        world *= size
    attributes = {"order": "-".join(order), **{axis: str(size) for axis, size in zip(AXES, sizes, strict=True)}}
    layout = parallel_layout(attributes, world)
    assert layout is not None
    assert len(set(layout.places)) == world
    assert sum(len(set(layout.groups(axis))) for axis in AXES) == sum(sizes)


def test_a_world_that_no_cluster_has_is_not_laid_out() -> None:
    """One forged rank number must not cost a worker its memory."""
    assert parallel_layout({"tp": "2000000"}, 2_000_000) is None
