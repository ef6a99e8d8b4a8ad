"""The probe datagram and its responder.

Request and reply are both exactly `SIZE_BYTES` long, so the responder amplifies nothing; it answers each source address at a limited
rate, so a forged address cannot be flooded through it. The reply holds when the request came (kernel's time stamp) and when it left: the
asker subtracts the time that a busy peer took, and learns its clock offset as NTP does.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import NamedTuple

MAGIC = b"TWPb"
REQUEST, REPLY = 1, 2
SIZE_BYTES = 64
FRAME = struct.Struct("<4sB3x16sqq24x")
"""All of a datagram, `SIZE_BYTES` with what fills it up."""
NONCE_BYTES = 16
SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("qq")
MAX_SOURCES = 4096


def request(nonce: bytes) -> bytes:
    """A request."""
    return FRAME.pack(MAGIC, REQUEST, nonce, 0, 0)


def reply(nonce: bytes, came_ns: int, left_ns: int) -> bytes:
    """The answer to the request with `nonce`."""
    return FRAME.pack(MAGIC, REPLY, nonce, came_ns, left_ns)


class Echo(NamedTuple):
    """A parsed probe datagram; times are unix nanoseconds of the responder's clock, 0 in requests."""

    kind: int
    nonce: bytes
    came_ns: int
    left_ns: int


def parse(payload: bytes) -> Echo | None:
    """The probe datagram in `payload`; None for anything else."""
    if len(payload) != SIZE_BYTES:
        return None
    magic, kind, nonce, came_ns, left_ns = FRAME.unpack(payload)
    return Echo(kind, nonce, came_ns, left_ns) if magic == MAGIC and kind in (REQUEST, REPLY) else None


def stamped_socket(address: tuple[str, int], device: str = "") -> socket.socket:
    """A non-blocking UDP socket bound to `address` whose datagrams carry the kernel's time of arrival. Raises `OSError`."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        if device:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def receive(sock: socket.socket) -> tuple[bytes, tuple[str, int], int] | None:
    """One datagram, its sender and its time of arrival; None when nothing waits. Other errors (refused) are raised."""
    try:
        payload, control, _, sender = sock.recvmsg(SIZE_BYTES + 1, 64)
    except BlockingIOError:
        return None
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) >= TIMESPEC.size:
            seconds, nanoseconds = TIMESPEC.unpack_from(data)
            return payload, sender, seconds * 1_000_000_000 + nanoseconds
    return payload, sender, time.time_ns()


class Admission:
    """How often each source is answered: `per_s` a second at most, of the `MAX_SOURCES` heard of last."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._buckets: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def admit(self, source: str, now_s: float) -> bool:
        """Whether this request is to be answered."""
        tokens, at_s = self._buckets.get(source, (self._per_s, now_s))
        tokens = min(self._per_s, tokens + (now_s - at_s) * self._per_s)
        if source not in self._buckets and len(self._buckets) >= MAX_SOURCES:
            self._buckets.pop(next(iter(self._buckets)))
        self._buckets[source] = (tokens - 1 if tokens >= 1 else tokens, now_s)
        return tokens >= 1


class Responder:
    """Answers requests: one equal-sized reply each, at most `per_s` a second and source address.

    `refused` counts what was not answered, by reason (``malformed``, ``rate``, ``unreachable``).
    """

    def __init__(self, per_s: float) -> None:
        self.admission = Admission(per_s)
        self.refused: dict[str, int] = {}

    def serve(self, sock: socket.socket, now_s: float) -> None:
        """Answer everything that waits on `sock`."""
        while (found := receive(sock)) is not None:
            payload, sender, came_ns = found
            echo = parse(payload)
            if echo is None or echo.kind != REQUEST:
                self._refuse("malformed")
            elif not self.admission.admit(sender[0], now_s):
                self._refuse("rate")
            else:
                self._answer(sock, sender, echo.nonce, came_ns)

    def _answer(self, sock: socket.socket, sender: tuple[str, int], nonce: bytes, came_ns: int) -> None:
        try:
            sock.sendto(reply(nonce, came_ns, time.time_ns()), sender)
        except OSError:
            self._refuse("unreachable")

    def _refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``ip:port``; raises `ValueError`."""
    host, _, port = text.rpartition(":")
    with contextlib.suppress(OSError):
        socket.inet_aton(host)
        if 0 < int(port) < 65536:
            return host, int(port)
    raise ValueError(f"{text!r} is no address, expected ip:port such as 10.0.0.2:9471")
