"""Incidents, actions and a sender under the test's control."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actions.notify.base import Call, DeliverySettings, Reply
from actions.notify.service import NotifyService
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.config import from_table
from trainwarden.records import (
    ActionResult,
    ActionStatus,
    Cause,
    Delivery,
    Entity,
    EntityKind,
    Evidence,
    Incident,
    IncidentStatus,
    Mode,
    Plan,
    PlanStep,
    Reach,
    Record,
    Timeline,
    Verb,
    decode,
    encode,
)  # fmt: skip
from trainwarden.selfmetrics import Metrics

START_NS = 1_764_400_000 * NS_PER_S


def incident(revision: int = 1, status: IncidentStatus = IncidentStatus.OPEN, **changes: Any) -> Incident:
    """An incident that names n2."""
    facts: dict[str, Any] = {
        "cluster": "c", "observed_at_ns": START_NS + revision * NS_PER_S, "incident_id": "i0", "dedup_key": "d0", "revision": revision,
        "status": status, "job": "llm", "attempt": 14, "kind": "rank_frozen", "severity": "critical",
        "title": "llm stands: rank 2 on n2 is frozen", "culprits": (Entity(EntityKind.NODE, "n2", "n2"),), "culprit_rank": 2,
        "victims": ("rank:0", "rank:1"), "causes": (Cause("rank_frozen", Entity(EntityKind.NODE, "n2"), 0.92),), "confidence": 0.92,
        "reach": Reach.ACT, "remedy": ("restart",), "report": "Rank 2 stopped at step 100.", "last_step": 100,
        "evidence": (Evidence("step_age_s", "s", (START_NS,), (float("nan"),)),),
        "timeline": Timeline(fault_at_ns=START_NS, verdict_at_ns=START_NS + 3 * NS_PER_S,
                             recovered_at_ns=START_NS + 9 * NS_PER_S if status is IncidentStatus.RECOVERED else 0),
    }  # fmt: skip
    return Incident(**{**facts, **changes})


def action(status: ActionStatus, verb: str = "", seq: int = 1, **changes: Any) -> ActionResult:
    """A row of the ledger about incident i0."""
    facts: dict[str, Any] = {"cluster": "c", "observed_at_ns": START_NS + (10 + seq) * NS_PER_S, "seq": seq, "plan_id": "p0",
                             "incident_id": "i0", "job": "llm", "verb": verb, "status": status, "mode": Mode.AUTO}  # fmt: skip
    return ActionResult(**{**facts, **changes})


def plan() -> Plan:
    """A plan for incident i0."""
    return Plan(cluster="c", observed_at_ns=START_NS + 4 * NS_PER_S, plan_id="p0", incident_id="i0", job="llm", kind="rank_frozen",
                steps=(PlanStep(Verb.RESTART, "job:llm", "k0"),), mode=Mode.AUTO)  # fmt: skip


@dataclass
class ScriptedSender:
    """Answers from a script (the last answer for ever) and keeps the calls."""

    script: list[Reply | Exception] = field(default_factory=lambda: [Reply(200)])
    calls: list[Call] = field(default_factory=list)

    def send(self, call: Call, settings: DeliverySettings) -> Reply:
        """The next answer."""
        del settings
        self.calls.append(call)
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Desk:
    """A service whose parts are in the test's hands: bus in memory, simulated clock, scripted receiver."""

    def __init__(self, directory: Path, settings: dict[str, Any] | None = None, bus: MemoryBus | None = None,
                 clock: SimulatedClock | None = None) -> None:  # fmt: skip
        oncall = {"type": "webhook", "url": "https://r.example/x", **(settings or {})}
        table = {"cluster": "c", "run_dir": str(directory), "notify": {"oncall": oncall}}
        self.clock = clock or SimulatedClock(START_NS + 20 * NS_PER_S)
        self.bus = bus or MemoryBus(self.clock)
        self.sender = ScriptedSender()
        self.metrics = Metrics("notify")
        self.service = NotifyService(from_table(table), self.bus, self.clock, self.metrics, self.sender)
        self._reader = self.bus.subscriber(["tw.incidents", "tw.actions"], group="tw.notify")
        self._deliveries = self.bus.subscriber(["tw.actions"])

    def say(self, *records: Record) -> None:
        """Publish records and let the service decide over them."""
        for record in records:
            self.bus.append("tw.incidents" if isinstance(record, Incident) else "tw.actions", b"i0", encode(record))
        self.hear()

    def hear(self) -> None:
        """Let the service take what lies on the bus."""
        self.service.take(self._reader.poll(0))
        self._reader.commit()

    def deliver(self) -> int:
        """Attempt everything that is due; the number of attempts."""
        before = len(self.sender.calls)
        while self.service.couriers[0].step():
            pass
        return len(self.sender.calls) - before

    def causes(self) -> list[str]:
        """Causes of all notices sent so far."""

        return [json.loads(call.body)["trainwarden"]["cause"] for call in self.sender.calls]

    def deliveries(self) -> list[Delivery]:
        """Delivery records published since the last call."""
        found = [decode(message.value) for message in self._deliveries.poll(0)]
        return [record for record in found if isinstance(record, Delivery)]


def until(condition: Callable[[], bool], wait: Callable[[float], Any], limit: int = 500) -> None:
    """Wait in small steps until `condition` holds."""
    for _ in range(limit):
        if condition():
            return
        wait(0.02)
    raise AssertionError("it never came true")
