"""Saves of one rank read by the others while they restore: ranges of bytes over TCP.

Every rank that holds saves serves them for as long as the restore lasts; who lacks a save, or after a
change of the world needs other parts of it, pulls just those bytes, and from several holders at once.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from types import TracebackType

from trainwarden_hook.crew import BLOCK_BYTES
from trainwarden_hook.sums import checksum

log = logging.getLogger("trainwarden.checkpoint")
_REQUEST = struct.Struct("<IQQ")
TOKEN_BYTES = 16
PIECE_BYTES = 4 << 20
STRIDE_BYTES = 8 * BLOCK_BYTES
TIMEOUT_S = 20.0


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


class Follower:
    """The checksum of an area while it is being filled, by a thread that follows the filling one."""

    def __init__(self, target: memoryview) -> None:
        self._target = target
        self._filled = self._done = 0
        self._ended = False
        self._changed = threading.Condition()
        self._sum = 0
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="trainwarden-verify", daemon=True)
        self._thread.start()

    def advance(self, size: int) -> None:
        """``size`` more bytes are there."""
        with self._changed:
            self._filled += size
            self._changed.notify()

    def end(self) -> int:
        """Checksum of all that is there, once nothing more comes."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        return self._sum

    def _run(self) -> None:
        try:
            last = False
            while not last:
                until, last = self._next()
                self._sum = checksum(self._target[self._done : until], self._sum)
                self._done = until
        except Exception as error:
            self._problem = error

    def _next(self) -> tuple[int, bool]:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._filled >= self._done + STRIDE_BYTES)
            return (self._filled, True) if self._ended else (self._filled // STRIDE_BYTES * STRIDE_BYTES, False)


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

    def read_summed(self, number: int, target: memoryview) -> int:
        """Fill ``target`` from the beginning of an area; its checksum. Raises `OSError`."""
        self._socket.sendall(_REQUEST.pack(number, 0, len(target)))
        follower = Follower(target)
        try:
            for start in range(0, len(target), STRIDE_BYTES):
                piece = target[start : start + STRIDE_BYTES]
                receive(self._socket, piece)
                follower.advance(len(piece))
        finally:
            total = follower.end()
        return total

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
