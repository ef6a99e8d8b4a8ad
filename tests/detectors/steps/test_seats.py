"""Rows of the ranks, by whatever way they were found, are what looking at each row of each job gives."""

from __future__ import annotations

import random

from detectors.numbers import whole_number
from detectors.steps.seats import Seats
from trainwarden.topology import JobLayout


def plainly(
    entities: tuple[tuple[str, str], ...], layouts: tuple[JobLayout, ...]
) -> list[tuple[str, int, list[int], list[int], list[str]]]:
    found = []
    for layout in layouts:
        mine = []
        for row, (node, device) in enumerate(entities):
            rank = whole_number(device.removeprefix("rank"), -1)
            if layout.ranks.get(rank, ("", ""))[0] == node:
                mine.append((row, rank, node))
        if mine:
            rows, ranks, nodes = zip(*mine, strict=True)
            found.append((layout.job, layout.attempt, list(rows), list(ranks), list(nodes)))
    return found


def job(name: str, attempt: int, nodes: list[str]) -> JobLayout:
    return JobLayout(name, attempt, {rank: (nodes[rank // 2], f"gpu{rank % 2}") for rank in range(2 * len(nodes))})


def test_rows_are_those_of_the_plain_way_while_nodes_jobs_and_attempts_come_and_go() -> None:
    rng, seats = random.Random(3), Seats()
    names = [f"n{number}" for number in range(12)]
    layouts: tuple[JobLayout, ...] = (job("a", 0, names[:4]), job("b", 0, names[4:7]))
    for step in range(300):
        if rng.random() < 0.2:
            nodes = rng.sample(names, rng.randint(1, 5))  # jobs may share a node
            layouts = (*(one for one in layouts[-3:] if rng.random() < 0.7), job(rng.choice("abcd"), step, nodes))
        here = [node for node in names if rng.random() < 0.9] + [f"guest{step}"]
        ranks = [(node, f"rank{rank}") for node in here for rank in rng.sample(range(10), 4)]
        entities = (*ranks, ("n1", "x"), ("n1", "3"))
        for _ in range(2):
            found = seats.of(entities, layouts)
            told = [(one.job, one.attempt, one.rows.tolist(), one.ranks.tolist(), one.nodes) for one in found]
            assert told == plainly(entities, layouts)
        assert seats.of(tuple(entities), layouts) is found, "nothing changed"


def test_what_is_remembered_does_not_grow_with_those_that_left() -> None:
    seats, layouts = Seats(), (job("a", 0, ["n0", "n1"]),)
    for number in range(3000):
        seats.of((("n0", "rank0"), (f"guest{number}", "rank1")), (*layouts, job("b", number, ["n2"])))
    assert max(len(getattr(seats, name)) for name in ("_seat", "_all", "_jobs_on", "_known_on", "_taken")) < 300
