"""Kafka's record batch and Produce request (versions 5 to 7) as bytes, without a library's layers.

The layout is that of https://kafka.apache.org/protocol (record batch 2); the tests read what is written here with kafka-python.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kafka.codec import has_lz4, lz4_encode
from kafka.errors import KafkaProtocolError
from kafka.record.util import calc_crc32c

VERSIONS = (5, 7)
BATCH_BYTES = 256 * 1024
ALL_REPLICAS = -1
LZ4 = 3 if has_lz4() else 0
PRODUCE_KEY = 0
BATCH = struct.Struct(">qiibIhiqqqhii")
"""Offset, length, leader epoch, format 2, CRC, attributes, last offset, first and last time, no producer (three fields), count."""
AFTER_LENGTH_BYTES, AFTER_CRC_BYTES = 12, 21
CRC_AT = 17
HEADER = struct.Struct(">hhi")
ANSWER = struct.Struct(">ihqqq")
"""Partition, error, offset, time, start of the log."""
INT, SHORT = struct.Struct(">i"), struct.Struct(">h")
Place = tuple[str, int]
"""Topic and number of the partition."""


class Waiting(NamedTuple):
    """A message that was published and is not sent."""

    topic: str
    key: bytes
    value: bytes
    at_ms: int


class Answer(NamedTuple):
    """What a broker says of a batch: 0 is good."""

    error_code: int
    error_message: str | None = None


def batch_of(messages: Sequence[Waiting], most: int) -> tuple[bytes, int]:
    """The first messages, at most `most` and about `BATCH_BYTES` of them, as a record batch; how many they are (one at least)."""
    body, count, first_ms = bytearray(), 0, messages[0].at_ms
    for message in messages[:most]:
        if count and len(body) + len(message.key) + len(message.value) > BATCH_BYTES:
            break
        record = b"".join((b"\0", zigzag(message.at_ms - first_ms), zigzag(count), zigzag(len(message.key)), message.key,
                           zigzag(len(message.value)), message.value, b"\0"))  # fmt: skip
        body += zigzag(len(record)) + record
        count += 1
    return _sealed(bytes(body), first_ms, max(message.at_ms for message in messages[:count]), count), count


def _sealed(body: bytes, first_ms: int, last_ms: int, count: int) -> bytes:
    """Compressed where that helps, with the header in front and its check sum."""
    packed: bytes = lz4_encode(body) if LZ4 else body
    smaller = len(packed) < len(body)
    records, attributes = (packed, LZ4) if smaller else (body, 0)
    length = BATCH.size - AFTER_LENGTH_BYTES + len(records)
    data = bytearray(
        BATCH.pack(0, length, 0, 2, 0, attributes, count - 1, first_ms, last_ms, -1, -1, -1, count) + records
    )
    struct.pack_into(">I", data, CRC_AT, calc_crc32c(memoryview(data)[AFTER_CRC_BYTES:]))
    return bytes(data)


def zigzag(value: int) -> bytes:
    """A signed number in seven bits a byte.

    Examples
    --------
    >>> zigzag(0), zigzag(-1), zigzag(300)
    (b'\\x00', b'\\x01', b'\\xd8\\x04')
    """
    rest = value << 1 if value >= 0 else (-value << 1) - 1
    if rest < 0x80:
        return rest.to_bytes(1, "big")
    found = bytearray()
    while rest >= 0x80:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    found.append(rest)
    return bytes(found)


def request(number: int, version: int, client: str, timeout_ms: int, batches: Mapping[Place, bytes]) -> bytes:
    """A whole Produce request, with its length in front; `number` comes back in the answer."""
    topics: dict[str, list[bytes]] = {}
    for (topic, partition), data in batches.items():
        topics.setdefault(topic, []).append(INT.pack(partition) + INT.pack(len(data)) + data)
    parts = [HEADER.pack(PRODUCE_KEY, version, number), _text(client), SHORT.pack(-1), SHORT.pack(ALL_REPLICAS)]
    parts += [INT.pack(timeout_ms), INT.pack(len(topics))]
    for topic, partitions in topics.items():
        parts += [_text(topic), INT.pack(len(partitions)), *partitions]
    whole = b"".join(parts)
    return INT.pack(len(whole)) + whole


def answers_of(data: bytes, number: int) -> dict[Place, Answer]:
    """The answer to request `number`, without its length. Raises `KafkaProtocolError` for anything else."""
    try:
        if INT.unpack_from(data)[0] != number:
            raise KafkaProtocolError("an answer to another request")
        return _answers(data)
    except (struct.error, UnicodeDecodeError) as error:
        raise KafkaProtocolError(f"an answer of {len(data)} bytes that ends too early: {error}") from None


def _answers(data: bytes) -> dict[Place, Answer]:
    found: dict[Place, Answer] = {}
    at, topics = 8, INT.unpack_from(data, 4)[0]
    for _ in range(topics):
        size = SHORT.unpack_from(data, at)[0]
        topic, at = data[at + 2 : at + 2 + size].decode("utf-8"), at + 2 + max(0, size)
        partitions, at = INT.unpack_from(data, at)[0], at + 4
        for _ in range(partitions):
            partition, code, *_rest = ANSWER.unpack_from(data, at)
            found[topic, partition] = Answer(code)
            at += ANSWER.size
    return found


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return SHORT.pack(len(data)) + data


def version_of(known: Mapping[int, tuple[int, int]]) -> int | None:
    """The newest version of Produce that both sides know, from the broker's versions by request; None where there is none of ours.

    Examples
    --------
    >>> version_of({0: (3, 11)}), version_of({0: (0, 3)}), version_of({})
    (7, None, None)
    """
    oldest, newest = known.get(PRODUCE_KEY, (0, -1))
    return min(newest, VERSIONS[1]) if newest >= VERSIONS[0] and oldest <= VERSIONS[1] else None
