"""Keeping the agent's threads on one processor: gathered where the first runs, let go when that is too busy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import pytest

from collectors.processor import LET_GO_NS, LOOK_EVERY_NS, OneProcessor, affinity, here, tasks

FREE = {0, 1, 2, 3}


class Machine:
    """Four processors, three threads beside the first."""

    def __init__(self) -> None:
        self.at = 2
        self.places: dict[int, set[int]] = {task: set(FREE) for task in (11, 12, 13)}
        self.calls = 0

    def place(self, task: int, processors: Iterable[int]) -> None:
        self.calls += 1
        if task == 13:
            raise ProcessLookupError(3, "No such process")
        self.places[task] = set(processors)

    def keeper(self, allowed: Iterable[int] = FREE) -> OneProcessor:
        return OneProcessor(allowed, lambda: list(self.places), lambda: self.at, self.place)


def test_threads_are_gathered_where_the_first_runs_and_follow_it() -> None:
    machine = Machine()
    keeper = machine.keeper()
    keeper.keep(0, late=False)
    assert (machine.places[11], machine.places[12]) == ({2}, {2})
    machine.at = 0
    keeper.keep(LOOK_EVERY_NS - 1, late=False)
    assert machine.places[11] == {2}
    keeper.keep(LOOK_EVERY_NS, late=False)
    assert machine.places[11] == {0}


def test_while_nothing_changes_nobody_is_moved_but_new_threads_once_a_minute() -> None:
    machine = Machine()
    keeper = machine.keeper()
    for second in range(60):
        keeper.keep(second * 10**9, late=False)
    assert machine.calls == 3
    machine.places[14] = set(FREE)
    keeper.keep(60 * 10**9, late=False)
    assert machine.places[14] == {2}


def test_late_work_lets_everybody_go_for_ten_minutes() -> None:
    machine = Machine()
    keeper = machine.keeper()
    keeper.keep(0, late=False)
    keeper.keep(1, late=True)
    assert machine.places[11] == FREE
    keeper.keep(LET_GO_NS, late=True)
    assert machine.places[11] == FREE
    keeper.keep(LET_GO_NS + 1, late=False)
    assert machine.places[11] == {2}


@pytest.mark.parametrize(("allowed", "at"), [({2}, 2), (FREE, -1), (FREE, 7)], ids=["only one", "unknown", "not ours"])
def test_nothing_is_moved_where_there_is_no_choice(allowed: set[int], at: int) -> None:
    machine = Machine()
    machine.at = at
    machine.keeper(allowed).keep(0, late=False)
    assert machine.calls == 0


def test_real_threads_are_kept_and_the_first_is_not() -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait, daemon=True)
    other.start()
    before = affinity()
    assert other.native_id in tasks()
    assert os.getpid() not in tasks()
    keeper = OneProcessor(before, lambda: [other.native_id or 0], here)
    keeper.keep(0, late=False)
    try:
        assert len(os.sched_getaffinity(other.native_id or 0)) == 1
        assert affinity() == before
        keeper.keep(1, late=True)
        assert os.sched_getaffinity(other.native_id or 0) == before
    finally:
        done.set()
