"""The process that calls the driver. Started with its options in one argument and a socket as standard input; ends with its parent.

It ends in order only: a client of the driver that is killed in the middle of a call has frozen GPUs. So it hears no SIGINT and no SIGTERM,
sees by the end of the socket that its parent is gone, and gives a call that runs a few seconds to come back.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from collectors.nvidia import wire
from collectors.nvidia.gpu import Spans
from collectors.nvidia.library import Library, LibraryError
from collectors.nvidia.sampler import Options, Sampler

NS = 10**9
PARTING_S = 5.0
POLL_S = 0.05


class Line:
    """The socket to the parent."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._kept: list[bytes] = []

    def wait(self, until_ns: int) -> int | None:
        """Sleep until `until_ns`; the shift that the parent asked for (0 = none), None when the parent is gone."""
        left_ms = max(0, until_ns - time.monotonic_ns()) / 1e6
        if not self._poll.poll(left_ms):
            return 0
        try:
            message = self._socket.recv(64)
        except ConnectionError:
            return None  # it went with messages unread
        return wire.shift_of(message) if message else None

    def send(self, messages: list[bytes]) -> None:
        """Send without waiting. A parent that does not read loses frames, never events and inventories (the newest 256 of them)."""
        for message in self._kept + messages:
            try:
                self._socket.send(message, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._kept = self._unsent(messages, message)[-256:]
                return
            except ConnectionError:
                return  # `wait` tells that the parent is gone
            except OSError as error:
                sys.stderr.write(
                    f"trainwarden gpu helper: a message of {len(message)} bytes is lost: {error.strerror}\n"
                )
        self._kept = []

    def _unsent(self, messages: list[bytes], first: bytes) -> list[bytes]:
        waiting = self._kept + messages
        return [message for message in waiting[waiting.index(first) :] if message[:1] != wire.ROWS]


def options_of(text: str) -> tuple[str, str, Options]:
    """(library, prefix, options) from the argument."""
    wanted = json.loads(text)
    every = tuple(int(seconds * NS) for seconds in (wanted["every_s"], wanted["medium_s"], wanted["slow_s"]))
    spans = Spans((every[0], every[1], every[2]), gpm=wanted["gpm"])
    options = Options(wanted["columns"], wanted["part_columns"], spans, wanted["events"], wanted["names"])
    return wanted["library"], wanted["prefix"], options


def free(processors: list[int]) -> None:
    """Run where the agent may run, not only where it keeps its threads: one busy processor must not look like a driver that hangs."""
    try:
        os.sched_setaffinity(0, processors)
    except (OSError, ValueError):
        return  # they were taken from us since: where we run by now will do


def serve(line: Line, sampler: Sampler, every_ns: int) -> None:
    """Tick until the parent is gone or the driver changed."""
    next_ns = time.monotonic_ns()
    while not sampler.finished:
        shift_ns = line.wait(next_ns)
        if shift_ns is None:
            return
        next_ns += shift_ns
        now_ns = time.monotonic_ns()
        if now_ns < next_ns:
            continue
        line.send(sampler.tick())
        next_ns = max(next_ns + every_ns, time.monotonic_ns())


def part(sampler: Sampler) -> None:
    """Let calls that run come back, for a while."""
    end_s = time.monotonic() + PARTING_S
    while sampler.busy and time.monotonic() < end_s:
        time.sleep(POLL_S)


def main(argument: str) -> int:
    """Serve; the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    path, prefix, options = options_of(argument)
    free(json.loads(argument).get("processors", ()))
    line = Line(socket.socket(fileno=0))
    try:
        library = Library(path, prefix)
    except LibraryError as error:
        sys.stderr.write(f"trainwarden gpu helper: {error}\n")
        line.send([wire.Frame(wire.NO_LIBRARY, 0, 0, 0, time.monotonic_ns(), 0, 0, 0, b"").pack()])
        return 0
    sampler = Sampler(library, options)
    gc.freeze()
    serve(line, sampler, options.spans.every_ns[0])
    part(sampler)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(status)  # a thread that hangs in the driver would hold up an ordinary end
