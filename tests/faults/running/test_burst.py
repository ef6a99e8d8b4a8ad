"""50,000 events at once (`TRAINWARDEN_BURST_S=60`: for a minute), a consumer that does not keep up: all is drained, memory stays flat."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.faults.running.test_hung import hung
from tests.faults.theatre import Theatre, get, wait_for
from trainwarden import topics
from trainwarden.bus.produce import VERSIONS, Place, Waiting
from trainwarden.bus.solo import Line, Queue
from trainwarden.records import LogEvent, encode

BURST_S = int(os.environ.get("TRAINWARDEN_BURST_S", "1"))
PER_S = 50_000
GROWN_MB = 400.0
"""Of the worker and of the store, at the height of it."""
pytestmark = [pytest.mark.kafka, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600 + 30 * BURST_S)]


def burst(play: Theatre, node: str) -> int:
    """Events of a node that nobody knows, `PER_S` a second, all made before: Python does not make and send so many at once."""
    requests = [_request(node, second * PER_S, PER_S) for second in range(BURST_S)]
    host, _, port = play.kafka.bootstrap.partition(":")
    begun_s = time.monotonic()
    line = Line(host, int(port), VERSIONS[1], begun_s + 10)
    try:
        for second, rounds in enumerate(requests):
            for batches in rounds:
                line.send(batches, time.monotonic() + 30)
                answers = line.receive(time.monotonic() + 30)
                assert not any(answer.error_code for answer in answers.values()), answers
            wait_for("the next second", lambda: time.monotonic() - begun_s >= second + 1)  # noqa: B023
    finally:
        line.close()
    play.figures.append((f"burst of {PER_S * BURST_S} events sent", time.monotonic() - begun_s))
    return PER_S * BURST_S


def _request(node: str, first: int, count: int) -> list[dict[Place, bytes]]:
    """Events of one second as Kafka's batches, one of each partition at a time."""
    queues = [Queue() for _ in range(topics.BY_NAME["tw.logs"].partitions)]
    for number in range(first, first + count):
        event = LogEvent(cluster="demo", node=node, boot_id=node, seq=number, observed_at_ns=time.time_ns(), source="burst",
                         line=f"line {number} of a burst", template_id="burst")  # fmt: skip
        queues[number % len(queues)].messages.append(
            Waiting("tw.logs", node.encode(), encode(event), time.time_ns() // 1_000_000)
        )
    rounds = []
    while any(queue.messages for queue in queues):
        rounds.append({("tw.logs", number): queue.batch() for number, queue in enumerate(queues) if queue.messages})
        for _, partition in rounds[-1]:
            queues[partition].taken()
    return rounds


def memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


def stored(play: Theatre, node: str) -> int:
    return int(play.cluster.ask_store(f"SELECT count() FROM log_events WHERE node = '{node}'") or 0)


def worker_lag(play: Theatre) -> float:
    """Records of the logs topic that are in no frame yet; infinite while it does not say."""
    page = get(f"http://127.0.0.1:{play.cluster.ports.worker}/metrics")
    told = [line for line in page.splitlines() if line.startswith("tw_lag_records") and 'topic="tw.logs"' in line]
    return float(told[0].rpartition(" ")[2]) if told else float("inf")


def test_a_burst_is_drained_while_a_fault_is_healed(play: Theatre) -> None:
    pids = play.pids()
    before_mb = {name: memory_mb(pids[name]) for name in ("worker", "store")}
    highest_mb = dict(before_mb)
    count = burst(play, "burst")
    begun_s = time.monotonic()

    def drained() -> bool:
        for name, highest in tuple(highest_mb.items()):
            highest_mb[name] = max(highest, memory_mb(pids[name]))
        return stored(play, "burst") >= count and worker_lag(play) < PER_S / 100

    wait_for("the burst to be drained", drained, 300 + 10 * BURST_S)
    play.figures.append(("burst drained by worker and store", time.monotonic() - begun_s))
    play.figures += [(f"{name} grew by MB", highest_mb[name] - before_mb[name]) for name in before_mb]
    assert stored(play, "burst") == count
    assert all(highest_mb[name] < before_mb[name] + GROWN_MB for name in before_mb), (before_mb, highest_mb)
    play.healed(play.hurt("kill", 2))
    assert play.pids() == pids, "somebody died of it"


def test_a_consumer_that_does_not_keep_up_holds_up_nobody(play: Theatre) -> None:
    """The store stands still while the burst comes in: it reads on where it stopped, in portions."""
    store = play.child("store")
    before_mb = memory_mb(store.pid)
    with hung(store):
        count = burst(play, "slow")
        play.healed(play.hurt("kill", 1))
    highest_mb = [before_mb]

    def drained() -> bool:
        highest_mb[0] = max(highest_mb[0], memory_mb(store.pid))
        return stored(play, "slow") >= count

    wait_for("the store to catch up", drained, 300 + 10 * BURST_S)
    assert stored(play, "slow") == count
    assert highest_mb[0] < before_mb + GROWN_MB
