"""SQLite files of ours: durable at each commit, for nobody else to read."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path


def open_database(path: Path, busy_s: float) -> sqlite3.Connection:
    """Open or make an SQLite file that is durable at each commit and readable by its owner only.

    The file is there with its mode before SQLite opens it, because what SQLite puts beside it (``-wal``, ``-shm``) gets the same mode.
    An existing file isn't opened here: closing it again would take the locks of another connection of this process.

    Raises
    ------
    OSError, sqlite3.Error
        Whatever the system or SQLite says; callers name the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if path.is_file():
        path.chmod(0o600)
    db = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    return db


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; after an error, also one of the commit itself, none is left open."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
