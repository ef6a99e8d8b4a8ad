"""What a broker sends, taken apart into messages.

kafka-python calls a function for each number of a record and makes two objects of it before ours; everything else is left to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kafka.consumer.fetcher import Fetcher
from kafka.errors import CorruptRecordError

from trainwarden.bus.base import Message

NEWEST_FORMAT = 2
LOG_APPEND_TIME = 1
_MORE = 0x80


class PartitionRecords(Fetcher.PartitionRecords):  # type: ignore[misc]
    """One partition's part of an answer; gives `Message` where kafka-python gives a record of its own."""

    def _unpack_records(self, tp: Any, records: Any, *deserializers: Any) -> Iterator[Message]:
        while (batch := records.next_batch()) is not None:
            if not batch.validate_crc():
                raise CorruptRecordError(f"{tp}: the batch at offset {batch.base_offset} does not have its checksum")
            if batch.magic != NEWEST_FORMAT:
                raise CorruptRecordError(f"{tp}: a batch of format {batch.magic}, expected {NEWEST_FORMAT}")
            self.leader_epoch = batch.leader_epoch
            if not batch.is_control_batch:
                for message in messages(tp.topic, tp.partition, batch):
                    self.bytes_read += len(message.value)
                    self.next_fetch_offset = message.offset + 1
                    yield message
            self.next_fetch_offset = batch.next_offset
        self.drain()


def messages(topic: str, partition: int, batch: Any) -> Iterator[Message]:
    """The messages of a batch of the newest format.

    Raises
    ------
    CorruptRecordError
        Bytes that are no records, or not as many as announced.
    """
    batch._maybe_uncompress()
    body, at = bytes(batch._buffer), batch._pos
    base, first_ms = batch.base_offset, batch.first_timestamp
    appended_ms = batch.max_timestamp if batch.timestamp_type == LOG_APPEND_TIME else None
    try:
        for _ in range(batch.records_count):
            length, at = number(body, at)
            end, at = at + length, at + 1  # a byte of attributes, of which none is in use
            since_ms, at = number(body, at)
            offset, at = number(body, at)
            key, at = _text(body, at)
            value, at = _text(body, at)
            if at >= end or end > len(body):
                raise CorruptRecordError(f"{topic}/{partition}: a record behind offset {base} is longer than it says")
            yield Message(
                topic, partition, base + offset, key, value, first_ms + since_ms if appended_ms is None else appended_ms
            )
            at = end  # headers are none of ours
    except IndexError:
        raise CorruptRecordError(f"{topic}/{partition}: the batch at offset {base} ends in a record") from None
    if at != len(body):
        raise CorruptRecordError(f"{topic}/{partition}: {len(body) - at} bytes behind the records of offset {base}")


def number(body: bytes, at: int) -> tuple[int, int]:
    """A number of variable length at `at`, and where it ends.

    Examples
    --------
    >>> number(b"\\x01", 0), number(b"\\xac\\x02", 0)
    ((-1, 1), (150, 2))
    """
    byte = body[at]
    at += 1
    found = byte & ~_MORE
    shift = 7
    while byte & _MORE:
        byte = body[at]
        at += 1
        found |= (byte & ~_MORE) << shift
        shift += 7
    return (found >> 1) ^ -(found & 1), at


def _text(body: bytes, at: int) -> tuple[bytes, int]:
    length, at = number(body, at)
    return (b"", at) if length < 0 else (body[at : at + length], at + length)
