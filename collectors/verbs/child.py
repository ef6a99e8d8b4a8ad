"""The process that calls libibverbs. Started with its options in one argument and a socket as standard input; ends with its parent.

No call of the library is made in its first thread: that only tells the parent once a second how things are, which is the sign of life,
and hears whom to ask.
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
from collections.abc import Mapping, Sequence
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from collectors.verbs import wire
from collectors.verbs.library import LibraryError, Verbs
from collectors.verbs.port import Wanted
from collectors.verbs.probing import Pings
from collectors.verbs.rail import Rail

EVERY_S = 1.0
PARTING_S = 2.0
MESSAGE_BYTES = 1 << 18


def rails_of(options: Mapping[str, Any], verbs: Verbs) -> list[Rail]:
    """A thread for each port, none begun."""
    wanted = [Wanted(**each) for each in options["ports"]]
    return [
        Rail(verbs, each, Pings(options["timeout_s"], options["answers_per_s"]), turn, len(wanted))
        for turn, each in enumerate(wanted)
    ]


def told(rails: Sequence[Rail]) -> bytes:
    """The report of all rails."""
    rows: dict[str, list[float | None]] = {}
    refused: dict[str, int] = {}
    for rail in rails:
        own, turned_away = rail.pings.report()
        rows.update(own)
        for reason, count in turned_away.items():
            refused[reason] = refused.get(reason, 0) + count
    states = {rail.wanted.name: (rail.state, rail.address) for rail in rails}
    return wire.report(states, rows, refused, time.process_time() * 1000)


def obey(rails: Sequence[Rail], message: bytes) -> None:
    """Take orders; what are none is said, and the old ones stay."""
    try:
        period_s, targets = wire.orders_of(message)
    except wire.WireError as error:
        sys.stderr.write(f"trainwarden rdma helper: {error}\n")
        return
    for rail in rails:
        rail.period_s, rail.targets = period_s, targets.get(rail.wanted.name, [])


def serve(channel: socket.socket, rails: Sequence[Rail]) -> None:
    """Report and obey until the parent is gone."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    next_s = time.monotonic() + EVERY_S
    while True:
        if poll.poll(max(0.0, next_s - time.monotonic()) * 1000 + 1):
            try:
                message = channel.recv(MESSAGE_BYTES)
            except ConnectionError:
                return
            if not message:
                return
            obey(rails, message)
        elif not _sent(channel, told(rails)):
            return
        else:
            next_s = max(next_s + EVERY_S, time.monotonic())


def _sent(channel: socket.socket, message: bytes) -> bool:
    """Send without waiting; a parent that does not read loses reports. False when it is gone."""
    try:
        channel.send(message, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return True


def part(rails: Sequence[Rail]) -> None:
    """Let the ports be closed in order, for a while; the kernel closes those that hang."""
    end_s = time.monotonic() + PARTING_S
    for rail in rails:
        rail.end()
    for rail in rails:
        rail.join(max(0.0, end_s - time.monotonic()))


def main(argument: str) -> int:
    """Serve; the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its parent, not in the middle of a call
    options = json.loads(argument)
    channel = socket.socket(fileno=0)
    try:
        verbs = Verbs(options["library"])
    except LibraryError as error:
        sys.stderr.write(f"trainwarden rdma helper: {error}\n")
        _sent(channel, wire.report({}, {}, {}, 0.0, wire.NO_LIBRARY))
        return 0
    rails = rails_of(options, verbs)
    gc.freeze()
    for rail in rails:
        rail.start()
    serve(channel, rails)
    part(rails)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(status)  # a thread that hangs in the driver would hold up an ordinary end
