"""Dead letters: what nobody can read is kept with its reason, and the reader goes on."""

from __future__ import annotations

import msgspec

from trainwarden.bus.base import Message, Publisher
from trainwarden.clock import Clock
from trainwarden.errors import DecodeError
from trainwarden.records import DeadLetter, Record, decode, encode
from trainwarden.topics import DEAD

KEPT_BYTES = 256 * 1024
"""A poison message is kept up to this size; the reason says when it was cut."""


def decode_or_dead(message: Message, publisher: Publisher, cluster: str, clock: Clock) -> Record | None:
    """The record in `message`; malformed bytes go to the dead-letter topic and None is returned."""
    try:
        record: Record = decode(message.value)
    except DecodeError as error:
        bury(message, error.reason, publisher, cluster, clock)
        return None
    return record


def bury(message: Message, reason: str, publisher: Publisher, cluster: str, clock: Clock) -> None:
    """Send `message` to the dead-letter topic with the reason why."""
    letter = DeadLetter(
        cluster=cluster, observed_at_ns=clock.now_ns(), topic=message.topic, partition=message.partition, offset=message.offset,
        reason=reason, key=message.key, payload=message.value,
    )  # fmt: skip
    publisher.publish(DEAD.name, message.topic.encode(), encode(fitting(letter)))


def fitting(letter: DeadLetter) -> DeadLetter:
    """`letter` with its payload cut to what a broker takes beside the header."""
    size_bytes = len(letter.payload)
    if size_bytes <= KEPT_BYTES:
        return letter
    reason = f"{letter.reason} (cut from {size_bytes} bytes)"
    return msgspec.structs.replace(letter, reason=reason, payload=letter.payload[:KEPT_BYTES])
