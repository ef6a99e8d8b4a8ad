"""Holds back what a node sends: the packets of an NFQUEUE go later, in the order in which they came. Not every kernel has netem.

    ip netns exec SPACE python -m benchmarks.recorder.delay --ms 15 --jitter-ms 3 --seed 1
    ip netns exec SPACE iptables -A OUTPUT -o eth0 -j NFQUEUE --queue-num 7

Says `ready` when the queue is bound. Ends, with nothing held any more, when its input does: take the rule away before.
The protocol is that of linux/netfilter/nfnetlink_queue.h.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator

QUEUE = 7
NETLINK_NETFILTER, SOL_NETLINK, NETLINK_NO_ENOBUFS, SO_RCVBUFFORCE = 12, 270, 5, 33
ERROR, REQUEST, ACK = 2, 1, 4
SUBSYSTEM, PACKET, VERDICT_BATCH, CONFIG = 3 << 8, 0, 3, 2
COMMAND, PARAMS, MAX_LENGTH, MASK, FLAGS = 1, 2, 3, 4, 5
BIND, COPY_META, WHOLE_SEGMENTS = 1, 1, 4
PACKET_HEADER, VERDICT_HEADER, ACCEPT = 1, 2, 1
HELD_AT_MOST, RECEIVE_BYTES = 65_536, 8 << 20


def attribute(kind: int, value: bytes) -> bytes:
    """A netlink attribute, padded."""
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def message(kind: int, flags: int, body: bytes, queue: int = QUEUE) -> bytes:
    """A message to the subsystem of queues."""
    header = struct.pack("=IHHII", 20 + len(body), SUBSYSTEM | kind, flags, 1, 0)
    return header + struct.pack("!BBH", socket.AF_UNSPEC, 0, queue) + body


def release(last: int) -> bytes:
    """Lets go every packet up to one."""
    return message(VERDICT_BATCH, REQUEST, attribute(VERDICT_HEADER, struct.pack("!II", ACCEPT, last)))


def packets(data: bytes) -> Iterator[int]:
    """Ids of the packets that messages from the kernel announce; `OSError` where one tells of a failure."""
    while len(data) >= 16:
        length, kind = struct.unpack_from("=IH", data)
        if kind == ERROR and (code := -struct.unpack_from("=i", data, 16)[0]):
            raise OSError(code, f"the queue of packets: {os.strerror(code)}")
        if kind == SUBSYSTEM | PACKET:
            yield from _packet_ids(data[20:length])
        data = data[max(16, length + -length % 4) :]


def _packet_ids(attributes: bytes) -> Iterator[int]:
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == PACKET_HEADER:
            yield struct.unpack_from("!I", attributes, 4)[0]
        attributes = attributes[max(4, length + -length % 4) :]


class Line:
    """Packets in the order in which they came, each with the time at which it goes: none overtakes another."""

    def __init__(self, delay_s: float, jitter_s: float, rng: random.Random) -> None:
        self._delay_s, self._jitter_s, self._rng = delay_s, jitter_s, rng
        self._held: deque[tuple[float, int]] = deque()

    def add(self, packet: int, now_s: float) -> None:
        due_s = now_s + max(0.0, self._delay_s + self._rng.uniform(-self._jitter_s, self._jitter_s))
        self._held.append((max(due_s, self._held[-1][0]) if self._held else due_s, packet))

    def due(self, now_s: float) -> int | None:
        """The last packet that goes now, and with it all before."""
        last = None
        while self._held and self._held[0][0] <= now_s:
            last = self._held.popleft()[1]
        return last

    def wait_s(self, now_s: float) -> float | None:
        """Until the next one goes; None when nothing is held."""
        return max(0.0, self._held[0][0] - now_s) if self._held else None


class Queue:
    """The kernel's queue of packets of the namespace in which it is opened."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self.socket.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BYTES)
        self.socket.bind((0, 0))
        for body in (
            attribute(COMMAND, struct.pack("!BBH", BIND, 0, 0)),
            attribute(PARAMS, struct.pack("!IB", 0, COPY_META))
            + attribute(MAX_LENGTH, struct.pack("!I", HELD_AT_MOST)),
            # segments as large as they are sent, else each would be cut into packets of 1,500 bytes before it is queued
            attribute(MASK, struct.pack("!I", WHOLE_SEGMENTS)) + attribute(FLAGS, struct.pack("!I", WHOLE_SEGMENTS)),
        ):
            self.socket.send(message(CONFIG, REQUEST | ACK, body))
            list(packets(self.socket.recv(65_536)))
        self.socket.setblocking(False)

    def arrived(self) -> Iterator[int]:
        """Ids of the packets that wait to be read."""
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    yield from packets(self.socket.recv(1 << 20))
                except OSError as error:
                    # a verdict about what the kernel itself gave up, as when the interface went down
                    if error.errno != errno.ENOENT:
                        raise

    def release(self, last: int) -> None:
        self.socket.send(release(last))


def serve(queue: Queue, line: Line, ended: int) -> None:
    """Hold and let go, until `ended` (a descriptor) can be read and nothing is held."""
    asked = False
    while not asked or line.wait_s(time.monotonic()) is not None:
        wait_s = line.wait_s(time.monotonic())
        watched = [queue.socket.fileno()] if asked else [queue.socket.fileno(), ended]
        asked = ended in select.select(watched, [], [], wait_s)[0] or asked
        for packet in queue.arrived():
            line.add(packet, time.monotonic())
        last = line.due(time.monotonic())
        if last is not None:
            queue.release(last)


def main() -> None:
    """Hold back until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ms", type=float, required=True)
    parser.add_argument("--jitter-ms", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    # on a busy machine a packet would else be held for as long as a processor is not free
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(20))
    queue = Queue()
    print("ready", flush=True)
    serve(queue, Line(chosen.ms / 1000, chosen.jitter_ms / 1000, random.Random(chosen.seed)), sys.stdin.fileno())


if __name__ == "__main__":
    main()
