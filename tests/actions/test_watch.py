"""The picture of the wardens, and what is remembered of a job that no longer speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from actions.backends.base import Backend
from actions.watch import Watch
from actions.world import NodeState
from tests.actions.builders import node
from trainwarden.clock import SimulatedClock


class _Wardens:
    def __init__(self) -> None:
        self.nodes: dict[str, NodeState] = {}

    def cluster(self) -> Mapping[str, NodeState]:
        return dict(self.nodes)


def watched() -> tuple[_Wardens, Watch]:
    wardens = _Wardens()
    return wardens, Watch(cast(Backend, wardens), SimulatedClock())


def says(step: int | None, **over: Any) -> dict[str, NodeState]:
    steps = {} if step is None else {0: step}
    return {name: node(name, last_steps=steps, **over) for name in ("n0", "n1")}


def test_the_highest_step_outlives_the_attempt_that_reached_it() -> None:
    wardens, watch = watched()
    job = says(40)["n0"].job
    assert watch.reached(job) == -1
    for step in (40, 55, None, 30):
        wardens.nodes = says(step)
        watch.refresh()
    assert watch.job(job).last_step == 30
    assert watch.reached(job) == 55
