"""Writes a fixture of today's snapshot format: ``python -m tests.streams.make_snapshot DIRECTORY``.

A new folder for each format that was in use; an old one is never written again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from collectors.simulated.encode import Encoder
from collectors.simulated.run import build
from collectors.simulated.spec import Spec
from streams.service import BusWorker, read_all
from trainwarden.bus import Bus
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.config import from_table

SPEC = Spec(nodes=2, seed=5, jobs="2:ddp", rails=1, light_share=0.0, idle_share=0.0, disorder=0.0)
CONFIG = from_table({"cluster": SPEC.cluster, "streams": {"snapshot_s": 100_000}})
SAVED_S, LENGTH_S = 30, 34
TOPICS = ("tw.catalog", "tw.topology", "tw.state", "tw.cuts")
"""What of an older worker lies on the broker beside raw records."""


def live(bus: Bus, worker: BusWorker | None, clock: SimulatedClock, begin: int, end: int) -> None:
    """Seconds `begin` to `end` of the simulated cluster, the same whenever they are asked for."""
    simulator = build(SPEC, "none", 3600.0)
    encoder, publisher = Encoder(simulator), bus.publisher()
    for interval in simulator.intervals(end):
        sent = encoder.messages(interval)
        if interval.number < begin:
            continue
        for message in sent:
            publisher.publish(message.topic, message.key, message.value)
        clock.advance_ns(NS_PER_S)
        if worker is not None:
            worker.step()


def main() -> None:
    directory = Path(sys.argv[1])
    clock = SimulatedClock(SPEC.start_ns)
    bus = MemoryBus(clock)
    worker = BusWorker(CONFIG, bus, clock, "older")
    live(bus, worker, clock, 0, SAVED_S)
    worker.save()
    live(bus, worker, clock, SAVED_S, LENGTH_S)
    directory.mkdir(parents=True)
    for topic in TOPICS:
        (directory / f"{topic}.msgpack").write_bytes(msgspec.msgpack.encode([m.value for m in read_all(bus, topic)]))


if __name__ == "__main__":
    main()
