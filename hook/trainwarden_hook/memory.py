"""Two checkpoint buffers in shared memory, which outlive the training process.

The training thread only copies tensors; checksum and header follow in the background. At any
moment at least one buffer holds a whole save once there has been one: the other is overwritten.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import zlib
from dataclasses import dataclass
from typing import Any

from trainwarden_hook import segments
from trainwarden_hook.packing import HEADER_BYTES, Header, Plan, Refused, check, unpack

BUFFERS = ("a", "b")


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identity of the process that saves, for the header."""

    world: int
    rank: int
    generation: int
    fingerprint: int


class Buffer:
    """One segment.

    ``writing`` counts overwrites: whoever reads in the background looks at it before and after.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.step = -1
        self.sealed = False
        self.writing = 0
        self.lock = threading.Lock()
        self._map: mmap.mmap | None = None

    def open(self, size: int) -> memoryview:
        """Map at least ``size`` bytes, really reserved: a full /dev/shm is an error here, not a SIGBUS later.

        Raises
        ------
        OSError
            No space, no permission.
        """
        if self._map is None or len(self._map) < size:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o600)
            try:
                if os.fstat(descriptor).st_size < size:
                    os.posix_fallocate(descriptor, 0, size)
                # The older map may still be read in the background; it goes when the last view does.
                self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)
        return memoryview(self._map)

    def begin(self, size: int) -> memoryview:
        """Invalidate what is there and give the bytes to write to."""
        view = self.open(size)
        with self.lock:
            self.writing += 1
            self.sealed = False
            view[:HEADER_BYTES] = bytes(HEADER_BYTES)
        return view

    def seal(self, plan: Plan, stamp: Stamp, step: int, ticket: int) -> Header | None:
        """Checksum the payload and write the header; ``None`` if the buffer was overwritten meanwhile."""
        view = self.open(HEADER_BYTES + plan.payload_bytes)
        payload = view[HEADER_BYTES : HEADER_BYTES + plan.payload_bytes]
        header = Header(
            step,
            stamp.world,
            stamp.rank,
            stamp.generation,
            len(plan.index),
            plan.payload_bytes,
            zlib.crc32(payload),
            stamp.fingerprint,
            time.time_ns(),
        )
        with self.lock:
            if self.writing != ticket:
                return None
            view[:HEADER_BYTES] = header.encode()
            self.sealed = True
            self.step = step
        return header

    def look_for_nan(self, plan: Plan) -> str:
        """Name of a tensor of the model with a NaN in what has just been copied; empty if there is none."""
        view = self.open(HEADER_BYTES + plan.payload_bytes)
        return plan.first_nan(view[HEADER_BYTES : HEADER_BYTES + plan.payload_bytes])

    def examine(self, expected_fingerprint: int | None) -> Header | None:
        """Check what an earlier process left here; ``None`` if there is nothing.

        Raises
        ------
        Refused
            There is something that must not be used.
        """
        try:
            size = os.stat(self.path).st_size
        except FileNotFoundError:
            return None
        if size == 0:
            return None
        if size < HEADER_BYTES:
            raise Refused(f"{self.path} is truncated: {size} bytes")
        view = self.open(size)
        header = check(view[:HEADER_BYTES], view[HEADER_BYTES:], self.path, expected_fingerprint)
        self.sealed, self.step = True, header.step
        return header

    def load(self, header: Header) -> dict[str, Any]:
        """The state of an examined save."""
        return unpack(header, self.payload(header))

    def payload(self, header: Header) -> memoryview:
        """The bytes behind the header."""
        return self.open(HEADER_BYTES + header.payload_bytes)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]

    def discard(self) -> None:
        """Make what is here unusable."""
        if os.path.exists(self.path):
            self.begin(HEADER_BYTES)
        self.step = -1


class Buffers:
    """The pair of one rank."""

    def __init__(self, job: str, node: str, local_rank: int) -> None:
        self.pair = [Buffer(segments.path(job, node, local_rank, name)) for name in BUFFERS]

    def choose(self, being_read: Buffer | None) -> Buffer:
        """The buffer to overwrite: never the one being written to disk if the other is whole, else the older."""
        first, second = sorted(self.pair, key=lambda buffer: (buffer.sealed, buffer.step))
        if first is being_read and first.sealed and second.sealed:
            return second
        return first
