"""Saves on disk: the same bytes as in memory, written atomically, the last three kept."""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterator

from trainwarden_hook.packing import HEADER_BYTES, Header, Refused, check, unpack
from trainwarden_hook.segments import file_part

CHUNK_BYTES = 4 << 20
KEEP = 3
SUFFIX = ".twck"
_NAME = re.compile(r"step-(\d{12})\..+\.twck$")


class Folder:
    """The checkpoint files of one job; this process writes under its own node and local rank."""

    def __init__(self, root: str, job: str, node: str, local_rank: int) -> None:
        self.path = os.path.join(root, file_part(job))
        self._own = f".{file_part(node)}-{local_rank}"

    def write(self, header: Header, payload: memoryview, still_valid: Callable[[], bool]) -> bool:
        """Write one save durably; ``False`` if its source was overwritten on the way.

        Raises
        ------
        OSError
            For example no space left; nothing half-written stays.
        """
        os.makedirs(self.path, exist_ok=True)
        final = os.path.join(self.path, f"step-{header.step:012d}{self._own}{SUFFIX}")
        temporary = f"{final}.tmp"
        try:
            if not self._fill(temporary, header, payload, still_valid):
                return False
            os.rename(temporary, final)
            _sync_folder(self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        self._retire()
        return True

    def _fill(self, path: str, header: Header, payload: memoryview, still_valid: Callable[[], bool]) -> bool:
        crc = 0
        with open(path, "wb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(header.encode()))
            for start in range(0, len(payload), CHUNK_BYTES):
                if not still_valid():
                    return False
                piece = payload[start : start + CHUNK_BYTES]
                crc = zlib.crc32(piece, crc)
                _write_all(file.fileno(), piece)
            os.fsync(file.fileno())
        return still_valid() and crc == header.payload_crc

    def _retire(self) -> None:
        own = sorted(glob.glob(os.path.join(glob.escape(self.path), f"step-*{glob.escape(self._own)}{SUFFIX}")))
        for path in own[:-KEEP]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

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


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: str, expected_fingerprint: int | None) -> tuple[Header, memoryview]:
    """Header and payload of a whole, fitting file.

    Raises
    ------
    Refused
        Truncated, corrupt, of another version or model, or not readable.
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
    return check(view[:HEADER_BYTES], view[HEADER_BYTES:], path, expected_fingerprint), view[HEADER_BYTES:]


def load_file(path: str, expected_fingerprint: int | None) -> dict[str, object]:
    """The state in a file; raises `Refused` like `open_file`."""
    header, payload = open_file(path, expected_fingerprint)
    return unpack(header, payload)
