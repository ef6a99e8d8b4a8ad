"""Small builders shared by the tests of the action service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from actions.lease import Holder
from actions.ledger import Ledger
from actions.world import JobState, NodeState, World
from trainwarden.clock import SimulatedClock
from trainwarden.records import Entity, EntityKind, Incident, Mode, Plan, PlanStep, Reach, Verb

NODES = ("n0", "n1", "n2", "n3")
CULPRIT = Entity(EntityKind.RANK, "demo/2", "n2")
ME = Holder("host", "boot", "pid:[1]", 1, "7", "test")


def incident(clock: SimulatedClock | None = None, **over: Any) -> Incident:
    known: dict[str, Any] = {
        "cluster": "c", "incident_id": "i1", "revision": 1, "job": "demo", "attempt": 1, "kind": "compute_slow",
        "culprits": (CULPRIT,), "reach": Reach.ACT, "last_step": 100, "observed_at_ns": clock.now_ns() if clock else 0,
    }  # fmt: skip
    return Incident(**{**known, **over})


def node(name: str, **over: Any) -> NodeState:
    known = NodeState(name, True, "demo", "running", 1, NODES, {NODES.index(name) if name in NODES else 9: 100})
    return replace(known, **over)


def job(*nodes: NodeState, advanced_at_ns: int = 0) -> JobState:
    chosen = nodes or tuple(node(name) for name in NODES)
    return JobState("demo", {state.node: state for state in chosen}, 0, advanced_at_ns)


def plan(clock: SimulatedClock, *verbs: tuple[Verb, str], **over: Any) -> Plan:
    chosen = verbs or ((Verb.ISOLATE, "n2"), (Verb.RESTART, "demo"))
    number = int(over.get("number", 1))
    incident_id = str(over.get("incident_id", "i1"))
    steps = tuple(PlanStep(verb, target, f"{incident_id}.{number}.{verb.value}.{target}") for verb, target in chosen)
    known: dict[str, Any] = {
        "plan_id": f"p-{incident_id}-{number}", "incident_id": incident_id, "incident_revision": 1, "number": number, "job": "demo",
        "attempt": 1, "kind": "compute_slow", "steps": steps, "mode": Mode.AUTO, "reason": "because",
        "observed_at_ns": clock.now_ns(), "expires_at_ns": clock.now_ns() + 60_000_000_000,
    }  # fmt: skip
    return Plan(**{**known, **over})


@contextmanager
def leading(path: Path, clock: SimulatedClock) -> Iterator[Ledger]:
    ledger = Ledger(path, clock)
    assert ledger.take_lease(ME) == ""
    yield ledger
    ledger.close()


def world(clock: SimulatedClock, ledger: Ledger, **over: Any) -> World:
    state = over.pop("job", None) or job()
    news = over.pop("incident", incident(clock))
    known: dict[str, Any] = {
        "now_ns": clock.now_ns(), "job": state, "cluster": state.nodes, "incident": news,
        "incidents": (news,) if news else (), "ledger": ledger, "min_nodes": 2,
    }  # fmt: skip
    return World(**{**known, **over})
