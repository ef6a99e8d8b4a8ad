"""Malformed bytes and impossible records on every topic while the job runs: dead letters with a reason, nobody dies, a kill is healed."""

from __future__ import annotations

import math
import random
import time
from array import array
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from kafka import KafkaProducer

from tests.faults.theatre import Theatre, wait_for
from trainwarden import topics
from trainwarden.records import (
    Block,
    Catalog,
    DeadLetter,
    Entity,
    EntityKind,
    FrameCut,
    Incident,
    LogEvent,
    PolicyChange,
    Record,
    StateSnapshot,
    StepReport,
    StepRow,
    Tick,
    TopologyEvent,
    Verdict,
    encode,
)

pytestmark = [pytest.mark.kafka, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

WORKERS_OWN = {topics.CUTS.name, topics.STATE.name}
"""Read only by a worker that starts."""
READERS = 3
"""No topic has more readers that could write a dead letter about a message."""
NAN, INF = math.nan, math.inf
GIANT_BYTES = 1_000_000


def unreadable(topic: str) -> dict[str, bytes]:
    """Bytes that are no record of this topic."""
    whole = encode(Tick(cluster="poison", node="n0", blocks=(Block("host", "c", ("a",), b"\0" * 8),)))
    fields = msgspec.msgpack.decode(whole)
    wrong: Record = (
        LogEvent(cluster="poison") if topic not in (topics.EVENTS.name, topics.LOGS.name) else Tick(cluster="poison")
    )
    found = {
        "random bytes": random.Random(topic).randbytes(64),
        "truncated": whole[:-5],
        "unknown tag": msgspec.msgpack.encode(["nosuch", *fields[1:]]),
        "schema 2": msgspec.msgpack.encode([fields[0], 2, *fields[2:]]),
        "giant": random.Random(topic).randbytes(GIANT_BYTES),
        "bad text": whole.replace(b"poison", b"\xff\xfe\xff\xfe\xff\xfe"),
        "JSON": b'{"node": "n0", "step": 1}',
    }
    if topic != topics.DEAD.name:
        found["wrong kind"] = encode(wrong)
    return found


def impossible() -> dict[str, tuple[str, Record]]:
    """Records that can be decoded and cannot be true."""
    now_ns = time.time_ns()
    header: dict[str, Any] = {"cluster": "poison", "boot_id": "p"}
    row = StepRow(-1, "train", -5, INF, NAN, -INF, INF, NAN, -1.0, INF, -(2**62), INF, INF, NAN, INF, -9, False, INF)
    odd, nobody = Block("host", "no-such-catalogue", ("a", "b", "c"), b"\0" * 7), Block("host", "c", (), b"\0" * 8)
    node = Entity(EntityKind.NODE, "")
    floats = array("f", [NAN, INF, -INF, 3e38]).tobytes()
    return {
        "block that does not divide": ("tw.ticks", Tick(node="p0", observed_at_ns=now_ns, blocks=(odd,), **header)),
        "block without devices": ("tw.ticks", Tick(node="p1", observed_at_ns=now_ns, blocks=(nobody,), **header)),
        "negative time": ("tw.ticks", Tick(node="p2", observed_at_ns=-(2**62), **header)),
        "time of 1970": ("tw.ticks", Tick(node="p3", observed_at_ns=1, spooled=True, **header)),
        "far future": ("tw.ticks", Tick(node="p4", observed_at_ns=2**63 - 1, spooled=True, **header)),
        "an hour ahead": ("tw.ticks", Tick(node="p5", observed_at_ns=now_ns + 3600 * 10**9, spooled=True, **header)),
        "values that are none": (
            "tw.ticks",
            Tick(node="p6", observed_at_ns=now_ns, blocks=(Block("poison", "poison", ("a", "b"), floats),), **header),
        ),
        "catalogue without name": ("tw.catalog", Catalog(catalog_id="", family="host", **header)),
        "steps that are none": (
            "tw.steps",
            StepReport(node="p7", job="poison", attempt=-1, rank=-7, world=2**40, observed_at_ns=-1, rows=(row, row), **header),
        ),
        "steps of nobody": ("tw.steps", StepReport(observed_at_ns=now_ns, rows=(row,), **header)),
        "log without time": ("tw.logs", LogEvent(node="p8", observed_at_ns=-1, repeat=-1, severity="?", code="xid:", rank=-2, **header)),
        "event without time": ("tw.events", LogEvent(node="p9", observed_at_ns=-1, severity="?", code="xid:", rank=-2, **header)),
        "topology of nothing": ("tw.topology", TopologyEvent(entity="", valid_from_ns=-1, ranks=((-1, "", ""),), **header)),
        "topology of a cow": ("tw.topology", TopologyEvent(entity="cow:berta", origin="moon", **header)),
        "verdict of nothing": (
            "tw.verdicts",
            Verdict(kind="poison", score=INF, confidence=NAN, onset_at_ns=-1, window_end_ns=-1, entity=node, **header),
        ),
        "incident without name": ("tw.incidents", Incident(observed_at_ns=now_ns, **header)),
        "mode that is none": ("tw.policy", PolicyChange(key="mode", value="berserk", **header)),
        "snapshot that is none": ("tw.state", StateSnapshot(owner="detect/0/0", observed_at_ns=2**62, payload=b"\xc1", **header)),
        "cut that is none": ("tw.cuts", FrameCut(node="detect", seq=-5, now_ns=-1, positions={"tw.ticks/0": 2**62, "": -1}, **header)),
    }  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """Where a poison lies."""

    name: str
    topic: str
    partition: int
    offset: int


def send(play: Theatre) -> list[Sent]:
    producer = KafkaProducer(bootstrap_servers=[play.kafka.bootstrap], max_request_size=2 * GIANT_BYTES)
    try:
        sent = []
        for topic in topics.ALL:
            for name, value in unreadable(topic.name).items():
                meta = producer.send(topic.name, value=value, key=b"poison").get(30)
                sent.append(Sent(name, topic.name, meta.partition, meta.offset))
        for name, (to, record) in impossible().items():
            producer.send(to, value=encode(record), key=name.encode()).get(30)
        return sent
    finally:
        producer.close()


def letters(play: Theatre) -> dict[tuple[str, int, int], list[DeadLetter]]:
    found: dict[tuple[str, int, int], list[DeadLetter]] = {}
    for record in play.records("tw.dead"):
        if isinstance(record, DeadLetter):
            found.setdefault((record.topic, record.partition, record.offset), []).append(record)
    return found


def unanswered(play: Theatre, sent: list[Sent]) -> list[Sent]:
    found = letters(play)
    return [s for s in sent if (s.topic, s.partition, s.offset) not in found]


def test_malformed_messages_on_every_topic_are_dead_letters_and_nothing_else_happens(play: Theatre) -> None:
    pids = play.pids()
    sent = send(play)
    live = [s for s in sent if s.topic not in WORKERS_OWN]
    try:
        wait_for("a dead letter for every one", lambda: not unanswered(play, live), 60)
    except AssertionError as error:
        raise AssertionError(f"no dead letter for {unanswered(play, live)}") from error
    found = letters(play)
    for one in live:
        about = found[one.topic, one.partition, one.offset]
        assert len(about) <= READERS, f"{len(about)} letters about {one}"
        assert all(letter.reason for letter in about), one
        assert all(len(letter.payload) <= 256 * 1024 for letter in about), one
    play.trains()
    assert play.pids() == pids, "somebody died of it"
    play.healed(play.hurt("kill", 1))
    assert play.pids() == pids, "somebody died of it"


def test_a_worker_starts_over_poison_in_its_own_topics(play: Theatre) -> None:
    """Runs after the messages of the test above: the successor reads cuts, snapshots and incidents from the topics."""
    play.child("worker").kill()
    play.supervise()
    play.worker_leads()
    mine = [s for s in send(play) if s.topic in WORKERS_OWN]
    play.child("worker").kill()
    play.supervise()
    play.worker_leads()
    wait_for("dead letters from the worker's own topics", lambda: not unanswered(play, mine), 60)
    play.healed(play.hurt("freeze", 0))
