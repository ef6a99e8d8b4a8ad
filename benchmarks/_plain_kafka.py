"""The plain loop that `benchmarks.hops` compares with (confluent-kafka, MessagePack, one numpy array), in an interpreter that has them.

    python -m benchmarks._plain_kafka BOOTSTRAP TOPIC MESSAGES BROKER_PID

Same bytes, same broker, same durability (acks of all) and compression. What it does not do is the point: no check of what it reads, no
duplicates, clocks or grid, no names, one running mean and deviation for every value and nothing else. Prints JSON: processor microseconds
a message by hop.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from confluent_kafka import Consumer, Producer, TopicPartition

PARTITIONS = 4
TICK_BLOCKS = 8
"""Place of a tick's blocks in its array: tag, six of the header, the interval, then these."""
VALUES = 3
"""Place of the samples in a block."""


class Ewma:
    """Mean and deviation of every value as it goes; beyond four deviations is odd."""

    def __init__(self) -> None:
        self._mean: Any = None
        self._square: Any = None
        self.odd = 0

    def see(self, values: Any) -> None:
        """One tick of all nodes."""
        if self._mean is None or self._mean.shape != values.shape:
            self._mean, self._square = values.copy(), np.zeros_like(values)
        away = values - self._mean
        self.odd += int(np.count_nonzero(away * away > 16 * self._square))
        self._mean += 0.02 * away
        self._square += 0.02 * (away * away - self._square)


class Meter:
    """Processor time of this process and of the broker."""

    def __init__(self, broker: int) -> None:
        self._broker = broker
        self.spent_s: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], Any], broker: str = "") -> Any:
        """Do it, and note what it took here (`name`) and there (`broker`)."""
        began_s, there_s = time.process_time(), cpu_s(self._broker)
        found = work()
        self._add(name, time.process_time() - began_s)
        if broker:
            self._add(broker, cpu_s(self._broker) - there_s)
        return found

    def _add(self, name: str, seconds: float) -> None:
        self.spent_s[name] = self.spent_s.get(name, 0.0) + seconds


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def produce(bootstrap: str, topic: str, ticks: list[list[tuple[bytes, bytes]]]) -> None:
    """Every message, waiting for the broker after each second of the cluster."""
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 5, "compression.type": "lz4"})
    for tick in ticks:
        for key, value in tick:
            producer.produce(topic, value, key)
            producer.poll(0)
        producer.flush()


def consume(bootstrap: str, topic: str, count: int) -> list[bytes]:
    """The values of `count` messages."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "plain", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    found: list[bytes] = []
    while len(found) < count:
        found += [message.value() for message in consumer.consume(1000, 1.0) if message.error() is None]
    consumer.close()
    return found


def matrix(ticks: list[Any]) -> Any:
    """All values of one tick of all nodes, in one array."""
    return np.frombuffer(b"".join(block[VALUES] for tick in ticks for block in tick[TICK_BLOCKS]), dtype="<f4").copy()


def main() -> int:
    """Run the loop once."""
    bootstrap, topic, path, broker = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    ticks: list[list[tuple[bytes, bytes]]] = msgspec.msgpack.decode(path.read_bytes())
    count, nodes = sum(map(len, ticks)), len(ticks[0])
    meter, decoder, judge = Meter(broker), msgspec.msgpack.Decoder(), Ewma()
    meter.run("producer", lambda: produce(bootstrap, topic, ticks), "broker, writing")
    values = meter.run("consumer", lambda: consume(bootstrap, topic, count), "broker, reading")
    records = meter.run("decode", lambda: [decoder.decode(value) for value in values])
    sheets = meter.run("align", lambda: [matrix(records[i : i + nodes]) for i in range(0, count, nodes)])
    meter.run("detect", lambda: [judge.see(sheet) for sheet in sheets])
    print(json.dumps({name: round(1e6 * spent_s / count, 2) for name, spent_s in meter.spent_s.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
