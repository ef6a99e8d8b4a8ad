"""Heartbeats: what one node tells another, on every rail, many times a second. Signed; a replayed or foreign one is not believed."""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import NamedTuple

MAGIC = b"TWb1"
TAG_BYTES = 8
BODY = struct.Struct("!4s4sHHBQQQQIBBBB")
SIZE = BODY.size + TAG_BYTES
RAIL_AT, NEWS = 12, 0x80
"""Where a heartbeat has its rail, and the bit there that says: it tells of a change, and the receiver need not wait for its next turn."""


class BadBeat(Exception):
    """Bytes that are no heartbeat of ours; the text is a short reason that can be counted by."""


class Beat(NamedTuple):
    """One heartbeat. Masks have one bit per rail, and speak of the sender's side.

    Attributes
    ----------
    sender, receiver
        Places in the sorted list of nodes.
    boot
        Drawn anew at each start of the sender.
    number
        The same on all rails for one tick.
    sent_ns
        The sender's monotonic clock.
    echo_ns, echo_age_us
        `sent_ns` of the newest heartbeat that the sender had from the receiver on this rail, and how long ago that was; 0 = none.
    carriers, hears, clean, avoids
        Rails with carrier; rails on which the receiver's heartbeats arrive; on which few are lost; which an order took out of use.
    """

    sender: int
    receiver: int
    rail: int
    boot: int
    number: int
    sent_ns: int
    echo_ns: int
    echo_age_us: int
    carriers: int
    hears: int
    clean: int
    avoids: int


class Codec:
    """Packs and checks heartbeats.

    Parameters
    ----------
    secret
        Shared by the wardens of the job.
    digest
        Of the links file: two different ones do not understand each other.
    """

    def __init__(self, secret: bytes, digest: bytes) -> None:
        key = hashlib.blake2s(secret, person=b"tw-beats").digest()
        self._keyed = hashlib.blake2s(key=key, digest_size=TAG_BYTES)
        self._digest = digest

    def pack(self, beat: Beat, news: bool = False) -> bytes:
        """Bytes of one heartbeat; ``news``: it tells of a change."""
        rail = beat.rail | NEWS if news else beat.rail
        body = BODY.pack(
            MAGIC, self._digest, beat.sender, beat.receiver, rail, beat.boot, beat.number, beat.sent_ns, beat.echo_ns,
            min(beat.echo_age_us, 0xFFFFFFFF), beat.carriers, beat.hears, beat.clean, beat.avoids,
        )  # fmt: skip
        return body + self._tag(body)

    def unpack(self, data: bytes) -> Beat:
        """The heartbeat in ``data``.

        Raises
        ------
        BadBeat
            Wrong length, signature, or another links file.
        """
        if len(data) != SIZE:
            raise BadBeat("length")
        body = data[: BODY.size]
        if not hmac.compare_digest(self._tag(body), data[BODY.size :]):
            raise BadBeat("signature")
        magic, digest, sender, receiver, rail, *rest = BODY.unpack(body)
        if magic != MAGIC:
            raise BadBeat("version")
        if digest != self._digest:
            raise BadBeat("another links file")
        return Beat(sender, receiver, rail & ~NEWS, *rest)

    def _tag(self, body: bytes) -> bytes:
        signing = self._keyed.copy()
        signing.update(body)
        return signing.digest()
