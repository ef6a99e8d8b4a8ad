"""What each hop of the stream path costs, beside a plain confluent-kafka loop over the same bytes in the same run.

    python -m benchmarks.hops [--nodes 1250] [--ticks 12] [--rounds 3] [--plain-python PYTHON] [--json FILE]

Ticks of a simulated cluster of `--nodes` nodes with eight GPUs go through Apache Kafka on this machine. Shown: microseconds of processor
time a message (one tick of one node, some 450 values) for the producer, the broker (writing, reading), the consumers of worker and store,
decoding, alignment, all detectors, and the embedded store: medians over the rounds, in which ours and the plain loop take turns. The plain
loop (`benchmarks._plain_kafka`) decodes, makes one array of a tick and keeps one mean and deviation for every value; it stores nothing.

The plain loop needs confluent-kafka, which the product does not: it runs in the interpreter that `--plain-python` names (default: this
one). Where that has none, its column is left out and the table says so. No bar: these figures feed `docs/scale.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks._stream import seconds
from benchmarks.linear import Worker
from collectors.simulated.encode import Sent
from streams.reading import assign, consumer_of
from streams.store.chdb_server import ChdbServer
from streams.store.service import prepare
from streams.store.writer import BatchLimits, StoreWriter
from trainwarden import topics
from trainwarden.bus import Bus, connect
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.config import from_table
from trainwarden.embedded.kafka import ApacheKafka
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import Topic

WARM_TICKS = 6
STORE_BATCH_S = 10
"""Age of the store's batches with so many nodes (`streams.store.writer.BatchLimits`)."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
HOPS = (
    "producer",
    "broker, writing",
    "broker, reading",
    "consumer",
    "consumer of the store",
    "decode",
    "align",
    "detect",
    "store",
)
MEANING = {
    "producer": "kafka-python, lz4, acked every second",
    "consumer": "the worker's: aiokafka",
    "consumer of the store": "kafka-python",
    "decode": "typed, checked, buffered",
    "align": "duplicates, clocks, grid, matrices",
    "detect": "all detectors",
    "store": "rows, Arrow, chDB, merges",
}
Ticks = list[list[Sent]]


class Meter:
    """Processor time of this process and of the broker, by hop, a message."""

    def __init__(self, broker: int) -> None:
        self._broker = broker
        self.us: dict[str, float] = {}

    @contextlib.contextmanager
    def hop(self, name: str, count: int, broker: str = "") -> Iterator[None]:
        """Count what happens inside as `count` messages of hop `name`, and the broker's part as hop `broker`."""
        began_s, there_s = time.process_time(), broker_s(self._broker)
        yield
        self.us[name] = 1e6 * (time.process_time() - began_s) / count
        if broker:
            self.us[broker] = 1e6 * (broker_s(self._broker) - there_s) / count


def broker_s(pid: int) -> float:
    """Processor seconds of the broker so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def count_of(ticks: Ticks) -> int:
    """Messages in all."""
    return sum(map(len, ticks))


def produce(bus: Bus, topic: str, ticks: Ticks) -> None:
    """As a collector does, waiting for the broker after each second."""
    publisher = bus.publisher()
    for tick in ticks:
        for sent in tick:
            publisher.publish(topic, sent.key, sent.value)
        publisher.flush(60.0)
    publisher.close()


async def consume_as_worker(url: str, topic: str, count: int) -> int:
    """Everything on a topic, as `streams.app` reads it; returns the bytes."""
    size = seen = 0
    async with consumer_of(from_table({"kafka": {"url": url}}), None) as consumer:
        await assign(consumer, [topic])
        while seen < count:
            for records in (await consumer.getmany(timeout_ms=500, max_records=5000)).values():
                seen += len(records)
                size += sum(len(record.value) for record in records)
    return size


def consume_as_store(bus: Bus, topic: str, count: int) -> None:
    """Everything on a topic, as the store writer reads it."""
    subscriber, seen = bus.subscriber((topic,)), 0
    while seen < count:
        seen += len(subscriber.poll(0.5))
    subscriber.close()


class Store:
    """The embedded store and its writer, fed from memory."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        server = stack.enter_context(ChdbServer(directory, port=0))
        client = server.direct(stack.enter_context(contextlib.closing(prepare(f"{server.url}/trainwarden"))))
        self._clock = SimulatedClock(time.time_ns())
        self._bus = MemoryBus(self._clock)
        limits = BatchLimits(age_ms=1000 * STORE_BATCH_S)
        self._writer = StoreWriter(self._bus, client, self._clock, Metrics("store"), "sim", limits)

    def take(self, seconds_of: Ticks) -> int:
        """Write it all; returns the rows."""
        rows = 0
        for sent in seconds_of:
            for one in sent:
                self._bus.append(one.topic, one.key, one.value)
            self._clock.advance_ns(NS_PER_S)
            rows += self._writer.cycle()
        return rows + self._writer.drain()


def ours(kafka: ApacheKafka, bus: Bus, topic: str, ticks: Ticks) -> dict[str, float]:
    """One round of our clients."""
    meter, count = Meter(kafka.pid), count_of(ticks)
    with meter.hop("producer", count, "broker, writing"):
        produce(bus, topic, ticks)
    with meter.hop("consumer", count, "broker, reading"):
        asyncio.run(consume_as_worker(f"kafka://{kafka.bootstrap}", topic, count))
    with meter.hop("consumer of the store", count):
        consume_as_store(bus, topic, count)
    return meter.us


def computed(worker: Worker, store: Store, everything: Ticks, broker: int) -> dict[str, float]:
    """One round of what is done with the messages: ticks are counted, other records go along in `everything` where they are needed."""
    count = count_of(everything)
    spent = [worker.second(sent) for sent in everything]
    found = {part: 1000 * sum(row[part] for row in spent) / count for part in ("decode", "align", "detect")}
    meter = Meter(broker)
    with meter.hop("store", count):
        store.take(everything)
    return found | meter.us


def lacks_confluent(python: str) -> str:
    """Why the plain loop cannot run there; empty when it can."""
    try:
        asked = subprocess.run(
            [python, "-c", "import confluent_kafka, msgspec, numpy"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"{python} cannot be run ({error.strerror})"
    return asked.stderr.strip().splitlines()[-1] if asked.returncode else ""


def plain(python: str, kafka: ApacheKafka, topic: str, path: Path) -> dict[str, float]:
    """One round of the plain loop."""
    command = [python, "-m", "benchmarks._plain_kafka", kafka.bootstrap, topic, str(path), str(kafka.pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(f"the plain loop ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(nodes: int, ticks: int, rounds: int, python: str) -> dict[str, Any]:
    """Medians over rounds, by hop and by who did it."""
    why_not = lacks_confluent(python)
    told = list(seconds(nodes, WARM_TICKS + ticks * rounds, start_ns=time.time_ns() // NS_PER_S * NS_PER_S))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tw-hops-", ignore_cleanup_errors=True)))
        kafka = stack.enter_context(ApacheKafka(folder / "kafka"))
        worker, store = Worker(SimulatedClock(time.time_ns() // NS_PER_S * NS_PER_S)), Store(folder / "store", stack)
        bus = connect(f"kafka://{kafka.bootstrap}")
        computed(worker, store, [_useful(second) for second in told[:WARM_TICKS]], kafka.pid)
        us: dict[str, list[dict[str, float]]] = {"ours": [], "plain": []}
        for number in range(-1, rounds):
            first = WARM_TICKS + ticks * max(number, 0)
            mine = [_only_ticks(second) for second in told[first : first + ticks]]
            names = [Topic(f"bench.{who}.{number + 1}", "node", "Tick", partitions=4) for who in us]
            bus.ensure_topics(names)
            found = ours(kafka, bus, names[0].name, mine)
            other = plain(python, kafka, names[1].name, _file(folder, mine)) if not why_not else {}
            if number >= 0:  # the one before only warms the broker up
                us["ours"].append(found | computed(worker, store, mine, kafka.pid))
                us["plain"].append(other)
    return {"nodes": nodes, "ticks": ticks, "rounds": rounds, "messages": count_of(mine), "bytes": _bytes(mine), "plain_left_out": why_not,
            "us": {who: _medians(rows) for who, rows in us.items()}}  # fmt: skip


def _only_ticks(second: list[Sent]) -> list[Sent]:
    return [sent for sent in second if sent.topic == topics.TICKS.name]


def _useful(second: list[Sent]) -> list[Sent]:
    """What ticks need beside them: their catalogues, and the topology."""
    return [sent for sent in second if sent.topic in (topics.TICKS.name, topics.CATALOG.name, topics.TOPOLOGY.name)]


def _file(folder: Path, ticks: Ticks) -> Path:
    path = folder / "messages"
    path.write_bytes(msgspec.msgpack.encode([[(sent.key, sent.value) for sent in tick] for tick in ticks]))
    return path


def _bytes(ticks: Ticks) -> int:
    return round(sum(len(sent.value) for tick in ticks for sent in tick) / count_of(ticks))


def _medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {hop: round(statistics.median(row[hop] for row in rows), 1) for hop in HOPS if rows and hop in rows[0]}


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    mine, other = result["us"]["ours"], result["us"]["plain"]
    head = (
        f"{result['nodes']} nodes, {result['rounds']} rounds of {result['messages']} ticks of {result['bytes']} bytes"
    )
    lines = [
        f"{head}; processor microseconds a message",
        f"{'hop':24} {'ours':>8}" + (f" {'plain':>8} {'ratio':>6}" if other else ""),
    ]
    for hop in HOPS:
        beside = (
            f" {other[hop]:8.1f} {mine[hop] / max(other[hop], 0.1):6.1f}"
            if hop in other
            else " " * (16 if other else 0)
        )
        lines.append(f"{hop:24} {mine[hop]:8.1f}{beside}  {MEANING.get(hop, '')}".rstrip())
    lines.append(f"{'all':24} {sum(mine.values()):8.1f}" + (f" {sum(other.values()):8.1f}" if other else ""))
    if result["plain_left_out"]:
        lines.append(f"the plain confluent-kafka loop is LEFT OUT: {result['plain_left_out']}; "
                     "install confluent-kafka for the interpreter that --plain-python names")  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--ticks", type=int, default=12, help="of every node, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--plain-python", default=sys.executable, help="interpreter with confluent-kafka for the plain loop"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the result here too")
    given = parser.parse_args()
    result = measure(given.nodes, given.ticks, given.rounds, given.plain_python)
    print(table(result))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
