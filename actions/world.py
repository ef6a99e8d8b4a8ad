"""What the planner and the rails look at: the job and its nodes as last read, the incident, the ledger, the clock's time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actions.shares import RankShare
from trainwarden.records import Entity, EntityKind, Incident, IncidentStatus, Plan, Verb

if TYPE_CHECKING:
    from actions.ledger import Ledger


@dataclass(frozen=True)
class NodeState:
    """One node as its warden describes it.

    Attributes
    ----------
    reachable
        False when the warden did not answer; everything else is then the last that was known.
    last_steps
        Rank → step it is in; a rank that has not said anything is absent.
    fence
        Highest fencing number the warden has kept.
    shares
        Rank → its share of the global batch, of scripts that have such.
    heals_s
        So long its launcher may take to go on without a dead rank's process by itself; 0 when it does not, or has given up.
    """

    node: str
    reachable: bool = True
    job: str = ""
    state: str = ""
    generation: int = 0
    members: tuple[str, ...] = ()
    last_steps: Mapping[int, int] = field(default_factory=dict)
    alive_ranks: frozenset[int] = frozenset()
    fence: int = 0
    excluded: bool = False
    reason: str = ""
    shares: Mapping[int, RankShare] = field(default_factory=dict)
    heals_s: float = 0.0


@dataclass(frozen=True)
class JobState:
    """All nodes of a job. `advanced_at_ns` is when its lowest step last rose (0: never seen), `read_at_ns` when it was read."""

    job: str
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    read_at_ns: int = 0
    advanced_at_ns: int = 0
    observed_save_ms: float = 0.0

    @property
    def generation(self) -> int:
        """Highest generation that any warden has seen; 0 when none answers."""
        return max((state.generation for state in self.nodes.values()), default=0)

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the highest generation, in their own order."""
        newest = [s for s in self.nodes.values() if s.generation == self.generation and s.members]
        return newest[0].members if newest else tuple(n for n, s in sorted(self.nodes.items()) if not s.excluded)

    @property
    def last_step(self) -> int:
        """Lowest step among the ranks of the newest generation; -1 when nobody says."""
        steps = [step for node in self.running() for step in node.last_steps.values()]
        return min(steps, default=-1)

    @property
    def shares(self) -> dict[int, RankShare]:
        """Shares of the ranks of the newest generation; empty when the script has none."""
        return {rank: share for node in self.running() if node.reachable for rank, share in node.shares.items()}

    @property
    def heals_s(self) -> float:
        """So long the launchers may take to heal the world in the process; 0 when one of them does not, or has given up."""
        return min((node.heals_s for node in self.running() if node.reachable), default=0.0)

    def running(self) -> list[NodeState]:
        """Members of the newest generation that are in it."""
        members = self.members
        return [s for s in self.nodes.values() if s.node in members and s.generation == self.generation]

    def still_advances(self, now_ns: int, within_ns: int) -> bool:
        """Whether the job's steps rose within the last `within_ns`, as far as anybody looked."""
        return self.advanced_at_ns > 0 and now_ns - self.advanced_at_ns <= within_ns


@dataclass(frozen=True)
class World:
    """Everything that a rail may judge by.

    Attributes
    ----------
    kill_switch
        The reason of the operator's stop, empty when there is none.
    min_nodes, node_unit
        A job is never shrunk below so many nodes, and only in multiples of the unit.
    """

    now_ns: int
    job: JobState
    cluster: Mapping[str, NodeState]
    incident: Incident | None
    incidents: tuple[Incident, ...]
    ledger: Ledger
    kill_switch: str = ""
    min_nodes: int = 1
    node_unit: int = 1

    @property
    def excluded(self) -> frozenset[str]:
        """Nodes that anybody has taken out, not only we."""
        return frozenset(node for node, state in self.cluster.items() if state.excluded)


def isolated_by(plan: Plan) -> tuple[str, ...]:
    """Nodes that `plan` takes out."""
    return tuple(step.target for step in plan.steps if step.verb is Verb.ISOLATE)


def restarts(plan: Plan) -> bool:
    """Whether `plan` restarts its job."""
    return any(step.verb is Verb.RESTART for step in plan.steps)


def undoes(plan: Plan) -> bool:
    """Whether `plan` only gives back what was taken: rails that protect nodes never hold it up."""
    return any(step.verb is Verb.RETURN_NODE for step in plan.steps) and not isolated_by(plan)


def nodes_of(culprits: tuple[Entity, ...]) -> tuple[str, ...]:
    """Nodes that culprits live on, without repeats; a culprit without a node has none."""
    names = (c.node or (c.name if c.kind is EntityKind.NODE else "") for c in culprits)
    return tuple(dict.fromkeys(name for name in names if name))


def is_open(incident: Incident) -> bool:
    """Whether something may still be done about `incident`."""
    return incident.status in (IncidentStatus.OPEN, IncidentStatus.ACTING) and not incident.superseded_by
