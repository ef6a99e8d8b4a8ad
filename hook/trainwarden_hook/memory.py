"""Two checkpoint buffers in shared memory, which outlive the training process.

The training thread only copies tensors; checksum and header follow in the background. At any
moment at least one buffer holds a whole save once there has been one: the other is overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from trainwarden_hook import segments
from trainwarden_hook.crew import BlockSums
from trainwarden_hook.packing import HEADER_BYTES, SHARDED, Header, Plan, Refused, fits, unpack
from trainwarden_hook.pinning import Pin, Runtime
from trainwarden_hook.sums import checksum

BUFFERS = ("a", "b")
NOTHING = bytes(HEADER_BYTES)
UNFINISHED = b"\x00" * 8 + b"unfinished".ljust(HEADER_BYTES - 8, b"\x00")
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python does not name yet


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identity of the process that saves, for the header."""

    world: int
    rank: int
    generation: int
    fingerprint: int


def _reserve(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = os.fstatvfs(descriptor)
        raise OSError(
            error.errno,
            f"{error.strerror}: {segments.SHARED_MEMORY_DIR} is too small for a save: {size / 1e6:.0f} MB are needed twice over,"
            f" {free.f_bavail * free.f_frsize / 1e6:.0f} of {free.f_blocks * free.f_frsize / 1e6:.0f} MB are free;"
            " make it larger (docker: --shm-size; Kubernetes: an emptyDir with medium Memory)",
        ) from error


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
        self._pin = Pin()

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
                    _reserve(descriptor, size)
                self._pin.release()
                # The older map may still be read in the background; it goes when the last view does.
                self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)
        return memoryview(self._map)

    def prepare(self, size: int) -> None:
        """Reserve the bytes and their page tables beforehand, so that the first save costs what later ones do."""
        self.open(size)
        current = self._map
        if current is not None:
            # An older kernel has no such advice: the first save is slower, no more.
            with contextlib.suppress(OSError):
                current.madvise(POPULATE_WRITE)

    def page_lock(self, cuda: Runtime | None) -> None:
        """Lock the mapped pages for the GPU's own writing, see `pinning`; nothing without one."""
        if self._map is not None:
            self._pin.hold(self._map, cuda)

    def begin(self, size: int) -> memoryview:
        """Invalidate what is there and give the bytes to write to."""
        view = self.open(size)
        with self.lock:
            self.writing += 1
            self.sealed = False
            view[:HEADER_BYTES] = UNFINISHED
        return view

    def seal(self, plan: Plan, stamp: Stamp, step: int, ticket: int, blocks: BlockSums | None = None) -> Header | None:
        """Checksum the payload (``blocks``: as far as its sums are known) and write the header; ``None`` if the buffer was
        overwritten meanwhile.
        """
        view = self.open(HEADER_BYTES + plan.payload_bytes)
        payload = view[HEADER_BYTES : HEADER_BYTES + plan.payload_bytes]
        header = Header(
            step,
            stamp.world,
            stamp.rank,
            stamp.generation,
            len(plan.index),
            plan.payload_bytes,
            checksum(payload, blocks=blocks),
            stamp.fingerprint,
            time.time_ns(),
            SHARDED if plan.sharded else 0,
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

    def look(self, expected_fingerprint: int | None) -> Header | None:
        """Header of what an earlier process left here, its payload not verified; ``None`` if there is nothing.

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
        page = self.open(size)[:HEADER_BYTES]
        if page == NOTHING:
            return None
        header = Header.decode(page, self.path)
        fits(header, size - HEADER_BYTES, self.path, expected_fingerprint)
        return header

    def keep(self, header: Header) -> None:
        """What is here is verified: it counts as a whole save, not to be overwritten before an older one."""
        self.sealed, self.step = True, header.step

    def load(self, header: Header) -> dict[str, Any]:
        """The state of an examined save."""
        return unpack(header, self.payload(header))

    def payload(self, header: Header) -> memoryview:
        """The bytes behind the header."""
        return self.open(HEADER_BYTES + header.payload_bytes)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]

    def discard_above(self, step: int) -> None:
        """Make a save of a later step unusable (roll back); what is no save stays as it is."""
        try:
            header = self.look(None)
        except Refused:
            return
        if header is not None and header.step > step:
            self.discard()

    def discard(self) -> None:
        """Make what is here unusable."""
        if os.path.exists(self.path):
            self.begin(HEADER_BYTES)[:HEADER_BYTES] = NOTHING
        self.step = -1


class Buffers:
    """The pair of one rank."""

    def __init__(self, job: str, node: str, local_rank: int) -> None:
        self.pair = [Buffer(segments.path(job, node, local_rank, name)) for name in BUFFERS]

    def choose(self, being_written_out: Buffer | None) -> Buffer:
        """The buffer to overwrite: never the one being written to disk if the other is whole, else the older."""
        first, second = sorted(self.pair, key=lambda buffer: (buffer.sealed, buffer.step))
        if first is being_written_out and first.sealed and second.sealed:
            return second
        return first

    def other(self, buffer: Buffer) -> Buffer:
        """The one of the pair that ``buffer`` is not."""
        return self.pair[1] if buffer is self.pair[0] else self.pair[0]
