"""A clock is stepped by an hour, the worker's or a collector's, forth or back: nobody is accused, and what is sick is found afterwards."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from collectors.simulated.encode import Encoder
from collectors.simulated.run import build
from collectors.simulated.spec import Spec
from streams.health import WorkerHealth
from streams.incidents import Correlator
from streams.service import BusWorker, read_all
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.config import from_table
from trainwarden.policy import Policy
from trainwarden.records import (
    DeadLetter,
    Entity,
    EntityKind,
    Incident,
    IncidentStatus,
    LogEvent,
    Reach,
    Record,
    StepReport,
    Tick,
    Verdict,
    decode,
    encode,
)
from trainwarden.selfmetrics import Metrics

SPEC = Spec(nodes=8, seed=2, jobs="8:ddp", rails=1, light_share=0.0, idle_share=0.0, disorder=0.0)
HOUR_NS = 3600 * NS_PER_S
STEPPED_S, RIGHT_S, SICK_S, END_S = 16, 34, 44, 48


def on_another_clock(record: Record, by_ns: int) -> Record:
    """The record as a collector with another clock would have dated it."""
    moved = {"observed_at_ns": record.observed_at_ns + by_ns}
    if isinstance(record, StepReport):
        rows = [
            replace(r, started_at_ns=r.started_at_ns + by_ns, arrived_at_ns=r.arrived_at_ns + by_ns)
            for r in record.rows
        ]
        return replace(record, rows=tuple(rows), **moved)
    return replace(record, **moved) if isinstance(record, Tick | LogEvent) else record


@pytest.mark.parametrize("whose", ["worker", "collector"])
@pytest.mark.parametrize("by_ns", [HOUR_NS, -HOUR_NS], ids=["forth", "back"])
def test_a_clock_that_is_stepped_by_an_hour_accuses_nobody(whose: str, by_ns: int) -> None:
    simulator = build(SPEC, "none", float(END_S))
    encoder, names = Encoder(simulator), simulator.layout.names
    clock, wrong, sick = SimulatedClock(SPEC.start_ns), names[3], names[5]
    bus = MemoryBus(clock)
    publisher = bus.publisher()
    worker = BusWorker(from_table({"cluster": SPEC.cluster, "streams": {"snapshot_s": 100_000}}), bus, clock)
    for interval in simulator.intervals(END_S):
        stepped = STEPPED_S <= interval.number < RIGHT_S
        if whose == "worker" and interval.number in (STEPPED_S, RIGHT_S):
            clock.step_ns(by_ns if stepped else -by_ns)
        for sent in encoder.messages(interval):
            record = decode(sent.value)
            if whose == "collector" and stepped and record.node == wrong:
                record = on_another_clock(record, by_ns)
            publisher.publish(sent.topic, sent.key, encode(record))
            if isinstance(record, Tick) and record.node == sick and interval.number == SICK_S:
                words = LogEvent(cluster=SPEC.cluster, node=sick, boot_id=record.boot_id, seq=10_000, observed_at_ns=record.observed_at_ns,
                                 source="kernel", severity="critical", code="xid:79", line="xid 79")  # fmt: skip
                publisher.publish("tw.events", sent.key, encode(words))
        clock.advance_ns(NS_PER_S)
        worker.step()
    incidents = [i for i in map(decode, (m.value for m in read_all(bus, "tw.incidents"))) if isinstance(i, Incident)]
    acted_on = {culprit.node or culprit.name for i in incidents if i.reach is Reach.ACT for culprit in i.culprits}
    assert acted_on == {sick}, [(i.kind, i.title, i.reach) for i in incidents]
    letters = [r for r in map(decode, (m.value for m in read_all(bus, "tw.dead"))) if isinstance(r, DeadLetter)]
    told = {letter.reason.rpartition("set the clock of ")[2] for letter in letters}
    behind = whose == "worker" and by_ns < 0  # whoever else is off is corrected, and loses nothing
    assert told == ({"its host", "this worker's host"} if behind else set())
    ticks = sum(len(log) for log in bus.partitions("tw.ticks"))
    assert ticks == END_S * SPEC.nodes
    assert {p: o for p, o in worker.stage.positions.items() if "ticks" in p} == {
        f"tw.ticks/{n}": len(log) for n, log in enumerate(bus.partitions("tw.ticks")) if log
    }


def test_an_incident_of_an_hour_ahead_is_taken_back_now() -> None:
    """It was opened on the wrong clock; nothing of it may wait for the hour to come."""
    correlator = Correlator("c", Policy())
    node = Entity(EntityKind.TELEMETRY, "n", "n")

    def say(at_ns: int, clears: bool = False) -> None:
        verdict = Verdict(verdict_id=str(at_ns), detector="hang", kind="telemetry_lost", entity=node, observed_at_ns=at_ns,
                          reach=Reach.NOTIFY, onset_at_ns=at_ns, window_end_ns=at_ns, clears=clears, confidence=0.9)  # fmt: skip
        correlator.on_verdict(verdict, at_ns)

    now_ns = SPEC.start_ns
    correlator.tick(now_ns)
    say(now_ns + HOUR_NS)
    correlator.tick(now_ns + HOUR_NS)
    say(now_ns + NS_PER_S, clears=True)
    told = [incident for second in range(1, 120) for incident in correlator.tick(now_ns + second * NS_PER_S)]
    assert [i.status for i in told][-1] is IncidentStatus.CLOSED
    assert told[-1].timeline.verdict_at_ns <= now_ns + NS_PER_S


def test_a_worker_says_that_it_is_in_time_again_though_its_clock_was_set_back() -> None:
    metrics = Metrics("worker")
    health = WorkerHealth(from_table({}), metrics)
    metrics.set("tw_tick_age_seconds", 3600.0)
    said = [
        decode(o.value).clears
        for second in range(60)
        for o in health.outputs(SPEC.start_ns + HOUR_NS + second * NS_PER_S, {})
    ]
    assert said == [False]
    metrics.set("tw_tick_age_seconds", 1.0)
    said = [
        decode(o.value).clears for second in range(60) for o in health.outputs(SPEC.start_ns + second * NS_PER_S, {})
    ]
    assert said == [True]
