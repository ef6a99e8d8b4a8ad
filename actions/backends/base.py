"""What carries a plan out. A backend says "cannot" with a reason instead of pretending."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from actions.world import JobState, NodeState
from trainwarden.clock import Clock
from trainwarden.records import Verb
from trainwarden.registry import Registry


@dataclass(frozen=True)
class Order:
    """Who orders what, and how it is recognised when it is sent twice.

    `key` is the idempotency key, `fence` the leader's fencing number (effectors refuse lower ones than they have seen).
    """

    key: str
    job: str
    fence: int
    reason: str = ""

    def part(self, name: str) -> Order:
        """One of several calls that make up the order."""
        return replace(self, key=f"{self.key}.{name}")


@dataclass(frozen=True)
class Outcome:
    """How an order ended.

    `done`; `pending` (an excluded node is out of reach: everybody else goes on, its fence is still to be set); `failed`;
    `refused` (an effector knows a newer leader or does not trust us: stop). `silent` names members that did not answer.
    """

    status: Literal["done", "pending", "failed", "refused"]
    reason: str = ""
    detail: Mapping[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()


class Backend(ABC):
    """Base of backends; `name` and `Settings` (a frozen dataclass) make it a plugin."""

    name: ClassVar[str] = ""
    Settings: ClassVar[type]

    def __init__(self, settings: Any, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock

    @abstractmethod
    def can(self, verb: Verb) -> str:
        """Empty when the verb is supported, else one sentence why not."""

    @abstractmethod
    def cluster(self) -> dict[str, NodeState]:
        """Every node known, read now; nodes that do not answer are in it with ``reachable=False``."""

    @abstractmethod
    def announce(self, order: Order) -> dict[str, int]:
        """Tell every effector the leader's fence; returns the highest fence that each keeps."""

    @abstractmethod
    def save(self, order: Order, deadline_ms: float) -> Outcome:
        """Coordinated save of a running job; all ranks save the same step or none counts."""

    @abstractmethod
    def isolate(self, order: Order, node: str) -> Outcome:
        """Take `node` out and keep it out over restarts of anything."""

    @abstractmethod
    def restart(self, order: Order, members: tuple[str, ...], generation: int, job: JobState) -> Outcome:
        """Stop every older generation and start this one with exactly these members."""

    @abstractmethod
    def return_node(self, order: Order, node: str) -> Outcome:
        """Let `node` take part again; it starts nothing."""

    def rebalance(self, order: Order, shares: tuple[int, ...], dry_run: bool = False) -> Outcome:
        """Give the ranks these shares of the global batch, all on the same step; a dry run only asks whether they would take them."""
        del order, shares, dry_run
        return Outcome("failed", self.can(Verb.REBALANCE) or f"backend {self.name} cannot change shares")

    def reroute(self, order: Order, node: str, rail: str = "", undo: bool = False, dry_run: bool = False) -> Outcome:
        """Take a rail of `node` (empty: the one in use) out of use until `undo`; a dry run only says what would move."""
        del order, node, rail, undo, dry_run
        return Outcome("failed", self.can(Verb.REROUTE) or f"backend {self.name} cannot move traffic")

    def learn(self, nodes: tuple[str, ...]) -> None:  # noqa: B027 - a backend with its own inventory has nothing to learn
        """Nodes that the topology names."""

    def close(self) -> None:  # noqa: B027 - nothing to let go of by default
        """Let go of connections and threads."""


BACKENDS: Registry[Backend] = Registry("actions.backends", Backend)  # type: ignore[type-abstract]


def job_state(job: str, cluster: Mapping[str, NodeState], read_at_ns: int) -> JobState:
    """The part of the cluster that belongs to `job`; a node that never answered may belong to it."""
    nodes = {name: state for name, state in cluster.items() if state.job in (job, "")}
    return JobState(job, nodes, read_at_ns)
