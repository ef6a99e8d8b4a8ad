"""What an INSERT carries, as a file that the engine reads.

chDB's own streaming insert (`send_insert`, 26.9) tells of errors while it reads the data and of none while it writes: a full disk, too
many parts, a broken constraint or a failing view all end in "done". `FROM INFILE` runs like any other statement, with its errors.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streams.store.chdb_sql import tokens

IN_MEMORY_BYTES = 64 << 20


class NoRoomError(Exception):
    """Neither memory nor disk takes the data of an INSERT."""


def from_file(statement: str, path: str, data_format: str) -> str:
    """The INSERT with its data in a file.

    Raises
    ------
    ValueError
        It names a file of its own.

    Examples
    --------
    >>> from_file("INSERT INTO t (x) SETTINGS async_insert=0", "/proc/self/fd/9", "Arrow")
    "INSERT INTO t (x) FROM INFILE '/proc/self/fd/9' COMPRESSION 'none' SETTINGS async_insert=0 FORMAT Arrow"
    """
    start, at = 0, len(statement)
    for token in tokens(statement):
        word = token.text.upper() if token.kind == "word" else ""
        if word == "INFILE":
            raise ValueError("FROM INFILE is the client's business: send the data behind the statement")
        if word == "SETTINGS":
            at = start
            break
        start = token.end
    head, tail = statement[:at].rstrip(), statement[at:].strip()
    parts = (head, f"FROM INFILE '{path}' COMPRESSION 'none'", tail, f"FORMAT {data_format}")
    return " ".join(part for part in parts if part)


@contextmanager
def held(chunks: Iterable[bytes], directory: Path) -> Iterator[str]:
    """All chunks in one file without a name, in memory as long as they are few; its path is good for this process while the block runs.

    Raises
    ------
    NoRoomError
        Neither memory nor the directory's disk took them.
    """
    file = os.memfd_create("insert", os.MFD_CLOEXEC)
    size, limit = 0, IN_MEMORY_BYTES
    try:
        for chunk in chunks:
            try:
                if size + len(chunk) > limit:
                    file, limit = _on_disk(file, size, directory), 1 << 62
                _write(file, chunk)
            except OSError as error:
                raise NoRoomError(error.strerror) from error
            size += len(chunk)
        yield f"/proc/self/fd/{file}"
    finally:
        with suppress(OSError):
            os.close(file)


def _on_disk(memory: int, size: int, directory: Path) -> int:
    descriptor, name = tempfile.mkstemp(prefix="insert-", dir=directory)
    os.unlink(name)
    try:
        os.lseek(memory, 0, os.SEEK_SET)
        while size > 0:
            size -= os.sendfile(descriptor, memory, None, size)
    except OSError:
        os.close(descriptor)
        raise
    os.close(memory)
    return descriptor


def _write(file: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(file, view) :]
