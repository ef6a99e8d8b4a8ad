"""What the demonstration saw, read from the topics like any other consumer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from trainwarden import topics
from trainwarden.bus import Bus, Message
from trainwarden.errors import BusError, DecodeError
from trainwarden.policy import reach_at_least
from trainwarden.records import (
    ActionResult,
    ActionStatus,
    DeadLetter,
    Incident,
    Plan,
    Reach,
    StepReport,
    StepRow,
    Verdict,
    decode,
)

WATCHED = (topics.STEPS, topics.VERDICTS, topics.INCIDENTS, topics.ACTIONS, topics.DEAD)


@dataclass
class AttemptView:
    """Steps of one attempt of the job: first and last row per rank."""

    world: int = 0
    first: dict[int, StepRow] = field(default_factory=dict)
    last: dict[int, StepRow] = field(default_factory=dict)
    durations_ms: list[float] = field(default_factory=list)
    first_loss: float = math.nan

    def add(self, report: StepReport) -> None:
        """Take a report in."""
        self.world = report.world
        for row in report.rows:
            self.first.setdefault(report.rank, row)
            self.last[report.rank] = row
            if row.phase == "train":
                self.durations_ms.append(row.duration_ms)

    @property
    def ranks(self) -> set[int]:
        """Ranks seen."""
        return set(self.last)

    @property
    def lowest_last_step(self) -> int:
        """The step that every rank has done; -1 before all have spoken."""
        complete = self.last and len(self.last) == self.world
        return min(row.step for row in self.last.values()) if complete else -1


class Observed:
    """Everything so far. All reads and writes under one lock; the reader thread writes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.attempts: dict[int, AttemptView] = {}
        self.node_of_rank: dict[tuple[int, int], str] = {}
        self.incidents: dict[str, Incident] = {}
        self.first_seen: dict[str, Incident] = {}
        self.plans: list[Plan] = []
        self.results: list[ActionResult] = []
        self.verdicts: list[Verdict] = []
        self.dead: list[DeadLetter] = []

    def add(self, record: object) -> None:
        """Take one record in."""
        with self.lock:
            if isinstance(record, StepReport):
                self.attempts.setdefault(record.attempt, AttemptView()).add(record)
                self.node_of_rank[(record.attempt, record.rank)] = record.node
            elif isinstance(record, Incident):
                self._add_incident(record)
            elif isinstance(record, Plan):
                self.plans.append(record)
            elif isinstance(record, ActionResult):
                self.results.append(record)
            elif isinstance(record, Verdict):
                self.verdicts.append(record)
            elif isinstance(record, DeadLetter):
                self.dead.append(record)

    @property
    def newest_attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return max(self.attempts, default=0)

    @property
    def last_step(self) -> int:
        """The step that every rank of the newest attempt has done."""
        view = self.attempts.get(self.newest_attempt)
        return view.lowest_last_step if view else -1

    def loud_incidents(self) -> list[Incident]:
        """Incidents that somebody would be told about, oldest first, at their newest revision."""
        with self.lock:
            loud = [i for i in self.incidents.values() if reach_at_least(i.reach, Reach.NOTIFY)]
        return sorted(loud, key=lambda i: i.timeline.verdict_at_ns)

    def done(self, status: ActionStatus) -> list[ActionResult]:
        """Ledger rows of a status, in order of arrival."""
        with self.lock:
            return [r for r in self.results if r.status == status]

    def _add_incident(self, incident: Incident) -> None:
        known = self.incidents.get(incident.incident_id)
        self.first_seen.setdefault(incident.incident_id, incident)
        if known is None or incident.revision >= known.revision:
            self.incidents[incident.incident_id] = incident


class Observer:
    """Reads the topics in a thread until it is stopped."""

    def __init__(self, bus: Bus, on_record: Callable[[object], None] = lambda record: None) -> None:
        self.observed = Observed()
        self._on_record = on_record
        self._bus = bus
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def start(self) -> None:
        """Begin reading from the start of the topics."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:
        subscriber = self._bus.subscriber([topic.name for topic in WATCHED])
        while not self._stop.is_set():
            try:
                messages = subscriber.poll(0.2)
            except BusError:
                self._stop.wait(0.5)
                continue
            for message in messages:
                self._take(message)
        subscriber.close()

    def _take(self, message: Message) -> None:
        try:
            record = decode(message.value)
        except DecodeError:
            return  # the worker dead-letters it; the demonstration only watches
        self.observed.add(record)
        self._on_record(record)
