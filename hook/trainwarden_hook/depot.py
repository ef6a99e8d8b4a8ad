"""The replicas that a node keeps for the ranks of its partner: memory of the launcher, filled over TCP.

A replica is received beside the one before and takes its place when it is whole, so a sender that dies in
the middle costs nothing. While one arrives there are two of that rank; `AT_ONCE` bounds for how many.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from trainwarden_hook import segments
from trainwarden_hook.pace import Pace
from trainwarden_hook.packing import HEADER_BYTES, Header, Refused
from trainwarden_hook.pull import PIECE_BYTES, receive

log = logging.getLogger("trainwarden.checkpoint")
AT_ONCE = 2
SILENCE_S = 10.0
TURN_S = 120.0
MAX_OPENING_BYTES = 4096
GO, COMMIT, KEPT = b"g", b"c", b"k"


class Depot:
    """Receives replicas of the job's ranks for this node.

    Parameters
    ----------
    host
        Address to listen on.

    Raises
    ------
    OSError
        It cannot listen there.
    """

    def __init__(self, host: str, job: str, node: str) -> None:
        self._job = job
        self._node = node
        self._token = secrets.token_hex(16)
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        self._locks: dict[int, threading.Lock] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self._socket.listen(128)
        self.kept = 0
        self.failed = 0
        self.address = f"{host}:{self._socket.getsockname()[1]}:{self._token}"
        threading.Thread(target=self._accept, name="trainwarden-depot", daemon=True).start()

    def close(self) -> None:
        """Take nothing more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="trainwarden-depot", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(SILENCE_S)
                self._take(connection, _opening(connection, self._token))
                self.kept += 1
            except (OSError, ValueError, OverflowError, Refused) as error:
                self.failed += 1
                log.warning("a replica was not kept: %s", error)

    def _take(self, connection: socket.socket, opening: dict[str, Any]) -> None:
        rank, size = opening["rank"], opening["size"]
        with self._locks.setdefault(rank, threading.Lock()), self._turns:
            final = segments.replica_path(self._job, self._node, rank)
            fresh = f"{final}.new"
            try:
                header = _receive_into(fresh, size, connection)
                os.rename(fresh, final)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(fresh)
            self._forget_ranks_from(header.world)
            connection.sendall(KEPT)

    def _forget_ranks_from(self, world: int) -> None:
        """In a smaller world nobody replaces the replicas of ranks that are no more."""
        for path in segments.replicas(self._job, self._node):
            if segments.rank_of_replica(path) >= world:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def open_depot(host: str, job: str, node: str) -> Depot | None:
    """The depot of this node; ``None``, and a line in the log, when it cannot listen: saves then have no replica."""
    try:
        return Depot(host, job, node)
    except OSError as error:
        log.warning("this node keeps no replicas, its depot cannot listen on %s: %s", host, error)
        return None


def _opening(connection: socket.socket, token: str) -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        got = connection.recv(1)
        if not got or len(line) > MAX_OPENING_BYTES:
            raise ConnectionError("the sender said nothing that makes sense")
        line += got
    opening = json.loads(line)
    if not isinstance(opening, dict) or not secrets.compare_digest(str(opening.get("token", "")), token):
        raise ConnectionError("a sender does not have the token")
    if not all(isinstance(opening.get(key), int) and opening[key] >= 0 for key in ("rank", "size")):
        raise ValueError(f"rank and size of a replica are {opening.get('rank')!r} and {opening.get('size')!r}")
    return opening


def _receive_into(path: str, size: int, connection: socket.socket) -> Header:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(size, HEADER_BYTES))
        # Not closed by hand: an exception on the way still holds pieces of it.
        view = memoryview(mmap.mmap(descriptor, max(size, HEADER_BYTES)))
        connection.sendall(GO)
        receive(connection, view[:size])
        commit = bytearray(1)
        receive(connection, memoryview(commit))
        if commit != COMMIT:
            raise ConnectionError("the sender has called the replica off")
        return Header.decode(view[:HEADER_BYTES], path)
    finally:
        os.close(descriptor)


class Replica:
    """A goal of saves: the depot of the partner node.

    Parameters
    ----------
    address
        ``host:port:token`` of the depot.
    bytes_per_s
        Limit of sending; 0 for none.
    timeout_s
        A depot that takes nothing for so long is given up for this save.
    """

    where = "peer"

    def __init__(self, address: str, rank: int, bytes_per_s: float = 0.0, timeout_s: float = 5.0) -> None:
        self._host, port, self._token = address.rsplit(":", 2)
        self._port = int(port)
        self._rank = rank
        self._pace = Pace(bytes_per_s)
        self._timeout_s = timeout_s

    def write(self, header: Header, payload: memoryview, still_valid: Callable[[], bool]) -> bool:
        """Send one save; ``False`` if it was overwritten on the way.

        Raises
        ------
        OSError
            The depot is not there, hangs, or could not keep it.
        """
        opening = {"token": self._token, "rank": self._rank, "size": HEADER_BYTES + len(payload)}
        with socket.create_connection((self._host, self._port), self._timeout_s) as connection:
            connection.sendall(json.dumps(opening).encode() + b"\n")
            connection.settimeout(TURN_S)
            receive(connection, memoryview(bytearray(1)))
            connection.settimeout(self._timeout_s)
            connection.sendall(header.encode())
            for start in range(0, len(payload), PIECE_BYTES):
                if not still_valid():
                    return False
                piece = payload[start : start + PIECE_BYTES]
                connection.sendall(piece)
                self._pace.spend(len(piece))
            if not still_valid():
                return False
            connection.sendall(COMMIT)
            receive(connection, memoryview(bytearray(1)))
        return True
