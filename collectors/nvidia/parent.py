"""The child's keeper: starts it, listens to it, starts it again when it ended, and never starts a second one beside it."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collectors.nvidia import wire
from trainwarden.clock import NS_PER_S, Clock

logger = logging.getLogger(__name__)

CHILD = Path(__file__).with_name("child.py")
BACKOFF_MAX_S = 60
LIVED_LONG_S = 300
CLOSE_WAIT_S = 0.2
BUFFER_BYTES = 1 << 18


class Process:
    """A running child and the socket to it."""

    def __init__(self, options: Mapping[str, Any], child: Path = CHILD) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        ours.setblocking(False)
        # a lean interpreter: no site, no environment of Python's; one arena, or each thread would keep its own heap
        command = [sys.executable, "-I", "-S", str(child), json.dumps(options)]
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        with theirs:
            self.pid = os.posix_spawn(
                sys.executable, command, environment, file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)]
            )
        self._socket = ours
        self._buffer = bytearray(
            wire.MESSAGE_BYTES
        )  # kept: a fresh one of this size is a system call and pages to fill
        self._view = memoryview(self._buffer)
        self.ended = False

    def messages(self) -> list[bytes]:
        """What has arrived; sets `ended` when the child is gone."""
        found: list[bytes] = []
        was_reset = False
        while True:
            try:
                size = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return found
            except ConnectionError:
                # it went with messages of ours unread: that is said once, before what it said itself
                if not was_reset:
                    was_reset = True
                    continue
                size = 0
            if not size:
                self.ended = True
                return found
            found.append(bytes(self._view[:size]))

    def send(self, message: bytes) -> bool:
        """Tell the child something; false when it is going, or does not listen: the next message tells."""
        try:
            self._socket.send(message)
        except OSError:
            return False
        return True

    def reaped(self) -> bool:
        """Whether the process is gone from the process table. One that hangs in the driver stays there, whatever we do."""
        try:
            pid, _ = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return True
        return pid == self.pid

    def close(self) -> None:
        """Hang up: the child ends by itself. It is not killed, because that has frozen GPUs."""
        self._socket.close()


class Keeper:
    """Keeps one child alive.

    Parameters
    ----------
    options
        Its argument.
    silent_s
        Without a message for this long the child counts as hung.
    child
        The program, and what it is called in the log.
    """

    def __init__(
        self, clock: Clock, options: Mapping[str, Any], silent_s: float, child: tuple[Path, str] = (CHILD, "GPU")
    ) -> None:
        self._clock = clock
        self._child, self._called = child
        self._options = dict(options)
        self._silent_ns = int(silent_s * NS_PER_S)
        self._process: Process | None = None
        self._started_ns = 0
        self._heard_ns = 0
        self._backoff_s = 0
        self._not_before_ns = 0
        self.restarts = 0

    @property
    def silent(self) -> bool:
        """Whether the child says nothing though it runs."""
        return self._process is not None and self._clock.monotonic_ns() - self._heard_ns > self._silent_ns

    @property
    def running(self) -> bool:
        """Whether there is a child."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The child's process id; 0 without one."""
        return self._process.pid if self._process is not None else 0

    def remember(self, names: Mapping[str, str]) -> None:
        """Names that the next child is to go on with."""
        self._options["names"] = dict(names)

    def poll(self) -> list[bytes]:
        """What the child said since the last call; starts one when there is none and the back-off is over."""
        now_ns = self._clock.monotonic_ns()
        if self._process is None:
            if now_ns >= self._not_before_ns:
                self._start(now_ns)
            return []
        found = self._process.messages()
        if found:
            self._heard_ns = now_ns
        if self._process.ended and self._process.reaped():
            self._ended(now_ns)
        return found

    def shift(self, by_ns: int) -> None:
        """Ask the child to read earlier or later in the second."""
        self.send(wire.shift(by_ns))

    def send(self, message: bytes) -> bool:
        """Tell the child something; whether it was taken."""
        return self._process is not None and self._process.send(message)

    def close(self) -> None:
        """Let the child end."""
        process, self._process = self._process, None
        if process is not None:
            process.close()
            process.reaped()

    def _start(self, now_ns: int) -> None:
        self._started_ns = self._heard_ns = now_ns
        try:
            self._process = Process(self._options, self._child)
        except OSError as error:
            logger.warning("the %s helper cannot be started: %s", self._called, error.strerror)
            self._later(now_ns)

    def _ended(self, now_ns: int) -> None:
        self.close()
        self.restarts += 1
        if now_ns - self._started_ns > LIVED_LONG_S * NS_PER_S:
            self._backoff_s = 0
        self._later(now_ns)
        logger.warning("the %s helper ended; another one is started in %d s", self._called, self._backoff_s)

    def _later(self, now_ns: int) -> None:
        self._backoff_s = min(max(1, self._backoff_s * 2), BACKOFF_MAX_S)
        self._not_before_ns = now_ns + self._backoff_s * NS_PER_S
