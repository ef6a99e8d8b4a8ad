"""Which nodes the next attempt of a job runs on."""

from __future__ import annotations

from dataclasses import dataclass

from actions.world import JobState, NodeState

_SPARE_STATES = ("stopped", "starting", "finished")


@dataclass(frozen=True)
class Hold:
    """There is no good set of members; `reason` says why."""

    reason: str


def choose_members(
    job: JobState, without: tuple[str, ...], min_nodes: int, node_unit: int, also: tuple[str, ...] = ()
) -> tuple[str, ...] | Hold:
    """Members of the next attempt: those of now minus `without`, a spare for each that goes, plus `also`.

    The order is kept, so that ranks stay where they are. What does not fill a whole unit is left out. A job that is small already
    may keep its size.
    """
    current = job.members
    kept = [node for node in current if node not in without and not _is_out(job.nodes.get(node))]
    kept += [node for node in also if node not in kept]
    spares = [
        node
        for node, state in sorted(job.nodes.items())
        if _is_spare(state) and node not in (*current, *without, *also)
    ]
    filled = kept + spares[: max(0, len(current) - len(kept))]
    members = tuple(filled[: len(filled) - len(filled) % max(1, node_unit)])
    if len(members) >= max(1, min(min_nodes, len(current))):
        return members
    gone = ", ".join(sorted({*without, *(set(current) - set(kept))})) or "nobody"
    return Hold(
        f"job {job.job} would have {len(members)} of at least {min_nodes} nodes without {gone}, and no spare is free"
    )


def _is_out(state: NodeState | None) -> bool:
    return state is not None and state.excluded


def _is_spare(state: NodeState) -> bool:
    return state.reachable and not state.excluded and state.state in _SPARE_STATES
