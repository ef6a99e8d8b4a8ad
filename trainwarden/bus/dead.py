"""Dead letters: what nobody can read is kept with its reason, and the reader goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from trainwarden.bus.base import Message, Publisher
from trainwarden.clock import Clock
from trainwarden.errors import DecodeError
from trainwarden.records import DeadLetter, Record, decode, encode
from trainwarden.topics import DEAD

KEPT_BYTES = 256 * 1024
"""A poison message is kept up to this size; the reason says when it was cut."""
KEPT_KEY_BYTES = 4096
KEPT_REASON = 2000


def decode_or_dead(
    message: Message, publisher: Publisher, cluster: str, clock: Clock, decoding: Callable[[bytes], Any] = decode
) -> Record | None:
    """The record in `message`; malformed bytes go to the dead-letter topic and None is returned."""
    try:
        record: Record = decoding(message.value)
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
    """`letter` with its payload, key and reason (which may quote both) cut to what a broker takes together."""
    cuts = [
        f"{name}cut from {len(value)} bytes"
        for name, value, most in (("", letter.payload, KEPT_BYTES), ("key ", letter.key, KEPT_KEY_BYTES))
        if len(value) > most
    ]
    if not cuts and len(letter.reason) <= KEPT_REASON:
        return letter
    reason = letter.reason[:KEPT_REASON] + (f" ({', '.join(cuts)})" if cuts else "")
    return msgspec.structs.replace(
        letter, reason=reason, key=letter.key[:KEPT_KEY_BYTES], payload=letter.payload[:KEPT_BYTES]
    )
