from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from streams import replay as replaying
from streams.detect import Pipeline
from streams.recording import Recorder
from streams.replay import RECORDED, copy, replay_recording
from streams.service import BusWorker, read_all
from streams.state import epochs
from tests.streams.fingerprint import Detectors, Fingerprint, Fragile
from tests.streams.synthetic import START_NS, Cluster, Placed
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_MS, NS_PER_S, SimulatedClock
from trainwarden.config import Config, from_table
from trainwarden.records import DeadLetter, FrameCut, Incident, IncidentStatus, LogEvent, Verdict, decode, encode

CONFIG = from_table({"cluster": "c", "streams": {"snapshot_s": 5}})


class Desk:
    """A memory bus, a cluster on it, a worker that can be killed, and one clock for all."""

    def __init__(self, config: Config = CONFIG, detectors: Detectors | None = None) -> None:
        self.config = config
        self.clock = SimulatedClock(START_NS)
        self.bus = MemoryBus(self.clock)
        self.publisher = self.bus.publisher()
        self.cluster = Cluster()
        self.detectors = detectors or Detectors(Fingerprint)
        self.second = 0
        self.boots = 0
        self.worker = self.boot()
        self.put(self.cluster.announcements())

    def boot(self) -> BusWorker:
        """A (new) worker process."""
        self.boots += 1
        pipeline = Pipeline(self.config, self.detectors)  # type: ignore[arg-type]
        self.worker = BusWorker(self.config, self.bus, self.clock, f"boot{self.boots}", pipeline)
        return self.worker

    def put(self, records: Iterable[Placed]) -> None:
        for topic, _, record in records:
            self.publisher.publish(topic, record.node.encode(), encode(record))

    def run(self, seconds: int, work: bool = True) -> None:
        """Seconds of cluster life; the worker is stepped ten times in each."""
        for _ in range(seconds):
            self.put(self.cluster.second(self.second))
            self.second += 1
            for _ in range(10):
                self.clock.advance_ns(100 * NS_PER_MS)
                if work:
                    self.worker.step()

    def on(self, topic: str) -> list[Any]:
        return [decode(message.value) for message in read_all(self.bus, topic)]

    def verdicts(self) -> list[bytes]:
        """Verdicts in wire form, repeats by identity left out."""
        found: dict[str, bytes] = {}
        for message in read_all(self.bus, "tw.verdicts"):
            verdict = decode(message.value)
            assert isinstance(verdict, Verdict)
            assert found.setdefault(verdict.verdict_id, message.value) == message.value, "a repeat is the same record"
        return list(found.values())

    def record(self, directory: Path) -> Path:
        subscriber = self.bus.subscriber(tuple(topic.name for topic in RECORDED))
        with Recorder(directory, segment_bytes=50_000) as recorder:
            while batch := subscriber.poll(0.0):
                copy(batch, recorder)
        return directory


@pytest.fixture
def with_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays build their own pipeline: give it the same detectors."""
    monkeypatch.setattr("streams.detect.registry", lambda: Detectors(Fingerprint))


def test_replay_says_byte_for_byte_what_was_said_live(tmp_path: Path, with_fingerprint: None) -> None:
    desk = Desk()
    desk.run(10)
    desk.cluster.silent.add("n2")
    for seq, (topic, code) in enumerate(
        (("tw.events", "xid:31"), ("tw.logs", ""), ("tw.logs", "xid:31"), ("tw.events", "hook_bye"))
    ):
        event = LogEvent(
            node="n0", seq=seq, boot_id="b1", observed_at_ns=desk.clock.now_ns(), code=code, line=f"{topic}, {code}"
        )
        desk.put([(topic, 0, event)])
        desk.run(seq)
    desk.run(4)
    live = desk.verdicts()
    assert len(live) > 60
    told = replay_recording(desk.record(tmp_path / "rec"), CONFIG)
    assert [encode(verdict) for verdict in told.verdicts] == live


def test_replay_of_a_worker_that_was_killed_and_restarted(tmp_path: Path, with_fingerprint: None) -> None:
    desk = Desk()
    for seconds in (7, 3, 6):
        desk.run(seconds)
        desk.boot()
    desk.run(4)
    told = replay_recording(desk.record(tmp_path / "rec"), CONFIG)
    assert [encode(verdict) for verdict in told.verdicts] == desk.verdicts()


@pytest.mark.parametrize("killed_after", [1, 4, 5, 6, 9, 13])
def test_a_killed_worker_loses_no_verdict_and_says_nothing_else(killed_after: int) -> None:
    """The cuts of both runs are the same (same clock), so every word must be."""
    whole, killed = Desk(), Desk()
    whole.run(16)
    killed.run(killed_after)
    killed.boot()
    killed.run(16 - killed_after)
    assert killed.verdicts() == whole.verdicts()


def test_what_came_while_no_worker_ran_is_read_by_the_next() -> None:
    desk = Desk()
    desk.run(6)
    desk.run(4, work=False)
    desk.boot()
    desk.run(3)
    cuts = [cut for cut in desk.on("tw.cuts") if isinstance(cut, FrameCut)]
    ends = {f"tw.ticks/{n}": len(log) for n, log in enumerate(desk.bus.partitions("tw.ticks")) if log}
    assert {place: cuts[-1].positions[place] for place in ends} == ends
    assert [cut.seq for cut in cuts] == list(range(1, len(cuts) + 1))


def test_torn_snapshot_falls_back_to_the_one_before() -> None:
    desk = Desk()
    desk.run(12)
    newest = [m for m in read_all(desk.bus, "tw.state")][-1]
    broken = decode(newest.value)
    torn = type(broken)(
        **{
            **{f: getattr(broken, f) for f in broken.__struct_fields__},
            "payload": broken.payload[:-40],
            "seq": broken.seq + 1,
        }
    )
    lying = encode(
        type(torn)(**{**{f: getattr(torn, f) for f in torn.__struct_fields__}, "owner": newest.key.decode()[:-1] + "7"})
    )
    desk.publisher.publish("tw.state", newest.key[:-1] + b"7", lying)
    desk.boot()
    desk.run(3)
    control = Desk()
    control.run(15)
    assert desk.verdicts() == control.verdicts()


def test_a_broker_that_is_away_delays_and_loses_nothing() -> None:
    desk = Desk()
    desk.run(5)
    desk.bus.available = False
    for _ in range(30):
        desk.clock.advance_ns(100 * NS_PER_MS)
        desk.worker.step()
    desk.bus.available = True
    desk.run(5)
    cuts = [cut for cut in desk.on("tw.cuts") if isinstance(cut, FrameCut)]
    assert sorted({cut.seq for cut in cuts}) == list(range(1, max(cut.seq for cut in cuts) + 1))
    assert len(desk.verdicts()) == len({cut.seq for cut in cuts})


@pytest.mark.parametrize(
    "junk", [b"", b"\x00", b"not a record", b"\x93\xa4tick\x01", b"\xff" * 5000, encode(Incident(incident_id="x"))]
)
@pytest.mark.parametrize(
    "topic", ["tw.ticks", "tw.steps", "tw.events", "tw.logs", "tw.catalog", "tw.topology", "tw.verdicts", "tw.actions"]
)
def test_junk_anywhere_is_a_dead_letter_and_changes_nothing(topic: str, junk: bytes) -> None:
    clean, dirty = Desk(), Desk()
    clean.run(4)
    dirty.run(2)
    dirty.publisher.publish(topic, b"k", junk)
    dirty.run(2)
    assert [v for m in read_all(dirty.bus, "tw.verdicts") if (v := m.value) != junk] == clean.verdicts()
    dead = [letter for letter in dirty.on("tw.dead") if isinstance(letter, DeadLetter)]
    tombstone = topic in ("tw.catalog", "tw.topology") and not junk
    assert [letter.topic for letter in dead] == ([] if tombstone else [topic])
    assert all(letter.reason and letter.payload == junk for letter in dead)


def test_a_broken_detector_is_switched_off_alone(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(detectors=Detectors(Fingerprint, Fragile))
    desk.run(3)
    desk.put(
        [("tw.logs", 0, LogEvent(node="n0", seq=1, boot_id="b1", observed_at_ns=desk.clock.now_ns(), line="poison"))]
    )
    desk.run(3)
    said = [verdict.detector for verdict in desk.on("tw.verdicts")]
    assert said.count("fingerprint") > said.count("fragile") > 0
    assert list(desk.worker.stage.pipeline.disabled) == ["fragile"]
    assert "ZeroDivisionError" in caplog.text
    assert caplog.text.count("switched off") == 1
    desk.boot()
    desk.run(2)
    assert desk.worker.stage.pipeline.disabled in ({}, {"fragile": desk.worker.stage.pipeline.disabled.get("fragile")})


def test_a_detector_with_other_settings_starts_cold_and_the_others_warm(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    desk = Desk()
    desk.run(11)
    desk.detectors = Detectors(Fingerprint, Fragile)
    desk.boot()
    assert "warm: fingerprint; cold: fragile" in caplog.text


@pytest.mark.parametrize("topic", ["tw.events", "tw.logs"])
def test_a_killed_rank_becomes_an_incident_with_the_real_detectors(topic: str) -> None:
    """Said by a collector of this build, or by one of before there was a topic for events."""
    desk = Desk(detectors=Detectors(real=True))
    desk.run(20)
    gone_ns = desk.clock.now_ns()
    attributes = {"rank": "2", "pid": "1", "exit_code": "-9", "generation": "1"}
    desk.put([(topic, 0, LogEvent(node="n2", seq=1, boot_id="b1", observed_at_ns=gone_ns, source="hook", severity="error",
                                  code="worker_exit:-9", attributes=attributes, job="j", attempt=1, rank=2))])  # fmt: skip
    for _ in range(20):
        desk.clock.advance_ns(100 * NS_PER_MS)
        desk.worker.step()
    incidents = [i for i in desk.on("tw.incidents") if isinstance(i, Incident)]
    assert incidents
    assert (incidents[-1].kind, incidents[-1].culprits[0].node, incidents[-1].culprit_rank) == ("rank_killed", "n2", 2)
    assert incidents[0].timeline.verdict_at_ns - gone_ns < 2 * NS_PER_S


def test_killed_between_verdict_and_incident() -> None:
    """The correlator's memory of an unpublished verdict dies with the worker; the successor hears it again and says the same."""

    class Accuser(Fingerprint):
        name = "accuser"

        def update(self, frame: Any) -> list[Verdict]:
            super().update(frame)
            if not any("accuse" in event.line for event in frame.logs):
                return []
            entity = type(decode(encode(Incident()))).__name__ and _node("n1")
            return [
                self.verdict(
                    kind="compute_slow", entity=entity, window=(START_NS, START_NS), job="j", attempt=1, confidence=0.9
                )
            ]

    desk = Desk(detectors=Detectors(Accuser))
    desk.run(6)
    desk.put(
        [("tw.logs", 0, LogEvent(node="n0", seq=1, boot_id="b1", observed_at_ns=desk.clock.now_ns(), line="accuse"))]
    )
    for _ in range(4):
        desk.clock.advance_ns(100 * NS_PER_MS)
        desk.worker.step()
    assert desk.on("tw.verdicts")
    assert not desk.on("tw.incidents")
    desk.boot()
    desk.run(3)
    assert {i.incident_id for i in desk.on("tw.incidents")} == {i.incident_id for i in desk.on("tw.incidents")[:1]}
    assert desk.on("tw.incidents")[-1].status is IncidentStatus.OPEN


def _node(name: str) -> Any:
    from trainwarden.records import Entity, EntityKind

    return Entity(EntityKind.NODE, name, name)


def test_second_writers_cuts_are_left_out() -> None:
    def cut(seq: int, boot: str) -> FrameCut:
        return FrameCut(seq=seq, boot_id=boot, now_ns=seq)

    runs = epochs([cut(1, "a"), cut(2, "a"), cut(3, "a"), cut(2, "old"), cut(4, "b"), cut(1, "c"), cut(2, "c")])
    assert [[(c.seq, c.boot_id) for c in run] for run in runs] == [
        [(1, "a"), (2, "a"), (3, "a"), (4, "b")],
        [(1, "c"), (2, "c")],
    ]


def test_recording_from_the_middle_begins_at_a_snapshot(tmp_path: Path, with_fingerprint: None) -> None:
    desk = Desk()
    desk.run(20)
    directory = tmp_path / "late"
    cuts = 0
    subscriber = desk.bus.subscriber(tuple(topic.name for topic in RECORDED))
    with Recorder(directory) as recorder:
        for message in subscriber.poll(0.0, 100_000):
            cuts += message.topic == "tw.cuts"
            if message.topic != "tw.cuts" or cuts > 25:
                recorder.write(message)
    told = replaying.replay(directory, CONFIG)
    live = desk.verdicts()
    assert 20 < len(told.verdicts) < len(live)
    assert [encode(verdict) for verdict in told.verdicts] == live[-len(told.verdicts) :]
