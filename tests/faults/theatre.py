"""A running cluster on an Apache Kafka of its own, that tests hurt and look at: the demonstration's own, driven by hand."""

from __future__ import annotations

import json
import os
import random
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kafka import KafkaConsumer, TopicPartition

from trainwarden import topics, vitals
from trainwarden.bus import Message, connect
from trainwarden.demo.cluster import Cluster, Layout
from trainwarden.demo.faults.base import registry
from trainwarden.demo.network import Loopback, Network
from trainwarden.demo.observer import Observer
from trainwarden.demo.processes import Child
from trainwarden.embedded.kafka import ApacheKafka
from trainwarden.errors import DecodeError
from trainwarden.records import (
    ActionResult,
    ActionStatus,
    Incident,
    IncidentStatus,
    LogEvent,
    Reach,
    Record,
    StepReport,
    Tick,
    decode,
)

T = TypeVar("T")
SEEDS = int(os.environ.get("TRAINWARDEN_FAULT_SEEDS", "0"))
"""Number of random kills, 0 in `make test`; from 1 on every moment is tried, not only the worst."""
ROOT = Path(__file__).parents[2]
SAID_ON: dict[type[Record], tuple[str, ...]] = {
    Tick: ("tw.ticks",),
    StepReport: ("tw.steps",),
    LogEvent: ("tw.events", "tw.logs"),
}
"""Topics of what a collector numbers in one row."""
OWN_HEALTH = frozenset(vitals.KINDS)
LIMIT_S = 150.0
"""A failure, not an expectation: a loaded machine takes its time."""

TERMINAL = (
    ActionStatus.VERIFIED,
    ActionStatus.FAILED,
    ActionStatus.DENIED,
    ActionStatus.EXPIRED,
    ActionStatus.REVERTED,
)

SERVICES = """
[rails.cool_down]
job_s = 0

[rails.budget]
restarts = 1000

[policy.kinds.rank_killed]
remedy_on_recurrence = ["restart"]

[policy.kinds.rank_frozen]
remedy_on_recurrence = ["restart"]
"""
"""One job is hurt many times here: what would hold a job that needs so many restarts is taken away."""


def wait_for(what: str, look: Callable[[], T], limit_s: float = LIMIT_S, alive: Callable[[], None] = lambda: None) -> T:
    """The first true answer of `look`."""
    deadline = time.monotonic() + limit_s
    while not (found := look()):
        alive()
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit_s:.0f} s in vain for {what}")
        time.sleep(0.05)
    return found


@dataclass(frozen=True)
class Hurt:
    """What was done, and how things stood before."""

    fault: str
    node: str
    at_ns: int
    step: int
    attempt: int
    known: frozenset[tuple[str, str]] = frozenset()
    """Incidents there were before, and of what kind."""


def _became_a_stop(incident: Incident, hurt: Hurt) -> bool:
    here = any(culprit.node == hurt.node for culprit in incident.culprits)
    return here and incident.kind in ("rank_killed", "rank_frozen") and incident.observed_at_ns >= hurt.at_ns


class Theatre:
    """Cluster, broker and observer."""

    def __init__(
        self, directory: Path, nodes: int = 3, network: Network | None = None, kafka: ApacheKafka | None = None
    ) -> None:
        self.kafka = kafka or ApacheKafka(directory / "kafka")
        self._network = network or Loopback()
        self._directory = directory
        self._nodes = nodes
        self.figures: list[tuple[str, float]] = []

    def start(self) -> None:
        self.kafka.start()
        url = f"kafka://{self.kafka.bootstrap}"
        layout = Layout(self._directory / "run", nodes=self._nodes, kafka_url=url, more_toml=SERVICES)
        self.cluster = Cluster(layout, self._network)
        self.cluster.start()
        self.bus = connect(url)
        self.observer = Observer(self.bus)
        self.observer.start()
        self.observed = self.observer.observed
        self.trains()

    def stop(self) -> None:
        if hasattr(self, "observer"):
            self.observer.stop()
        if hasattr(self, "cluster"):
            self.cluster.stop()
        self.kafka.stop()

    # --- processes -------------------------------------------------------------------------------------------------------

    def child(self, name: str) -> Child:
        return self.cluster.children.get(name)

    def pids(self) -> dict[str, int]:
        """Process ids of everything that runs under us."""
        return {child.name: child.pid for child in self.cluster.children.all() if child.alive()}

    def supervise(self) -> None:
        """What systemd or Kubernetes does: start again what has ended."""
        for child in self.cluster.children.all():
            if child.alive():
                continue
            kind, _, node = child.name.partition("-")
            if kind == "collector":
                self.cluster.start_collector(int(node[1:]))
            elif kind in ("worker", "store", "actions"):
                self.cluster.start_service(kind)
            else:
                raise AssertionError(f"{child.name} ended with {child.process.returncode}:\n{child.tail()}")

    def ready(self) -> None:
        """Everything is up, serves and trains."""
        self.supervise()
        self.worker_leads()
        self.actions_lead()
        self.trains()

    def start_dying(self, service: str, moment: str) -> Child:
        """Replace a service by one that kills itself at a moment."""
        self.cluster.children.stop(service)
        config = self.cluster.directory / "trainwarden.toml"
        python = self.cluster.trainwarden()[0]
        command = [python, "-m", "tests.faults.dying", moment, service, "--config", str(config)]
        return self.cluster.children.start(service, command, PYTHONPATH=str(ROOT))

    def dies(self, child: Child) -> None:
        """Wait until it has killed itself."""
        wait_for(f"{child.name} to die", lambda: not child.alive())
        assert child.process.returncode == -9, child.tail(30)

    def worker_leads(self) -> None:
        url = f"http://127.0.0.1:{self.cluster.ports.worker}/healthz"
        wait_for("the worker to lead", lambda: get(url).strip() == "leads", alive=self._require("worker"))

    def actions_lead(self) -> None:
        url = f"http://127.0.0.1:{self.cluster.ports.actions}/v1/health"

        def leads() -> bool:
            text = get(url)
            return bool(text) and json.loads(text)["leading"] and json.loads(text)["caught_up"]

        wait_for("the action service to lead", leads, alive=self._require("actions"))

    def _require(self, name: str) -> Callable[[], None]:
        def alive() -> None:
            child = self.child(name)
            assert child.alive(), f"{name} ended with {child.process.returncode}:\n{child.tail(30)}"

        return alive

    # --- the job ---------------------------------------------------------------------------------------------------------

    def trains(self, steps: int = 60) -> None:
        """Every rank of the newest attempt makes so many more steps, and so the detectors see them."""
        before = (self.observed.newest_attempt, self.observed.last_step)

        def further() -> bool:
            attempt, step = self.observed.newest_attempt, self.observed.last_step
            return step >= 0 and step >= (before[1] + steps if attempt == before[0] else steps)

        wait_for(f"{steps} more steps after {before}", further)

    def hurt(self, fault: str, number: int) -> Hurt:
        """Do it, as the demonstration does."""
        observed, node = self.observed, self.cluster.node(number)
        known = frozenset((incident.incident_id, incident.kind) for incident in observed.loud_incidents())
        before = (time.time_ns(), observed.last_step, observed.newest_attempt, known)
        registry().get(fault)().inject(self.cluster, number, random.Random(0))
        return Hurt(fault, node, *before)

    def incident_of(self, hurt: Hurt) -> Incident | None:
        return next(iter(self.incidents_since(hurt)), None)

    def incidents_since(self, hurt: Hurt) -> list[Incident]:
        """What was opened after it, by its own time, too, for topics are read with a delay; or was open, as a silence of that node, and
        became the stop of a rank. That a part of Trainwarden is behind is no fault of a node."""
        loud = [i for i in self.observed.loud_incidents() if (i.incident_id, i.kind) not in hurt.known]
        new = [i for i in loud if i.timeline.verdict_at_ns >= hurt.at_ns or _became_a_stop(i, hurt)]
        return [i for i in new if i.kind not in OWN_HEALTH]

    def healed(self, hurt: Hurt, unheard: bool = False) -> Incident:
        """Wait for healing, and check that it was the right one, done once. Where the broker was away (`unheard`), the launchers may have
        restarted the job before anybody heard of it: then nothing is done about it any more."""  # fmt: skip
        kind = {"kill": "rank_killed", "freeze": "rank_frozen"}[hurt.fault]

        def look() -> Incident | None:
            incident = self.incident_of(hurt)
            told = incident is not None and incident.status in (IncidentStatus.RECOVERED, IncidentStatus.CLOSED)
            further = self.observed.newest_attempt > hurt.attempt and self.observed.last_step > hurt.step
            return incident if told and further else None

        try:
            incident = wait_for(f"the end of {hurt}", look)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.situation(hurt)}") from error
        assert incident is not None
        wait_for(
            "the plan to end",
            lambda: [
                row
                for row in self.rows_of(incident.incident_id)
                if not row.verb and (row.status in TERMINAL or (unheard and row.status is ActionStatus.RECOMMENDED))
            ],
        )
        self.figures.append((f"{hurt.fault} on {hurt.node} to recovered", (time.time_ns() - hurt.at_ns) / 1e9))
        assert incident.kind == kind
        assert {entity.node or entity.name for entity in incident.culprits} == {hurt.node}
        self.assert_healed_once(hurt, incident)
        return incident

    def situation(self, hurt: Hurt) -> str:
        """What is known of a fault, for the message of a test that waited in vain."""
        with self.observed.lock:
            incidents = list(self.observed.incidents.values())
        told = [
            (
                i.incident_id,
                i.kind,
                [e.node or e.name for e in i.culprits],
                i.status.value,
                i.reach.value,
                i.revision,
                (i.timeline.verdict_at_ns - hurt.at_ns) / 1e9,
            )
            for i in incidents
        ]
        words = [v.text for v in self.observed.verdicts if v.window_end_ns >= hurt.at_ns - 30 * 10**9 and not v.clears]
        state = f"attempt {self.observed.newest_attempt}, step {self.observed.last_step}"
        return f"{state}, incidents {told}, verdicts {words[:20]}"

    def assert_healed_once(self, hurt: Hurt, incident: Incident) -> None:
        since = self.incidents_since(hurt)
        assert [i.incident_id for i in since] == [incident.incident_id], [(i.kind, i.culprits, i.status) for i in since]
        assert self.observed.newest_attempt == hurt.attempt + 1, "the generation rises by exactly one"
        for number in range(self._nodes):
            assert self.cluster.warden_status(number)["generation"] == hurt.attempt + 1
        rows = self.rows_of(incident.incident_id)
        verbs = [(row.verb, row.status) for row in rows if row.verb]
        if incident.reach is not Reach.ACT:
            assert {row.status for row in rows} == {ActionStatus.RECOMMENDED}, "the job had come back by itself"
            return
        assert verbs == [("restart", ActionStatus.STARTED), ("restart", ActionStatus.DONE)]
        assert [row.status for row in rows if not row.verb] == [ActionStatus.STARTED, ActionStatus.VERIFIED]

    def rows_of(self, incident_id: str) -> list[ActionResult]:
        """Ledger rows of an incident as published, each once, in the ledger's order."""
        with self.observed.lock:
            rows = {row.seq: row for row in self.observed.results if row.incident_id == incident_id and row.seq}
        return [rows[seq] for seq in sorted(rows)]

    # --- topics ----------------------------------------------------------------------------------------------------------

    def messages(self, topic: str) -> list[Message]:
        """Everything on a topic up to its end now."""
        consumer = KafkaConsumer(bootstrap_servers=[self.kafka.bootstrap], enable_auto_commit=False)
        try:
            partitions = [TopicPartition(topic, number) for number in range(topics.BY_NAME[topic].partitions)]
            consumer.assign(partitions)
            consumer.seek_to_beginning()
            ends = consumer.end_offsets(partitions)
            found: list[Message] = []
            deadline = time.monotonic() + LIMIT_S
            while any(consumer.position(p) < ends[p] for p in partitions):
                assert time.monotonic() < deadline, f"{topic} cannot be read to its end"
                for records in consumer.poll(timeout_ms=200).values():
                    found.extend(
                        Message(r.topic, r.partition, r.offset, r.key or b"", r.value or b"", r.timestamp)
                        for r in records
                    )
            return found
        finally:
            consumer.close()

    def records(self, topic: str) -> list[Record]:
        """Everything on a topic that can be read."""
        found = []
        for message in self.messages(topic):
            try:
                found.append(decode(message.value))
            except DecodeError:
                continue
        return found

    def assert_no_gaps(self, *kinds: type[Record]) -> None:
        """Sequence numbers of each speaker rise by one: nothing that was said is missing (repeats are allowed)."""
        for kind in kinds:
            numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
            for record in (record for topic in SAID_ON[kind] for record in self.records(topic)):
                if type(record) is kind and record.cluster == "demo":
                    numbers[record.node, record.boot_id].add(record.seq)
            assert numbers
            for (node, boot), found in numbers.items():
                missing = set(range(max(found) + 1)) - found
                assert not missing, (
                    f"{SAID_ON[kind]}: {node} (boot {boot}) said {sorted(missing)[:20]} of {max(found) + 1}, nobody has it"
                )

    def spooled(self, number: int) -> int:
        """Bytes that wait in a node's spool."""
        return sum(
            path.stat().st_size for path in (self.cluster.directory / self.cluster.node(number) / "spool").glob("*.seg")
        )

    def drained(self, numbers: Sequence[int] | None = None) -> None:
        """Wait until the spools are empty (each is cut to nothing after an acknowledgement)."""
        for number in range(self._nodes) if numbers is None else numbers:
            wait_for(f"the spool of n{number} to drain", lambda n=number: self.spooled(n) == 0)  # type: ignore[misc]


def get(url: str) -> str:
    """Body of a page; empty when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@contextmanager
def theatre(directory: Path) -> Iterator[Theatre]:
    made = Theatre(directory)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        for what, seconds in made.figures:
            print(f"{seconds:7.2f} s  {what}")


def text_of(value: Any) -> str:
    """For messages."""
    return json.dumps(value, default=str)[:2000]
