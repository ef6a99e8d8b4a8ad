"""One demonstration from the first process to the judgement."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainwarden.bus import connect
from trainwarden.clock import NS_PER_S
from trainwarden.demo.cluster import Cluster, Layout
from trainwarden.demo.faults.base import Fault
from trainwarden.demo.judge import Injection, Outcome, finished, judge
from trainwarden.demo.network import Loopback, Namespaces, Network
from trainwarden.demo.observer import Observer
from trainwarden.demo.receiver import Receiver
from trainwarden.errors import UnavailableError
from trainwarden.records import ActionResult, Incident, Plan, Verdict

WARM_STEPS = 150
START_S = 120.0
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
    rng = random.Random(layout.seed)
    network: Network = Namespaces() if fault.needs_namespaces else Loopback()
    receiver = Receiver()
    receiver.start()
    layout = _with_webhook(layout, receiver)
    cluster = Cluster(layout, network, say)
    number = rng.randrange(layout.nodes)
    observer: Observer | None = None
    try:
        say(
            f"starting broker, store, worker, actions, {layout.nodes} collectors and {layout.nodes} ranks in {cluster.directory}"
        )
        cluster.start()
        observer = Observer(connect(cluster.kafka_url), _narrator(say))
        observer.start()
        _wait_for_steps(cluster, observer, say)
        injection = _inject(cluster, observer, fault, number, rng)
        say(
            f"FAULT {fault.name} on {injection.node} (rank {injection.rank}) at step {injection.step}: {injection.sentence}"
        )
        _watch(cluster, observer, fault, number, injection, quiet_s if not fault.expectation.kinds else deadline_s)
        result = Run(judge(observer.observed, fault.expectation, injection), injection, observer, receiver, cluster)
        if before_stop is not None:
            before_stop(result)
        return result
    finally:
        fault.undo(cluster, number)
        if observer is not None:
            observer.stop()
        cluster.stop()
        receiver.stop()


def _with_webhook(layout: Layout, receiver: Receiver) -> Layout:
    from dataclasses import replace

    return replace(layout, webhook_url=receiver.url)


def _wait_for_steps(cluster: Cluster, observer: Observer, say: Say) -> None:
    """Wait until every rank has stepped for a while, so that detectors have something to compare with."""
    cluster.wait(lambda: observer.observed.last_step >= 0, START_S, "the ranks did not begin to step")
    say(f"all {cluster.layout.nodes} ranks are training; warming up for {WARM_STEPS} steps")
    cluster.wait(
        lambda: observer.observed.last_step >= WARM_STEPS, START_S, f"the ranks did not reach step {WARM_STEPS}"
    )


def _inject(cluster: Cluster, observer: Observer, fault: Fault, number: int, rng: random.Random) -> Injection:
    observed = observer.observed
    attempt, node = observed.newest_attempt, cluster.node(number)
    rank = next((r for (a, r), where in observed.node_of_rank.items() if a == attempt and where == node), -1)
    fault.prepare(cluster, number)
    at_ns = time.time_ns()
    sentence = fault.inject(cluster, number, rng)
    return Injection(fault.name, node, rank, at_ns, observed.last_step, attempt, sentence)


def _watch(
    cluster: Cluster, observer: Observer, fault: Fault, number: int, injection: Injection, limit_s: float
) -> None:
    """Return when the run can be judged or its time is over; a fault-free run always takes its whole time."""
    begun = time.monotonic()
    while (seconds := time.monotonic() - begun) < limit_s:
        fault.progressed(cluster, number, seconds)
        if fault.expectation.kinds and finished(
            observer.observed, fault.expectation, injection, SETTLE_S, time.time_ns()
        ):
            return
        cluster.children.require_alive()
        time.sleep(0.1)


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


def elapsed_s(since_ns: int) -> float:
    """Seconds since a wall-clock moment."""
    return (time.time_ns() - since_ns) / NS_PER_S


def need(condition: bool, sentence: str) -> None:
    """Raise `UnavailableError` with `sentence` unless `condition`."""
    if not condition:
        raise UnavailableError(sentence)
