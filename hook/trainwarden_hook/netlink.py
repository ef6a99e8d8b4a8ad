"""As much of rtnetlink as moving routes and watching carriers needs: messages, one request at a time, a watch on links."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

HEADER = struct.Struct("=LHHLL")
ATTRIBUTE = struct.Struct("=HH")
LINK = struct.Struct("=BxHiII")
NLMSG_ERROR, NLMSG_DONE = 2, 3
RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 1, 4, 0x300
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400
NLA_F_NESTED, NLA_TYPE_MASK = 0x8000, 0x3FFF
RTMGRP_LINK = 1
IFLA_IFNAME = 3
IFF_UP, IFF_LOWER_UP = 1, 0x10000
BUFFER_BYTES = 1 << 20
TIMEOUT_S = 2.0


class NetlinkError(OSError):
    """The kernel refused a request; `errno` says why."""


def attribute(kind: int, payload: bytes) -> bytes:
    """One attribute, padded to four bytes."""
    size = ATTRIBUTE.size + len(payload)
    return ATTRIBUTE.pack(size, kind) + payload + bytes(-size % 4)


def nested(kind: int, *attributes: bytes) -> bytes:
    """An attribute made of attributes."""
    return attribute(kind | NLA_F_NESTED, b"".join(attributes))


def attributes(payload: bytes) -> dict[int, bytes]:
    """Attributes by kind; what is cut short is left out."""
    found: dict[int, bytes] = {}
    at = 0
    while at + ATTRIBUTE.size <= len(payload):
        size, kind = ATTRIBUTE.unpack_from(payload, at)
        if size < ATTRIBUTE.size or at + size > len(payload):
            break
        found[kind & NLA_TYPE_MASK] = payload[at + ATTRIBUTE.size : at + size]
        at += size + (-size % 4)
    return found


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(kind, sequence number, payload) of each message in what one read gave."""
    at = 0
    while at + HEADER.size <= len(data):
        size, kind, _, number, _ = HEADER.unpack_from(data, at)
        if size < HEADER.size or at + size > len(data):
            return
        yield kind, number, data[at + HEADER.size : at + size]
        at += size + (-size % 4)


class Channel:
    """Requests to the kernel, one after the other.

    Parameters
    ----------
    protocol
        ``NETLINK_ROUTE`` (0) or ``NETLINK_GENERIC`` (16).
    """

    def __init__(self, protocol: int = 0) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket.bind((0, 0))
        self._socket.settimeout(TIMEOUT_S)
        self._number = 0

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def ask(self, kind: int, flags: int, payload: bytes) -> list[tuple[int, bytes]]:
        """The answers, (kind, payload) each, without the closing one.

        Raises
        ------
        NetlinkError
            The kernel refused, or did not answer.
        """
        self._number += 1
        dump = flags & NLM_F_DUMP == NLM_F_DUMP  # each of its bits alone means something else
        flags |= NLM_F_REQUEST if dump else NLM_F_REQUEST | NLM_F_ACK
        self._socket.send(HEADER.pack(HEADER.size + len(payload), kind, flags, self._number, 0) + payload)
        found: list[tuple[int, bytes]] = []
        while not self._collect(found):
            continue
        return found

    def _collect(self, found: list[tuple[int, bytes]]) -> bool:
        try:
            data = self._socket.recv(BUFFER_BYTES)
        except TimeoutError:
            raise NetlinkError(errno.ETIMEDOUT, "the kernel did not answer a netlink request") from None
        ended = False
        for kind, number, payload in messages(data):
            if number != self._number:
                continue
            if kind == NLMSG_DONE:
                ended = True
            elif kind == NLMSG_ERROR:
                (code,) = struct.unpack_from("=i", payload)
                if code:
                    raise NetlinkError(-code, os.strerror(-code))
                ended = True
            else:
                found.append((kind, payload))
        return ended


@dataclass(frozen=True, slots=True)
class LinkState:
    """One interface as the kernel told it last; ``usable`` = switched on and with carrier."""

    index: int
    name: str
    usable: bool


def parse_link(kind: int, payload: bytes) -> LinkState | None:
    """From RTM_NEWLINK or RTM_DELLINK; ``None`` for another family's message."""
    if len(payload) < LINK.size:
        return None
    family, _, index, flags, _ = LINK.unpack_from(payload)
    name = attributes(payload[LINK.size :]).get(IFLA_IFNAME, b"").rstrip(b"\0").decode(errors="replace")
    if family != socket.AF_UNSPEC or not name:
        return None
    usable = kind == RTM_NEWLINK and flags & IFF_UP != 0 and flags & IFF_LOWER_UP != 0
    return LinkState(index, name, usable)


class LinkWatch:
    """Tells of interfaces as they change; `fileno` becomes readable then."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket.bind((0, RTMGRP_LINK))
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def read(self) -> list[LinkState]:
        """What has changed since the last call, oldest first; everything anew when the kernel's queue ran over."""
        found: list[LinkState] = []
        while True:
            try:
                data = self._socket.recv(BUFFER_BYTES)
            except BlockingIOError:
                return found
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                return [*found, *links()]
            found += _states(data)


def _states(data: bytes) -> list[LinkState]:
    told = (parse_link(kind, payload) for kind, _, payload in messages(data) if kind in (RTM_NEWLINK, RTM_DELLINK))
    return [state for state in told if state is not None]


def links() -> list[LinkState]:
    """All interfaces of this network namespace, now."""
    channel = Channel()
    try:
        answers = channel.ask(RTM_GETLINK, NLM_F_DUMP, LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
    finally:
        channel.close()
    told = (parse_link(kind, payload) for kind, payload in answers)
    return [state for state in told if state is not None]
