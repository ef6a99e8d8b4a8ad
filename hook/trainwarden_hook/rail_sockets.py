"""The heartbeat socket of one rail: bound to the interface, so that what it sends and hears has passed this rail and no other."""

from __future__ import annotations

import errno
import logging
import select
import socket
import struct

log = logging.getLogger("trainwarden.links")
IP_FREEBIND, PACKET_PRIORITY, TOS_NETWORK_CONTROL = 15, 6, 0xC0
MAX_DATAGRAM_BYTES = 256
MAX_READ = 1024
BUFFER_BYTES = 1 << 20
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
        self._socket: socket.socket | None = None
        self._index = 0

    @property
    def number(self) -> int:
        """File number, -1 while closed."""
        return self._socket.fileno() if self._socket is not None else -1

    def open(self, poll: select.epoll) -> bool:
        """Open it if it is not; ``False`` when that is not possible now."""
        try:
            index = socket.if_nametoindex(self._interface)
            if self._socket is not None and index == self._index:
                return True
            self.close()
            self._socket, self._index = self._make(), index
        except OSError as error:
            log.warning("no heartbeats on %s: %s", self._interface, error.strerror)
            return False
        poll.register(self._socket.fileno(), select.EPOLLIN)
        return True

    def _make(self) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self._interface.encode() + b"\0")
            made.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, PACKET_PRIORITY)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            made.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, struct.pack("i", TOS_NETWORK_CONTROL))
            made.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
            made.bind((self._address, self._port))
        except OSError:
            made.close()
            raise
        return made

    def read(self) -> list[bytes]:
        """Datagrams that wait; what comes faster than we read waits for the next turn."""
        found: list[bytes] = []
        while self._socket is not None and len(found) < MAX_READ:
            try:
                found.append(self._socket.recv(MAX_DATAGRAM_BYTES))
            except OSError:
                # nothing is left, or the kernel tells that a peer's port was closed: either way the next turn reads on
                break
        return found

    def send(self, data: bytes, address: str) -> bool:
        """One datagram; ``False`` when it did not leave."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto(data, socket.MSG_DONTWAIT, (address, self._port))
        except OSError as error:
            if error.errno in GONE:
                self._index = 0
            return False
        return True

    def close(self) -> None:
        """Give the socket back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
