"""Following a growing file: over rotation, truncation, copies of it, partial lines and restarts of the agent."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections import deque
from pathlib import Path

import msgspec

HEAD_BYTES = 256
CONTEXT_BYTES = 64
MAX_LINE_BYTES = 16 * 1024
QUIET_POLLS = 2
REMEMBERED = 16
ROTATED = re.compile(r"[.-](?:\d{1,3}|\d{8}(?:[-T]?\d{2,6})?|\d{10}|old|bak)")
"""How rotation names a file: an unrelated neighbour such as train.log.stderr is not read."""


class Position(msgspec.Struct, frozen=True):
    """Where reading stopped.

    Attributes
    ----------
    offset
        Of the next unread line.
    head_bytes, head_hash
        Of the file's beginning, because inodes are reused.
    context_hash
        Of what stands before `offset`, to know a copy of the file by; empty in positions of older versions.
    skipping
        `offset` lies within a line that is too long.
    """

    device: int
    inode: int
    offset: int
    head_bytes: int = 0
    head_hash: str = ""
    context_hash: str = ""
    skipping: bool = False


class Tail:
    """Lines of one path as they are added.

    Parameters
    ----------
    position
        Where an earlier run stopped; without it a file that is already there is read from its end.
    carriage
        A carriage return ends a line too: each state of a progress bar is a line of its own.
    """

    def __init__(self, path: Path, position: Position | None, from_start: bool = False, carriage: bool = False) -> None:
        self.path = path
        self._name = str(path)
        self.truncations = 0
        self.cut_lines = 0
        self._from_start = from_start
        self._carriage = carriage
        self._descriptor = -1
        self._identity = (0, 0)
        self._offset = 0
        self._partial = b""
        self._skipping = False
        self._head = b""
        self._context = b""
        self._modified_ns = -1
        self._quiet = 0
        self._moved = False
        self._first = True
        self._resume = position
        self._left: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the open file; zeros before there is one."""
        return self._identity

    @property
    def unsettled(self) -> bool:
        """Whether the open file is not, or was not until now, what bears the name: the next look may find more without anybody writing."""
        return self._moved or self._quiet > 0

    def position(self) -> Position | None:
        """Where to go on after a restart; None before the file was there."""
        if self._descriptor < 0:
            return self._resume
        offset = self._offset - len(self._partial)
        head = self._head[:offset]
        return Position(*self._identity, offset, len(head), _hash(head), _hash(_before(self._descriptor, offset)),
                        self._skipping)  # fmt: skip

    def poll(self, max_bytes: int) -> list[str]:
        """Complete lines added since the last call, at most about `max_bytes`. Raises `OSError` when the path cannot be read."""
        return [text_of(raw) for raw in self.block(max_bytes).split(b"\n")[:-1]]

    def block(self, max_bytes: int) -> bytes:
        """As `poll`, undecoded: each line with its newline. Bytes, because most of them are never looked at one by one."""
        self._moved = False
        if (self._descriptor < 0 and not self._open_first()) or self._unchanged():
            return b""
        data = self._read(max_bytes)
        if data:
            self._quiet = 0
            return self._complete(data)
        if self._replaced():
            # the writer may still hold the old file: leave it only after two empty looks
            self._quiet += 1
            if self._quiet >= QUIET_POLLS:
                return self._complete(self._leave(max_bytes))
        return b""

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # --- opening ---------------------------------------------------------------------------------------------------------

    def _open_first(self) -> bool:
        first, self._first = self._first, False
        resume = self._resume
        if resume is not None and (self._open_same(resume) or self._open_copy(resume)):
            return True
        try:
            at_end = first and resume is None and not self._from_start
            self._open(self.path, self.path.stat().st_size if at_end else 0)
        except FileNotFoundError:
            return False
        return True

    def _open_same(self, resume: Position) -> bool:
        """Go on where the last run stopped, also in a sibling that was rotated away meanwhile."""
        same = (resume.device, resume.inode)
        return any(_identity_of(path) == same and self._open_at(path, resume) for path in self._family())

    def _open_copy(self, resume: Position) -> bool:
        """Go on in a copy, where the file itself was truncated after copying."""
        return bool(resume.context_hash) and any(self._open_at(path, resume) for path in _siblings(self.path))

    def _open_at(self, path: Path, resume: Position) -> bool:
        try:
            self._open(path, resume.offset)
        except OSError:
            return False
        if self._agrees(resume):
            self._skipping = resume.skipping
            return True
        self.close()
        return False

    def _agrees(self, resume: Position) -> bool:
        if os.fstat(self._descriptor).st_size < resume.offset:
            return False
        if _hash(self._head[: resume.head_bytes]) != resume.head_hash:
            return False
        return resume.context_hash in ("", _hash(_before(self._descriptor, resume.offset)))

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
        self._offset, self._quiet = offset, 0
        self._head = os.pread(self._descriptor, min(HEAD_BYTES, offset), 0)
        self._context = _before(self._descriptor, offset)

    def _family(self) -> list[Path]:
        return [self.path, *_siblings(self.path)]

    # --- reading ---------------------------------------------------------------------------------------------------------

    def _unchanged(self) -> bool:
        try:
            found = os.stat(self._name)
        except FileNotFoundError:
            return False
        # a file that was truncated may have its old length again, but not its old time
        before, self._modified_ns = self._modified_ns, found.st_mtime_ns
        same = (found.st_dev, found.st_ino, found.st_size) == (*self._identity, self._offset)
        return same and found.st_mtime_ns == before

    def _read(self, max_bytes: int) -> bytes:
        """What was added. What stood before it is read along: when it is not what was read then, the file was truncated."""
        known = len(self._context)
        data = os.pread(self._descriptor, max_bytes + known, self._offset - known)
        if data[:known] != self._context:
            return self._truncated(max_bytes)
        fresh = data[known:]
        self._offset += len(fresh)
        self._context = data[-CONTEXT_BYTES:]
        if len(self._head) < HEAD_BYTES:
            self._head += fresh[: HEAD_BYTES - len(self._head)]
        return fresh

    def _truncated(self, max_bytes: int) -> bytes:
        self.truncations += 1
        for path in _siblings(self.path):
            if self._continues_in(path):
                self._open(path, self._offset)
                return self._read(max_bytes)
        ended = self._end_of_line()
        self._restart(_data_start(self._descriptor))
        return ended + self._read(max_bytes)

    def _continues_in(self, path: Path) -> bool:
        """Whether a sibling is a copy of what was read, with more behind it."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            longer = os.fstat(descriptor).st_size > self._offset
            return longer and bool(self._context) and _before(descriptor, self._offset) == self._context
        finally:
            os.close(descriptor)

    def _leave(self, max_bytes: int) -> bytes:
        """Go on to the file that came next: one rotated away meanwhile, or the path itself."""
        ended = self._end_of_line()
        self._moved = True
        self._left.append(self._identity)
        self._open(self._successor(), 0)
        return ended + self._read(max_bytes)

    def _successor(self) -> Path:
        since_ns = os.fstat(self._descriptor).st_mtime_ns
        newer = []
        for path in _siblings(self.path):
            found = _stat(path)
            if found and found.st_mtime_ns >= since_ns and (found.st_dev, found.st_ino) not in self._left:
                newer.append((found.st_mtime_ns, path))
        return min(newer)[1] if newer else self.path

    def _end_of_line(self) -> bytes:
        """Nobody will complete the line at the end of a file that is left."""
        return b"\n" if self._partial or self._skipping else b""

    def _complete(self, data: bytes) -> bytes:
        if self._carriage:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._skipping:
            _, newline, data = data.partition(b"\n")
            self._skipping = not newline
            if self._skipping:
                return b""
        end = data.rfind(b"\n") + 1
        block = self._partial + data[:end] if end else b""
        rest = data[end:] if end else self._partial + data
        if len(rest) > MAX_LINE_BYTES:
            # the head of an endless line is kept, the rest skipped up to the next newline
            block += rest[:MAX_LINE_BYTES] + b"\n"
            self.cut_lines += 1
            self._skipping, rest = True, b""
        self._partial = rest
        return block

    def _replaced(self) -> bool:
        found = _stat(self.path)
        return found is not None and (found.st_dev, found.st_ino) != self._identity


def text_of(raw: bytes) -> str:
    """Text of a line: sparse holes dropped, bad UTF-8 replaced, of a progress bar what stands after the last carriage return."""
    return raw[:MAX_LINE_BYTES].replace(b"\0", b"").rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _identity_of(path: Path) -> tuple[int, int]:
    found = _stat(path)
    return (found.st_dev, found.st_ino) if found else (-1, -1)


def _siblings(path: Path) -> list[Path]:
    """Files that rotation made of `path`."""
    start = len(path.name)
    try:
        with os.scandir(path.parent) as entries:
            names = [e.name for e in entries if e.name.startswith(path.name)]
    except OSError:
        return []
    return [path.with_name(name) for name in sorted(names) if ROTATED.fullmatch(name, start)]


def _before(descriptor: int, offset: int) -> bytes:
    start = max(0, offset - CONTEXT_BYTES)
    return os.pread(descriptor, offset - start, start)


def _data_start(descriptor: int) -> int:
    """Where data begin: a writer that does not append leaves a hole, gigabytes long, when its file is truncated."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError:
        return 0


def _hash(head: bytes) -> str:
    return hashlib.blake2b(head, digest_size=8).hexdigest()
