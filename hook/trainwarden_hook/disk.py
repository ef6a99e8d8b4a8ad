"""Saves on disk: the same bytes as in memory, written atomically under a limit, the newest few kept.

What an interrupted write left behind is gone on with: pieces that are there and equal are not written again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Callable, Iterator

from trainwarden_hook.pace import Pace
from trainwarden_hook.packing import HEADER_BYTES, Header, Refused, check, unpack
from trainwarden_hook.segments import file_part
from trainwarden_hook.sums import checksum

CHUNK_BYTES = 4 << 20
KEEP = 3
SUFFIX = ".twck"
_NAME = re.compile(r"step-(\d{12})\..+\.twck$")


class Folder:
    """The checkpoint files of one job; this process writes under its own node and local rank.

    Parameters
    ----------
    keep, keep_every
        Of its own files the newest ``keep`` stay, and those whose step is a multiple of ``keep_every``.
    bytes_per_s
        Limit of writing; 0 for none.
    """

    where = "disk"

    def __init__(
        self,
        root: str,
        job: str,
        node: str,
        local_rank: int,
        keep: int = KEEP,
        keep_every: int = 0,
        bytes_per_s: float = 0.0,
    ) -> None:
        self.path = os.path.join(root, file_part(job))
        self._own = f".{file_part(node)}-{local_rank}"
        self._keep = keep
        self._keep_every = keep_every
        self._pace = Pace(bytes_per_s)

    def file_of(self, step: int) -> str:
        """Where this process keeps the save of ``step``."""
        return os.path.join(self.path, f"step-{step:012d}{self._own}{SUFFIX}")

    def write(self, header: Header, payload: memoryview, still_valid: Callable[[], bool]) -> bool:
        """Write one save durably; ``False`` if its source was overwritten on the way.

        Raises
        ------
        OSError
            For example no space left; nothing half-written stays (but after a kill: the next write goes on with it).
        """
        os.makedirs(self.path, exist_ok=True)
        final = self.file_of(header.step)
        temporary = f"{final}.tmp"
        try:
            if not self._fill(temporary, header, payload, still_valid):
                return False
            os.rename(temporary, final)
            _sync_folder(self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        self._retire(header.step)
        return True

    def _fill(self, path: str, header: Header, payload: memoryview, still_valid: Callable[[], bool]) -> bool:
        crc = 0
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._write_at(descriptor, memoryview(header.encode()), 0)
            for start in range(0, len(payload), CHUNK_BYTES):
                if not still_valid():
                    return False
                piece = payload[start : start + CHUNK_BYTES]
                crc = checksum(piece, crc)
                self._write_at(descriptor, piece, HEADER_BYTES + start)
            os.ftruncate(descriptor, HEADER_BYTES + len(payload))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return still_valid() and crc == header.payload_crc

    def _write_at(self, descriptor: int, data: memoryview, offset: int) -> None:
        if os.pread(descriptor, len(data), offset) == data:
            return
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written
            self._pace.spend(written)

    def _retire(self, newest: int) -> None:
        own = [name for name in self._own_files() if not self._is_kept_for_good(name)]
        for name in sorted(own)[: -self._keep]:
            self._remove(name)
        for name in os.listdir(self.path):
            # Left by a process that was killed in the middle of an older save.
            if name.endswith(f"{self._own}{SUFFIX}.tmp") and name < f"step-{newest:012d}":
                self._remove(name)

    def _own_files(self) -> list[str]:
        return [name for name in os.listdir(self.path) if _NAME.match(name) and name.endswith(self._own + SUFFIX)]

    def _is_kept_for_good(self, name: str) -> bool:
        return bool(self._keep_every) and int(name[5:17]) % self._keep_every == 0

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, name))

    def newest_first(self) -> Iterator[tuple[int, str]]:
        """Step and path of every file of the job, from whichever node."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return
        found = [(int(match[1]), name) for name in names if (match := _NAME.match(name))]
        for step, name in sorted(found, reverse=True):
            yield step, os.path.join(self.path, name)

    def discard_above(self, step: int) -> None:
        """Remove every save of the job newer than ``step`` (roll back).

        Those of other nodes too: a node that is out of the job is not there to remove its own, and a
        later restart, which has no bound, would take them.
        """
        for at, path in self.newest_first():
            if at > step:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def map_file(path: str) -> tuple[Header, memoryview]:
    """Header and payload of a file; the payload is not verified.

    Raises
    ------
    Refused
        Truncated, of another version, or not readable.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < HEADER_BYTES:
                raise Refused(f"{path} is truncated: {size} bytes")
            # A private writable map: torch wants writable memory, and nothing may reach the file.
            view = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from error
    return Header.decode(view[:HEADER_BYTES], path), view[HEADER_BYTES:]


def discard_file_above(path: str, step: int) -> None:
    """Remove the save at ``path`` if it is of a later step (roll back); what is no save stays."""
    try:
        header, _ = map_file(path)
    except Refused:
        return
    if header.step > step:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def open_file(path: str, expected_fingerprint: int | None) -> tuple[Header, memoryview]:
    """Header and payload of a whole, fitting file.

    Raises
    ------
    Refused
        Truncated, corrupt, of another version or model, or not readable.
    """
    header, payload = map_file(path)
    check(header, payload, path, expected_fingerprint)
    return header, payload


def load_file(path: str, expected_fingerprint: int | None) -> dict[str, object]:
    """The state in a file; raises `Refused` like `open_file`."""
    header, payload = open_file(path, expected_fingerprint)
    return unpack(header, payload)
