"""Rolling upgrade and roll back: what another build wrote is taken over, or refused in a sentence and done without; nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from detectors.base import registry
from streams import state
from streams.matrices import pack, unpack
from streams.service import BusWorker, read_all
from tests.streams.make_snapshot import CONFIG, LENGTH_S, SPEC, live
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.records import DeadLetter, FrameCut, LogEvent, StateSnapshot, StepReport, Tick, Verdict, decode, encode

OLDER = Path(__file__).parents[1] / "fixtures" / "versions" / "2026-11"
CUTS = msgspec.msgpack.decode((OLDER / "tw.cuts.msgpack").read_bytes(), type=list[bytes])
SNAPSHOT = msgspec.msgpack.decode((OLDER / "tw.state.msgpack").read_bytes(), type=list[bytes])
Change = Callable[[dict[str, Any]], dict[str, Any]]


class Upgrade:
    """A broker with what an older worker left on it, and a worker of this build that takes it over."""

    def __init__(self, snapshot: list[bytes]) -> None:
        self.clock = SimulatedClock(SPEC.start_ns)
        self.bus = MemoryBus(self.clock)
        live(self.bus, None, self.clock, 0, LENGTH_S)
        publisher = self.bus.publisher()
        for topic, values in (("tw.state", snapshot), ("tw.cuts", CUTS)):
            for number, value in enumerate(values):
                publisher.publish(topic, b"%d" % number, value)
        self.worker = BusWorker(CONFIG, self.bus, self.clock, "newer")

    def run(self, seconds: int) -> None:
        """Live on, and check that nothing was left out."""
        for _ in range(3):
            self.worker.step()
        assert not self.worker.stage.catching_up
        live(self.bus, self.worker, self.clock, LENGTH_S, LENGTH_S + seconds)
        ends = {f"tw.ticks/{n}": len(log) for n, log in enumerate(self.bus.partitions("tw.ticks")) if log}
        read = self.worker.stage.positions
        assert {place: read[place] for place in ends} == ends
        numbers = [cut.seq for cut in self.on("tw.cuts") if isinstance(cut, FrameCut)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) == len(CUTS) + seconds

    def on(self, topic: str) -> list[Any]:
        return [decode(message.value) for message in read_all(self.bus, topic)]

    def accusations(self) -> list[Verdict]:
        return [v for v in self.on("tw.verdicts") if not v.clears and v.reach == "act"]


def rewritten(change: Change) -> list[bytes]:
    """The snapshot as a newer build would have written it."""
    resume = state.newest("detect", [decode(value) for value in SNAPSHOT])
    assert resume is not None
    payload = pack(change(unpack(resume.payload)))
    pieces = state.pieces("detect", payload, resume.positions, turn=1, seq=resume.seq, at_ns=resume.at_ns, cluster=SPEC.cluster,
                          boot_id="newer", code_version="newer")  # fmt: skip
    return [encode(piece) for piece in pieces]


def test_the_snapshot_of_an_older_build_is_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever changes the state of a detector raises its version, and then it starts cold; what is of the same version must go on."""
    caplog.set_level("INFO")
    resume = state.newest("detect", [decode(value) for value in SNAPSHOT])
    assert resume is not None
    written = unpack(resume.payload)["detectors"]
    upgrade = Upgrade(SNAPSHOT)
    now = upgrade.worker.stage.pipeline.detectors
    same = {
        n
        for n, (version, settings, _) in written.items()
        if n in now and [version, settings] == [now[n].version, now[n].config_hash]
    }
    line = next(r.getMessage() for r in caplog.records if "taken over" in r.getMessage())
    warm = set(line.split("warm: ")[1].split("; cold")[0].split(", ")) - {"none"}
    assert warm == same
    assert set(now) <= set(registry().all())
    upgrade.run(4)
    assert upgrade.accusations() == []


def of_newer_detectors(written: dict[str, Any]) -> dict[str, Any]:
    detectors = {
        name: [version + 1, settings, b"\xc1"] for name, (version, settings, _) in written["detectors"].items()
    }
    return {**written, "detectors": {**detectors, "from_the_future": [1, "", b""]}, "more": [1, 2]}


def with_more_in_the_aligner(written: dict[str, Any]) -> dict[str, Any]:
    return {**written, "aligner": pack({**unpack(written["aligner"]), "from_the_future": {"a": 1}})}


def of_another_aligner(written: dict[str, Any]) -> dict[str, Any]:
    return {**written, "aligner": pack({"format": 2})}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (of_newer_detectors, "warm: none; cold: "),
        (with_more_in_the_aligner, "taken over; warm: "),
        (of_another_aligner, "cannot be taken over: detectors start cold from its positions"),
    ],
)
def test_after_a_roll_back_the_newer_snapshot_is_read_or_refused(
    change: Change, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    upgrade = Upgrade(rewritten(change))
    assert told in caplog.text
    upgrade.run(3)
    assert upgrade.accusations() == []


def test_a_snapshot_of_another_major_version_is_as_good_as_none() -> None:
    """The cuts are repeated from the first one then."""
    wires = [msgspec.msgpack.decode(value) for value in SNAPSHOT]
    upgrade = Upgrade([msgspec.msgpack.encode([wire[0], 2, *wire[2:]]) for wire in wires])
    upgrade.run(2)


def more_fields(value: bytes) -> bytes:
    return msgspec.msgpack.encode([*msgspec.msgpack.decode(value), "of the future", {"deep": [1.5]}])


def fewer_fields(value: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(value)[:7])


def another_schema(value: bytes) -> bytes:
    wire = msgspec.msgpack.decode(value)
    return msgspec.msgpack.encode([wire[0], 2, *wire[2:]])


def unknown_kind(value: bytes) -> bytes:
    return msgspec.msgpack.encode(["of_the_future", *msgspec.msgpack.decode(value)[1:]])


@pytest.mark.parametrize(
    ("skew", "reason"),
    [
        (more_fields, ""),
        (fewer_fields, ""),
        (another_schema, "record of schema 2, this build reads 1: upgrade the reader first"),
        (unknown_kind, "Invalid value 'of_the_future'"),
    ],
)
def test_records_of_collectors_of_other_versions(skew: Callable[[bytes], bytes], reason: str) -> None:
    """Read as far as they are known, or put aside with a reason; what comes after them is read all the same."""
    clock = SimulatedClock(SPEC.start_ns)
    bus = MemoryBus(clock)
    worker = BusWorker(CONFIG, bus, clock)
    publisher, at_ns = bus.publisher(), SPEC.start_ns
    mine = [
        ("tw.ticks", Tick(node="x", boot_id="b", seq=1, observed_at_ns=at_ns)),
        ("tw.steps", StepReport(node="x", boot_id="b", seq=1, observed_at_ns=at_ns, job="j", world=2)),
        ("tw.logs", LogEvent(node="x", boot_id="b", seq=1, observed_at_ns=at_ns, line="word")),
    ]
    for topic, record in mine:
        publisher.publish(topic, b"x", skew(encode(record)))
        publisher.publish(topic, b"x", encode(replace(record, seq=2, observed_at_ns=at_ns + NS_PER_S)))
    clock.advance_ns(2 * NS_PER_S)
    results = worker.step()
    frames = [result.frame for result in results if result.frame is not None]
    taken = 1 if reason else 2
    assert sum(len(frame.logs) for frame in frames) == taken
    assert sum(len(frame.steps) for frame in frames) == taken
    letters = [
        letter for letter in map(decode, (m.value for m in read_all(bus, "tw.dead"))) if isinstance(letter, DeadLetter)
    ]
    assert {letter.topic for letter in letters} == ({topic for topic, _ in mine} if reason else set())
    assert all(reason in letter.reason for letter in letters)


def exit_of(node: str, seq: int, at_ns: int) -> LogEvent:
    return LogEvent(
        node=node,
        boot_id="b",
        seq=seq,
        observed_at_ns=at_ns,
        code="xid:79",
        severity="critical",
        line="fell off the bus",
    )


def test_events_of_older_collectors_count_where_they_always_were() -> None:
    """Before there was a topic of their own they came with the lines: of both builds each counts once."""
    clock = SimulatedClock(SPEC.start_ns)
    bus = MemoryBus(clock)
    worker = BusWorker(CONFIG, bus, clock)
    publisher = bus.publisher()
    for topic, node in (("tw.logs", "older"), ("tw.events", "newer")):
        for _ in range(2):
            publisher.publish(topic, node.encode(), encode(exit_of(node, 1, SPEC.start_ns)))
    clock.advance_ns(2 * NS_PER_S)
    frames = [result.frame for result in worker.step() if result.frame is not None]
    assert sorted(event.node for frame in frames for event in frame.logs) == ["newer", "older"]
    assert not read_all(bus, "tw.dead")


def test_a_worker_that_takes_an_older_one_over_reads_the_events_that_nobody_read() -> None:
    """Neither snapshot nor cuts of the older one speak of their topic: the cuts are repeated without, and then all of it is read."""
    upgrade = Upgrade(SNAPSHOT)
    upgrade.bus.publisher().publish("tw.events", b"x", encode(exit_of("x", 1, upgrade.clock.now_ns())))
    [place] = [f"tw.events/{n}" for n, log in enumerate(upgrade.bus.partitions("tw.events")) if log]
    upgrade.run(4)
    cuts = [cut for cut in upgrade.on("tw.cuts") if isinstance(cut, FrameCut)]
    assert [cut.positions.get(place, 0) for cut in cuts] == [0] * len(CUTS) + [1] * 4
    assert [v.entity.name for v in upgrade.on("tw.verdicts") if v.kind == "fatal_code"] == ["x"]


def test_an_older_snapshot_record_lacks_nothing_that_is_needed() -> None:
    assert all(isinstance(decode(value), StateSnapshot) for value in SNAPSHOT)
    assert isinstance(decode(CUTS[-1]), FrameCut)
