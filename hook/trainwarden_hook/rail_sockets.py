"""The heartbeat sockets of one rail: bound to the interface, so that what they send and hear has passed this rail and no other.

There are two on one port, and the kernel sorts: heartbeats that tell of nothing new wait in the first until the watch has its turn, news
in the second wakes it. So it wakes as often as it sends, not as often as all its peers do.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import select
import socket
import struct
import time

from trainwarden_hook.beats import RAIL_AT

log = logging.getLogger("trainwarden.links")
IP_FREEBIND, PACKET_PRIORITY, TOS_NETWORK_CONTROL = 15, 6, 0xC0
MAX_DATAGRAM_BYTES = 256
MAX_READ = 1024
BUFFER_BYTES = 1 << 20
ANCILLARY_BYTES = 64
SO_TIMESTAMPNS, SO_ATTACH_REUSEPORT_CBPF = 35, 51
TIMESPEC, FILTER = struct.Struct("@qq"), struct.Struct("=HBBI")
LOAD_BYTE, SHIFT_RIGHT, RETURN_A = 0x30, 0x74, 0x16
LONGEST_WAIT_NS = 1_000_000_000
_CODES = ((LOAD_BYTE, RAIL_AT), (SHIFT_RIGHT, 7), (RETURN_A, 0))
_PROGRAM = ctypes.create_string_buffer(b"".join(FILTER.pack(code, 0, 0, value) for code, value in _CODES))
SORTING = struct.pack("@HP", len(_CODES), ctypes.addressof(_PROGRAM))
"""The kernel's choice among the sockets of a port, by the bit for news: the first, or the second."""
GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.EBADF})


class RailSocket:
    """Opened when the interface is there, and opened anew when it came back as another one.

    Parameters
    ----------
    address
        Own address on the rail.
    interface
        Its interface.
    """

    def __init__(self, address: str, port: int, interface: str) -> None:
        self._address = address
        self._port = port
        self._interface = interface
        self._sockets: list[socket.socket] = []
        self._index = 0

    @property
    def number(self) -> int:
        """File number of what wakes the watch: the socket for news; -1 while closed."""
        return self._sockets[-1].fileno() if self._sockets else -1

    def open(self, poll: select.epoll) -> bool:
        """Open it if it is not; ``False`` when that is not possible now."""
        try:
            index = socket.if_nametoindex(self._interface)
            if self._sockets and index == self._index:
                return True
            self.close()
            self._sockets, self._index = self._make(), index
        except OSError as error:
            log.warning("no heartbeats on %s: %s", self._interface, error.strerror)
            return False
        poll.register(self.number, select.EPOLLIN)
        return True

    def _make(self) -> list[socket.socket]:
        """One for heartbeats and one for news; both in one where the kernel does not sort them."""
        made = [self._bound()]
        try:
            made[0].setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, SORTING)
            made.append(self._bound())
        except OSError as error:
            log.info("heartbeats on %s are read one by one: %s", self._interface, error.strerror)
        return made

    def _bound(self) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self._interface.encode() + b"\0")
            made.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, PACKET_PRIORITY)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            made.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            made.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, struct.pack("i", TOS_NETWORK_CONTROL))
            made.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
            made.bind((self._address, self._port))
        except OSError:
            made.close()
            raise
        return made

    def read(self, news: bool) -> list[tuple[bytes, int]]:
        """Datagrams that wait, and how long each has waited in nanoseconds; ``news``: there are some.

        What comes faster than we read waits for the next turn.
        """
        found: list[tuple[bytes, int]] = []
        for each in self._sockets if news else self._sockets[:1]:
            for _ in range(MAX_READ):
                try:
                    data, notes, _, _ = each.recvmsg(MAX_DATAGRAM_BYTES, ANCILLARY_BYTES)
                except OSError:
                    # nothing is left, or the kernel tells that a peer's port was closed: either way the next turn reads on
                    break
                found.append((data, _waited_ns(notes)))
        return found

    def send(self, data: bytes, address: str) -> bool:
        """One datagram; ``False`` when it did not leave."""
        if not self._sockets:
            return False
        try:
            self._sockets[0].sendto(data, socket.MSG_DONTWAIT, (address, self._port))
        except OSError as error:
            if error.errno in GONE:
                self._index = 0
            return False
        return True

    def close(self) -> None:
        """Give the socket back."""
        for each in self._sockets:
            each.close()
        self._sockets = []


def _waited_ns(notes: list[tuple[int, int, bytes]]) -> int:
    """How long ago the kernel received it; 0 where it does not say, and where the clock was set meanwhile."""
    for _, kind, payload in notes:
        if kind == SO_TIMESTAMPNS and len(payload) >= TIMESPEC.size:
            seconds, nanoseconds = TIMESPEC.unpack_from(payload)
            waited_ns = time.time_ns() - seconds * 1_000_000_000 - nanoseconds
            return waited_ns if 0 <= waited_ns < LONGEST_WAIT_NS else 0
    return 0
