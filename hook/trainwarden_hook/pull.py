"""Saves of one rank read by the others while they restore: ranges of bytes over TCP.

Every rank that holds saves serves them for as long as the restore lasts; who lacks a save, or after a
change of the world needs other parts of it, pulls just those bytes, and from several holders at once.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from types import TracebackType

log = logging.getLogger("trainwarden.checkpoint")
_REQUEST = struct.Struct("<IQQ")
TOKEN_BYTES = 16
PIECE_BYTES = 4 << 20
TIMEOUT_S = 20.0
MADV_HUGEPAGE = 14


def room(size: int) -> memoryview:
    """Private memory for ``size`` bytes, in large pages where the system gives them."""
    area = mmap.mmap(-1, max(1, size))
    with contextlib.suppress(OSError):
        area.madvise(MADV_HUGEPAGE)
    return memoryview(area)[:size]


class Server:
    """Serves some byte areas to whoever knows the token.

    Parameters
    ----------
    areas
        By number, as the requests name them.
    host
        Address to listen on, which the other ranks reach this one by.
    """

    def __init__(self, areas: Sequence[memoryview], host: str) -> None:
        self._areas = areas
        self._token = secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self._socket.listen(128)
        self.address = (host, int(self._socket.getsockname()[1]), self._token.hex())
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, name="trainwarden-serve", daemon=True).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; what is still being read ends."""
        for connection in [self._socket, *self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), name="trainwarden-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(TIMEOUT_S)
            token = bytearray(TOKEN_BYTES)
            receive(connection, memoryview(token))
            if not secrets.compare_digest(bytes(token), self._token):
                log.warning("somebody without the token asked for a save")
                return
            self._answer(connection)
        except OSError as error:
            log.info("a reader of a save has gone: %s", error)
        finally:
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        request = bytearray(_REQUEST.size)
        while True:
            receive(connection, memoryview(request))
            number, offset, size = _REQUEST.unpack(request)
            if number >= len(self._areas) or offset + size > len(self._areas[number]):
                raise OSError(f"bytes {offset} to {offset + size} of area {number} were asked for, which are not there")
            area = self._areas[number][offset : offset + size]
            for start in range(0, size, PIECE_BYTES):
                connection.sendall(area[start : start + PIECE_BYTES])


def receive(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``.

    Raises
    ------
    OSError
        The other end has gone, or sends nothing for the connection's time-out.
    """
    while target:
        got = connection.recv_into(target[:PIECE_BYTES])
        if not got:
            raise ConnectionError("the other end has closed the connection")
        target = target[got:]


class Reader:
    """Reads areas of one `Server`.

    Raises
    ------
    OSError
        It cannot be reached.
    """

    def __init__(self, address: tuple[str, int, str], timeout_s: float = TIMEOUT_S) -> None:
        host, port, token = address
        self._socket = socket.create_connection((host, port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(bytes.fromhex(token))

    def read(self, number: int, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` of area ``number``; raises `OSError`."""
        self._socket.sendall(_REQUEST.pack(number, offset, len(target)))
        receive(self._socket, target)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
