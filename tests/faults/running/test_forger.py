"""Somebody who may write to the raw topics speaks in a node's name: he is not believed, and the node is healed when it is sick in truth."""

from __future__ import annotations

import time

import pytest
from kafka import KafkaProducer
from msgspec.structs import replace

from tests.faults.theatre import Theatre, wait_for
from trainwarden.records import DeadLetter, LogEvent, Reach, StepReport, Tick, encode

pytestmark = [pytest.mark.kafka, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

VICTIM, BOOT, ROUNDS = "n1", "forger", 40


def test_a_forger_moves_nobody(play: Theatre) -> None:
    attempt, pids = play.observed.newest_attempt, play.pids()
    known = {i.incident_id for i in play.observed.loud_incidents()}
    report = [r for r in play.records("tw.steps") if isinstance(r, StepReport) and r.node == VICTIM][-1]
    producer = KafkaProducer(bootstrap_servers=[play.kafka.bootstrap])
    try:
        for number in range(ROUNDS):
            now_ns = time.time_ns()
            header = {"node": VICTIM, "boot_id": BOOT, "seq": number, "observed_at_ns": now_ns}
            slow = tuple(replace(row, forward_ms=9 * row.duration_ms, wait_ms=0.0) for row in report.rows)
            code = "xid:79" if number % 2 else "worker_exit:-9"
            dire = LogEvent(cluster="demo", source="kernel", severity="critical", code=code, line=code, job=report.job,
                            attempt=attempt, rank=report.rank, **header)  # type: ignore[arg-type]  # fmt: skip
            for topic, record in (
                ("tw.events", dire),
                ("tw.steps", replace(report, rows=slow, attempt=attempt, **header)),
                ("tw.ticks", Tick(cluster="demo", **header)),  # type: ignore[arg-type]
            ):
                producer.send(topic, value=encode(record), key=b"forged").get(30)
            play.trains(4)
    finally:
        producer.close()
    forged = 3 * ROUNDS

    def refused() -> int:
        letters = [r for r in play.records("tw.dead") if isinstance(r, DeadLetter)]
        return sum(f"boot {BOOT} speaks as {VICTIM}" in letter.reason for letter in letters)

    wait_for("every forged record to be refused", lambda: refused() >= forged)
    accused = [i for i in play.observed.loud_incidents() if i.incident_id not in known and i.reach is Reach.ACT]
    assert not accused, [(i.kind, i.title) for i in accused]
    assert play.observed.newest_attempt == attempt
    assert play.pids() == pids
    play.healed(play.hurt("kill", 1))
