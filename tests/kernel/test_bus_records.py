"""Batches as a broker sends them become the messages that kafka-python itself reads in them."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from kafka.consumer.fetcher import Fetcher
from kafka.errors import CorruptRecordError
from kafka.record.memory_records import MemoryRecords, MemoryRecordsBuilder
from kafka.structs import TopicPartition

from trainwarden.bus.base import Message
from trainwarden.bus.records import PartitionRecords

PLACE = TopicPartition("t", 3)
Pair = tuple[bytes | None, bytes | None]


def batch(pairs: Sequence[Pair], first_offset: int = 0, codec: int = 0, start_ms: int = 1_764_400_000_000) -> bytes:
    builder = MemoryRecordsBuilder(2, codec, 1 << 24)
    for number, (key, value) in enumerate(pairs):
        headers = [("h", b"x" * number), ("empty", None)] if number % 3 == 1 else []
        builder.append(timestamp=start_ms + 7 * number, key=key, value=value, headers=headers)
    builder.close()
    return (
        struct.pack(">q", first_offset) + bytes(builder.buffer())[8:]
    )  # which the broker writes, outside the checksum


def pairs_of(draw: random.Random, count: int) -> list[Pair]:
    sizes = (0, 1, 63, 64, 127, 128, 3000, 20_000)
    return [
        (draw.choice([None, b"", b"key"]), draw.choice([None, draw.randbytes(draw.choice(sizes))]))
        for _ in range(count)
    ]


def taken(reader: Any, answer: bytes, start: int = 0) -> Any:
    return reader(start, PLACE, MemoryRecords(answer))


def plainly(records: Sequence[Any]) -> list[Message]:
    return [Message(r.topic, r.partition, r.offset, r.key or b"", r.value or b"", r.timestamp) for r in records]


@pytest.mark.parametrize("codec", [0, 1, 3])
def test_messages_are_those_that_kafka_python_reads(codec: int) -> None:
    draw = random.Random(codec)
    answer, offset = b"", 5
    for count in (1, 200, 3):
        answer += batch(pairs_of(draw, count), offset, codec)
        offset += count + 2  # compaction leaves holes
    ours, theirs = taken(PartitionRecords, answer, 40), taken(Fetcher.PartitionRecords, answer, 40)
    for piece in (1, 50, None):
        assert ours.take(piece) == plainly(theirs.take(piece))
        assert ours.next_fetch_offset == theirs.next_fetch_offset
        assert ours.leader_epoch == theirs.leader_epoch
    assert (bool(ours), bool(theirs)) == (False, False), "nothing is left in either"


def test_a_batch_that_is_not_whole_waits_for_the_next_answer() -> None:
    answer = batch([(b"k", b"v" * 100)]) + batch([(b"k", b"w")], 1)[:-4]
    reader = taken(PartitionRecords, answer)
    assert [message.value for message in reader.take()] == [b"v" * 100]
    assert reader.next_fetch_offset == 1


def test_damage_is_told_and_what_lies_before_it_is_given() -> None:
    good, bad = batch([(b"k", b"v")]), bytearray(batch([(b"k", b"w" * 500)], 1))
    bad[-20] ^= 1
    reader = taken(PartitionRecords, good + bytes(bad))
    assert [message.value for message in reader.take()] == [b"v"]
    with pytest.raises(CorruptRecordError, match="offset 1 does not have its checksum"):
        reader.take()


@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_are_no_records_end_in_one_kind_of_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka.record.default_records.DefaultRecordBatch.validate_crc", lambda batch: True)
    draw = random.Random(seed)
    whole = batch(pairs_of(draw, 20))
    for _ in range(100):
        broken = bytearray(whole)
        for _ in range(draw.randint(1, 8)):
            broken[draw.randrange(61, len(broken))] = draw.randrange(256)
        try:
            found = taken(PartitionRecords, bytes(broken)).take()
        except CorruptRecordError:
            continue
        assert all(isinstance(message, Message) for message in found)


def test_an_older_format_is_named() -> None:
    builder = MemoryRecordsBuilder(1, 0, 1 << 20)
    builder.append(timestamp=1, key=b"k", value=b"v")
    builder.close()
    with pytest.raises(CorruptRecordError, match="format 1"):
        taken(PartitionRecords, bytes(builder.buffer())).take()
