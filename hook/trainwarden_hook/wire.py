"""Datagrams from the training processes to the node's collector.

One JSON object per datagram. Sending never blocks and never raises: a datagram that
does not fit is dropped, counted, and the count travels with the next one that fits.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping

WIRE_VERSION = 1
MAX_PATH_BYTES = 100


def plain_number(value: float) -> float | str:
    """JSON has no NaN and no infinities: these go as the strings ``nan``, ``inf``, ``-inf``."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _plain(value: object) -> object:
    if isinstance(value, float):
        return plain_number(round(value, 6) if math.isfinite(value) else value)
    return value


def encode(kind: str, fields: Mapping[str, object]) -> bytes:
    """Wire form of one datagram; fields that are ``None`` are left out (absent = not known)."""
    body = {"v": WIRE_VERSION, "t": kind}
    body.update((key, _plain(value)) for key, value in fields.items() if value is not None)
    return json.dumps(body, separators=(",", ":")).encode()


def unix_address(path: str) -> str:
    """A path that fits the 108 bytes of a unix address (through ``/proc`` if it is too long)."""
    if len(os.fsencode(path)) < MAX_PATH_BYTES:
        return path
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    # The descriptor stays open for the life of the process: the kernel resolves it at every use.
    return f"/proc/self/fd/{folder}/{os.path.basename(path)}"


class Sender:
    """Non-blocking datagram sender.

    Parameters
    ----------
    path
        The collector's socket; ``None`` makes the sender silent (nothing is counted either).
    """

    def __init__(self, path: str | None) -> None:
        self.dropped = 0
        self.sent = 0
        self._unreported = 0
        self._address = unix_address(path) if path and os.path.isdir(os.path.dirname(path)) else None
        self._socket: socket.socket | None = None
        if self._address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    @property
    def silent(self) -> bool:
        """Whether there is no collector to talk to."""
        return self._socket is None

    def send(self, kind: str, fields: Mapping[str, object]) -> bool:
        """Send one datagram; ``False`` when it was dropped."""
        return self._socket is not None and self.send_body(encode(kind, fields))

    def send_body(self, body: bytes) -> bool:
        """Send a datagram that is encoded already (it ends in ``}``); ``False`` when it was dropped."""
        if self._socket is None or self._address is None:
            return False
        waiting = self._unreported
        if waiting:
            body = b'%b,"dropped":%d}' % (body[:-1], waiting)
        try:
            self._socket.sendto(body, socket.MSG_DONTWAIT, self._address)
        except OSError:
            self.dropped += 1
            self._unreported += 1
            return False
        self.sent += 1
        self._unreported -= waiting
        return True

    def note_dropped(self, count: int) -> None:
        """Datagrams that never came here: the next one that fits tells of them too."""
        self.dropped += count
        self._unreported += count

    def close(self) -> None:
        """Give the socket back; later sends are silent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
