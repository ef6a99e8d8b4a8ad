"""Where things lie among known rows: as a plain look-up says, however they are mixed."""

from __future__ import annotations

import random

import pytest

from detectors.placement import Jobs
from detectors.seats import Pair, seats
from trainwarden.records import TopologyEvent
from trainwarden.topology import Topology

ROWS: list[Pair] = [(f"n{node:03d}", f"gpu{device}") for node in range(60) for device in range(8)]


def plain(asked: list[Pair], known: list[Pair]) -> list[int]:
    return [known.index(entity) if entity in known else -1 for entity in asked]


@pytest.mark.parametrize("gone", [(), (0,), (59,), (7, 8, 30), tuple(range(1, 60)), tuple(range(60))])
def test_nodes_that_are_absent_leave_holes(gone: tuple[int, ...]) -> None:
    asked = [pair for pair in ROWS if int(pair[0][1:]) not in gone]
    assert seats(asked, ROWS).tolist() == plain(asked, ROWS)


def test_any_order_and_new_names() -> None:
    dice = random.Random(1)
    for _ in range(30):
        asked = [*dice.sample(ROWS, dice.randrange(len(ROWS))), ("new", str(dice.random()))]
        if dice.random() < 0.5:
            asked.sort()
        assert seats(asked, ROWS).tolist() == plain(asked, ROWS)
    assert seats((), ROWS).tolist() == []
    assert seats(ROWS[:2], []).tolist() == [-1, -1]


def test_jobs_are_the_same_object_until_a_layout_changes() -> None:
    topology, jobs = Topology(), Jobs()
    topology.apply(TopologyEvent(entity="job:a", origin="hook", ranks=((0, "n0", ""),)))
    first = jobs.of(topology)
    assert first == {"n0": "a"}
    assert jobs.of(topology.copy()) is first
    topology.apply(TopologyEvent(entity="job:a", origin="hook", ranks=((1, "n1", ""),)))
    assert jobs.of(topology) == {"n0": "a", "n1": "a"}
    assert first == {"n0": "a"}
