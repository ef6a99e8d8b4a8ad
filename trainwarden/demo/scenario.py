"""One demonstration from the first process to the judgement."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from trainwarden.bus import connect
from trainwarden.demo.cluster import Cluster, Layout
from trainwarden.demo.faults.base import Expectation, Fault
from trainwarden.demo.judge import Injection, Outcome, finished, judge
from trainwarden.demo.network import Loopback, Namespaces, Network
from trainwarden.demo.observer import Observer
from trainwarden.demo.processes import uninterrupted
from trainwarden.demo.receiver import Receiver
from trainwarden.records import ActionResult, Incident, Plan, Verdict

WARM_STEPS = 150
START_S = 120.0
STORE_S = 60.0
SETTLE_S = 8.0
"""After a recommendation the job is watched for so long: nothing may be done to it."""


@dataclass
class Run:
    """A finished demonstration."""

    outcome: Outcome
    injection: Injection
    observer: Observer
    receiver: Receiver
    cluster: Cluster


Say = Callable[[str], None]


def run(
    layout: Layout,
    fault: Fault,
    say: Say,
    quiet_s: float = 900.0,
    deadline_s: float = 120.0,
    before_stop: Callable[[Run], None] | None = None,
) -> Run:
    """Start everything, hurt one node chosen by the seed, wait for healing, judge, stop everything.

    Parameters
    ----------
    quiet_s
        Length of a run without fault.
    deadline_s
        A fault not healed by then is judged as it stands.
    before_stop
        Called with the run while everything still runs (to ask the store, to look at the status page).
    """
    receiver = Receiver()
    receiver.start()
    network: Network = Namespaces() if fault.needs_namespaces else Loopback()
    cluster = Cluster(replace(layout, webhook_url=receiver.url), network, say)
    stage = _Stage(cluster, fault, fault.expectation.under(layout.mode), random.Random(layout.seed), say)
    try:
        stage.begin()
        injection = stage.hurt()
        stage.watch(injection, deadline_s if stage.expectation.kinds else quiet_s)
        stage.wait_for_store()
        outcome = judge(stage.observer.observed, stage.expectation, injection)
        result = Run(outcome, injection, stage.observer, receiver, cluster)
        if before_stop is not None:
            before_stop(result)
        return result
    finally:
        with uninterrupted():
            stage.end()
            receiver.stop()


class _Stage:
    """The cluster with its observer and the node to be hurt."""

    def __init__(self, cluster: Cluster, fault: Fault, expectation: Expectation, rng: random.Random, say: Say) -> None:
        self.cluster, self.fault, self.expectation = cluster, fault, expectation
        self._rng, self._say = rng, say
        self._number = rng.randrange(cluster.layout.nodes)
        self.observer = Observer(connect(cluster.kafka_url), _narrator(say))

    def begin(self) -> None:
        """Start everything and let every rank step for a while, so that detectors have something to compare with."""
        nodes, where = self.cluster.layout.nodes, self.cluster.directory
        self._say(f"starting broker, store, worker, actions, {nodes} collectors and {nodes} ranks in {where}")
        self.cluster.start()
        self.observer.start()
        observed, wait = self.observer.observed, self.cluster.wait
        wait(lambda: observed.last_step >= 0, START_S, "the ranks did not begin to step")
        self._say(f"all {nodes} ranks are training; warming up for {WARM_STEPS} steps")
        wait(lambda: observed.last_step >= WARM_STEPS, START_S, f"the ranks did not reach step {WARM_STEPS}")

    def hurt(self) -> Injection:
        """Inject the fault."""
        observed, node = self.observer.observed, self.cluster.node(self._number)
        attempt = observed.newest_attempt
        rank = next((r for (a, r), where in observed.node_of_rank.items() if a == attempt and where == node), -1)
        self.fault.prepare(self.cluster, self._number)
        at_ns = time.time_ns()
        sentence = self.fault.inject(self.cluster, self._number, self._rng)
        injection = Injection(self.fault.name, node, rank, at_ns, observed.last_step, attempt, sentence)
        self._say(f"FAULT {self.fault.name} on {node} (rank {rank}) at step {injection.step}: {sentence}")
        return injection

    def watch(self, injection: Injection, limit_s: float) -> None:
        """Return when the run can be judged or its time is over; a fault-free run always takes its whole time."""
        begun = time.monotonic()
        while (seconds := time.monotonic() - begun) < limit_s:
            self.fault.progressed(self.cluster, self._number, seconds)
            observed = self.observer.observed
            if self.expectation.kinds and finished(observed, self.expectation, injection, SETTLE_S, time.time_ns()):
                return
            self.cluster.children.require_alive()
            time.sleep(0.1)

    def wait_for_store(self) -> None:
        """Let the store catch up with what was told, so that it holds the whole story when it stops; it may be late, not for ever."""
        told = {i.incident_id: i.status.value for i in self.observer.observed.loud_incidents()}
        query = "select incident_id, status from incidents format TabSeparated"
        begun = time.monotonic()
        while told and time.monotonic() - begun < STORE_S:
            rows = [line.split("\t") for line in self.cluster.ask_store(query).splitlines()]
            if told.items() <= {row[0]: row[-1] for row in rows}.items():
                return
            time.sleep(0.2)

    def end(self) -> None:
        """Take everything away; one thing that fails does not keep the others."""
        with ExitStack() as ending:
            ending.callback(self.cluster.stop)
            ending.callback(self.observer.stop)
            ending.callback(self.fault.undo, self.cluster, self._number)


def _narrator(say: Say) -> Callable[[object], None]:
    """Turns records into lines for the terminal."""

    def on_record(record: object) -> None:
        line = _line(record)
        if line:
            say(line)

    return on_record


def _line(record: object) -> str:
    if isinstance(record, Verdict) and record.kind != "threshold":
        word = "clears" if record.clears else "says"
        return f"verdict   {record.detector} {word} {record.kind} on {record.entity}: {record.text}"
    if isinstance(record, Incident):
        culprit = ", ".join(map(str, record.culprits)) or "nobody"
        return f"incident  r{record.revision} {record.status}: {record.kind}, culprit {culprit} ({record.confidence:.0%} sure)"
    if isinstance(record, Plan):
        return f"plan      {' → '.join(f'{s.verb} {s.target}' for s in record.steps)}  [{record.mode}]"
    if isinstance(record, ActionResult):
        return f"action    {record.verb or 'plan'} {record.target} {record.status} {record.reason}"
    return ""
