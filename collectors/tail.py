"""Following a growing file: over rotation, truncation, partial lines and restarts of the agent."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import msgspec

HEAD_BYTES = 256
MAX_LINE_BYTES = 16 * 1024
QUIET_POLLS = 2


class Position(msgspec.Struct, frozen=True):
    """Where reading stopped: file identity (device, inode, hash of its first bytes) and the offset of the next unread line."""

    device: int
    inode: int
    offset: int
    head_bytes: int = 0
    head_hash: str = ""


class Tail:
    """Lines of one path as they are added.

    Parameters
    ----------
    position
        Where an earlier run stopped; without it a file that is already there is read from its end.
    lost
        Called with a reason when bytes may have been missed (``truncated``, ``replaced``, ``long_line``).
    """

    def __init__(self, path: Path, position: Position | None, from_start: bool = False) -> None:
        self.path = path
        self.truncations = 0
        self.cut_lines = 0
        self._from_start = from_start
        self._descriptor = -1
        self._identity = (0, 0)
        self._offset = 0
        self._partial = b""
        self._skipping = False
        self._head = b""
        self._quiet = 0
        self._first = True
        self._resume = position

    def position(self) -> Position | None:
        """Where to go on after a restart; None before the file was there."""
        if self._descriptor < 0:
            return self._resume
        offset = self._offset - len(self._partial)
        head = self._head[:offset]
        return Position(*self._identity, offset, len(head), _hash(head))

    def poll(self, max_bytes: int) -> list[str]:
        """Complete lines added since the last call, at most about `max_bytes`. Raises `OSError` when the path cannot be read."""
        if self._descriptor < 0 and not self._open_first():
            return []
        if self._unchanged():
            return []
        before = (self._offset, self.truncations)
        lines = self._read(max_bytes)
        if (self._offset, self.truncations) != before:
            self._quiet = 0
            return lines
        if self._replaced():
            # the writer may still hold the old file: leave it only after two empty looks
            self._quiet += 1
            if self._quiet >= QUIET_POLLS:
                self._open(self.path, 0)
                return self._read(max_bytes)
        return []

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # --- opening ---------------------------------------------------------------------------------------------------------

    def _open_first(self) -> bool:
        first, self._first = self._first, False
        resume = self._resume
        if resume is not None and self._open_resumed(resume):
            return True
        try:
            at_end = first and resume is None and not self._from_start
            self._open(self.path, self.path.stat().st_size if at_end else 0)
        except FileNotFoundError:
            return False
        return True

    def _open_resumed(self, resume: Position) -> bool:
        """Go on where the last run stopped, also in a sibling that was rotated away meanwhile."""
        for path in [self.path, *_siblings(self.path)]:
            try:
                found = path.stat()
            except OSError:
                continue
            if (found.st_dev, found.st_ino) == (resume.device, resume.inode) and found.st_size >= resume.offset:
                self._open(path, resume.offset)
                if _hash(self._head[: resume.head_bytes]) == resume.head_hash:
                    return True
                self.close()
        return False

    def _open(self, path: Path, offset: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise OSError(22, "not a regular file", str(path))
        self.close()
        self._descriptor = descriptor
        self._identity = (found.st_dev, found.st_ino)
        self._restart(offset)

    def _restart(self, offset: int) -> None:
        self._offset, self._partial, self._skipping, self._quiet = offset, b"", False, 0
        self._head = os.pread(self._descriptor, min(HEAD_BYTES, offset), 0)

    # --- reading ---------------------------------------------------------------------------------------------------------

    def _unchanged(self) -> bool:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino, found.st_size) == (*self._identity, self._offset)

    def _read(self, max_bytes: int) -> list[str]:
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes < self._offset or (size_bytes > self._offset and self._head_changed()):
            self.truncations += 1
            self._restart(0)
        if size_bytes == self._offset:
            return []
        data = os.pread(self._descriptor, max_bytes, self._offset)
        if len(self._head) < HEAD_BYTES:
            self._head = os.pread(self._descriptor, min(HEAD_BYTES, self._offset + len(data)), 0)
        self._offset += len(data)
        return self._split(data)

    def _head_changed(self) -> bool:
        return bool(self._head) and os.pread(self._descriptor, len(self._head), 0) != self._head

    def _split(self, data: bytes) -> list[str]:
        *complete, rest = (self._partial + data).split(b"\n")
        lines = []
        for raw in complete:
            if not self._skipping:
                lines.append(_decode(raw))
            self._skipping = False
        if len(rest) > MAX_LINE_BYTES:
            # the head of an endless line is kept, the rest skipped up to the next newline
            if not self._skipping:
                lines.append(_decode(rest[:MAX_LINE_BYTES]))
                self.cut_lines += 1
            self._skipping, rest = True, b""
        self._partial = rest
        return lines

    def _replaced(self) -> bool:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) != self._identity


def _decode(raw: bytes) -> str:
    """Text of a line: sparse holes dropped, bad UTF-8 replaced, of a progress bar what stands after the last carriage return."""
    return raw[:MAX_LINE_BYTES].replace(b"\0", b"").rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


def _siblings(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.parent.iterdir() if p != path and p.name.startswith(path.name))
    except OSError:
        return []


def _hash(head: bytes) -> str:
    return hashlib.blake2b(head, digest_size=8).hexdigest()
