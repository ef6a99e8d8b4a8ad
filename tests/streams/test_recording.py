from __future__ import annotations

from pathlib import Path

import pytest

from streams import recording
from streams.recording import Recorder
from streams.replay import record, replay, replay_records
from tests.streams.synthetic import START_NS, Cluster
from trainwarden.bus import Message
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.config import from_table
from trainwarden.errors import UsageError
from trainwarden.records import LogEvent, Record, encode

CONFIG = from_table({"kafka": {"url": "memory://recording"}})


def message(number: int, size: int = 100) -> Message:
    return Message("tw.ticks", number % 4, number, b"key", bytes([number % 256]) * size, 1_700_000_000_000 + number)


def test_what_was_written_is_read_over_several_segments(tmp_path: Path) -> None:
    written = [message(number) for number in range(500)]
    with Recorder(tmp_path / "r", segment_bytes=5_000) as recorder:
        for one in written:
            recorder.write(one)
    assert len(recording.segments(tmp_path / "r")) > 5
    assert list(recording.read(tmp_path / "r")) == written


def test_a_killed_recorder_loses_only_what_was_not_flushed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    for number in range(100):
        recorder.write(message(number))
    recorder.flush()
    (path,) = recording.segments(tmp_path / "r")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / path.name).write_bytes(path.read_bytes())
    recorder.close()
    assert list(recording.read(tmp_path / "torn")) == [message(number) for number in range(100)]


def test_a_segment_cut_anywhere_gives_a_clean_beginning(tmp_path: Path) -> None:
    with Recorder(tmp_path / "r") as recorder:
        for number in range(300):
            recorder.write(message(number, size=number + 1))
    (path,) = recording.segments(tmp_path / "r")
    whole = path.read_bytes()
    for share in (0.2, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        found = list(recording.read(tmp_path / "r"))
        assert found == [message(number, size=number + 1) for number in range(len(found))]


def test_a_recording_never_mixes_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("x")
    with pytest.raises(UsageError, match="is not empty"):
        Recorder(tmp_path)


def test_foreign_files_are_refused_with_their_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no segment-\*\.twr"):
        list(recording.read(tmp_path))
    (tmp_path / "segment-00000.twr").write_bytes(b"this is no gzip")
    with pytest.raises(UsageError, match=r"segment-00000\.twr"):
        list(recording.read(tmp_path))
    with pytest.raises(UsageError, match="no recording"):
        replay(tmp_path / "nothing", CONFIG)


def test_live_topics_are_recorded_until_told_to_stop(tmp_path: Path) -> None:
    clock = SimulatedClock(START_NS)
    bus = MemoryBus.named("recording")
    publisher = bus.publisher()
    for number in range(7):
        publisher.publish("tw.logs", b"n0", encode(LogEvent(node="n0", seq=number, boot_id="b")))
    assert record(CONFIG, tmp_path / "r", 60.0, clock=clock, stop=lambda: True) == 7
    assert [m.offset for m in recording.read(tmp_path / "r")] == list(range(7))


def test_a_recording_without_a_worker_is_cut_on_a_simulated_clock(tmp_path: Path) -> None:
    cluster = Cluster()
    placed = [*cluster.announcements(), *(p for second in range(30) for p in cluster.second(second))]
    with Recorder(tmp_path / "r") as recorder:
        for topic, partition, found in placed:
            recorder.write(Message(topic, partition, 0, b"", encode(found), 0))
    told = replay(tmp_path / "r", CONFIG)
    assert told == replay_records([found for _, _, found in placed], CONFIG)
    assert told.nodes == set(cluster.nodes)
    assert told.node_days > 0


def test_records_without_arrival_times_are_cut_on_a_simulated_clock() -> None:
    cluster = Cluster()
    records: list[Record] = [r for _, _, r in cluster.announcements()]
    for second in range(30):
        records.extend(r for _, _, r in cluster.second(second))
    attributes = {"rank": "2", "pid": "1", "exit_code": "-9", "generation": "1"}
    gone_ns = START_NS + 30 * NS_PER_S
    records.append(LogEvent(node="n2", seq=1, boot_id="b1", observed_at_ns=gone_ns, source="hook", severity="error", code="worker_exit:-9",
                            attributes=attributes, job="j", attempt=1, rank=2))  # fmt: skip
    told = replay_records(records, CONFIG)
    (incident,) = told.newest()
    assert (incident.kind, incident.culprits[0].node) == ("rank_killed", "n2")
    assert told.frames > 4 * 30
    assert replay_records(records, CONFIG).verdicts == told.verdicts
