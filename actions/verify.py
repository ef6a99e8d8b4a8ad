"""Whether a restart helped: the steps of the new generation must pass the step at which the fault was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from actions.watch import Watch
from actions.world import JobState
from trainwarden.clock import NS_PER_S, Clock

POLL_S = 0.1
LIMIT_FACTOR = 10
"""Steps that rise keep the wait alive (an old checkpoint takes long to catch up), at most this many times the deadline."""


@dataclass(frozen=True)
class Verification:
    """How it ended; `detail` has the moment of the first step (`resumed_at_ns`) and the steps lost.

    `again`: the new world broke by itself, so ordering it once more may help.
    """

    passed: bool
    reason: str
    detail: Mapping[str, str] = field(default_factory=dict)
    again: bool = False


def verify(
    watch: Watch, job: str, members: tuple[str, ...], generation: int, past_step: int, deadline_s: float, clock: Clock,
    still_leading: Callable[[], None], newer_trouble: Callable[[], str],
) -> Verification:  # fmt: skip
    """Wait until every member is in `generation` (or a later one) and the lowest step is above `past_step`.

    Parameters
    ----------
    deadline_s
        Longest time without any step rising.
    still_leading
        Raises when this service may not act any more.
    newer_trouble
        One sentence when waiting on is pointless.
    """
    began_ns = rose_ns = clock.monotonic_ns()
    highest, detail = -1, dict[str, str]()
    while True:
        still_leading()
        watch.refresh()
        state, now_ns = watch.job(job), clock.monotonic_ns()
        if (reason := newer_trouble() or _taken_out(state, members)) != "":
            return Verification(False, reason, detail)
        if (reason := _broken(state, members, generation)) != "":
            return Verification(False, reason, detail, again=True)
        step = _step(state, members, generation)
        if step > highest:
            highest, rose_ns = step, now_ns
            detail = detail or _resumed(step, past_step, generation, clock)
        if step > past_step:
            return Verification(True, f"job {job} is at step {step}, past {past_step}", {**detail, "step": str(step)})
        if now_ns - rose_ns > deadline_s * NS_PER_S or now_ns - began_ns > LIMIT_FACTOR * deadline_s * NS_PER_S:
            return Verification(False, _stuck(state, members, generation, highest, past_step, deadline_s), detail)
        clock.sleep(POLL_S)


def _step(state: JobState, members: tuple[str, ...], generation: int) -> int:
    """Lowest step of the new generation once every member says one, else -1."""
    nodes = [state.nodes.get(member) for member in members]
    if not all(node is not None and node.generation >= generation and node.last_steps for node in nodes):
        return -1
    return min(step for node in nodes if node is not None for step in node.last_steps.values())


def _taken_out(state: JobState, members: tuple[str, ...]) -> str:
    for member in members:
        node = state.nodes.get(member)
        if node is not None and node.excluded:
            return f"{member} was taken out by somebody else: {node.reason or 'no reason given'}"
    return ""


def _broken(state: JobState, members: tuple[str, ...], generation: int) -> str:
    """A launcher says ``failed`` of the old generation until it has taken the new order; that is no news."""
    for member in members:
        node = state.nodes.get(member)
        if node is not None and node.state == "failed" and node.generation >= generation:
            return f"{member} failed in generation {generation}: {node.reason or 'its workers ended'}"
    return ""


def _resumed(step: int, past_step: int, generation: int, clock: Clock) -> dict[str, str]:
    lost = {"lost_steps": str(max(0, past_step + 1 - step))} if past_step >= 0 else {}
    return {"resumed_at_ns": str(clock.now_ns()), "first_step": str(step), "generation": str(generation), **lost}


def _stuck(
    state: JobState, members: tuple[str, ...], generation: int, highest: int, past_step: int, deadline_s: float
) -> str:
    missing = [
        m
        for m in members
        if (node := state.nodes.get(m)) is None or node.generation < generation or not node.last_steps
    ]
    where = (
        f"still no step from {', '.join(missing)}" if missing else f"the steps stand at {highest}, short of {past_step}"
    )
    return f"generation {generation} did not get going within {deadline_s:g} s: {where}"
