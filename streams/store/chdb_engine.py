"""The one owner of a chDB directory: the lock, the engine, and one short-lived connection per statement.

chDB opens a directory for one process only, and a second one gets a riddle (`Code: 36 ... EmbeddedServer`). The lock file says who
owns it instead. Within the process a connection costs 0.1 ms, so each statement gets a fresh one: settings, `USE` and `SET` of one
request can never leak into the next.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streams.store.chdb_insert import NoRoomError, from_file, held
from streams.store.chdb_sql import reaches_outside, without_format, writes_a_file
from streams.store.errors import StoreError
from trainwarden.clock import Clock, SystemClock
from trainwarden.errors import UnavailableError

log = logging.getLogger("trainwarden.store.chdb")

LOCK_NAME = "owner.lock"
_CODE = re.compile(r"Code: (\d+)\. ")
_SETTING_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SYNTAX_ERROR, _NOT_IMPLEMENTED, _READONLY, _TOO_MANY, _UNKNOWN_SETTING = 62, 48, 164, 202, 115
_NOT_ENOUGH_SPACE = 243


class QueryError(StoreError):
    """The engine refused a statement.

    Parameters
    ----------
    code
        ClickHouse's exception code.
    text
        Its message, starting with "Code: N. DB::Exception: ".
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    @classmethod
    def make(cls, code: int, name: str, sentence: str) -> QueryError:
        """An error of ours in ClickHouse's own form."""
        return cls(code, f"Code: {code}. DB::Exception: {sentence}. ({name})")

    @classmethod
    def of(cls, error: Exception) -> QueryError:
        """The same error with its code."""
        text = str(error)
        match = _CODE.search(text)
        return (
            cls(int(match.group(1)), text[match.start() :])
            if match
            else cls(1001, f"Code: 1001. DB::Exception: {text}")
        )


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL text and what belongs to it for this one execution."""

    sql: str | bytes
    database: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    readonly: bool = False

    @property
    def text(self) -> str:
        """The SQL as text, for looking at; the engine gets the bytes."""
        return self.sql if isinstance(self.sql, str) else self.sql.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished statement: output bytes in the asked format and the engine's counts."""

    body: bytes = b""
    read_rows: int = 0
    read_bytes: int = 0
    written_rows: int = 0
    written_bytes: int = 0
    elapsed_ns: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What statements may use.

    Parameters
    ----------
    readers, writers
        Statements at once; writers have slots of their own, so that analysts cannot hold up the store's inserts.
    query_memory_bytes
        Memory of one statement, where the caller sets no limit of its own.
    wait_s
        How long a statement waits for a slot before it is refused.
    """

    readers: int = 6
    writers: int = 2
    query_memory_bytes: int = 2 << 30
    wait_s: float = 30.0


class DirectoryLock:
    """Exclusive ownership of a directory, held by an open file; the kernel lets go when the process dies."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._fd = -1

    def acquire(self, address: str) -> None:
        """Take it and leave word who owns it and where it answers.

        Raises
        ------
        UnavailableError
            Somebody else owns it, or the directory cannot be made or written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UnavailableError(
                f"store directory {self._path.parent} cannot be used ({error.strerror}): "
                "it must be a directory that this user may write, or choose another"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise UnavailableError(owned_by(self._path.parent)) from None
        self._fd = fd
        self.note(address)

    def note(self, address: str) -> None:
        """Write down where the owner answers."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "address": address}).encode(), 0)

    def release(self) -> None:
        """Let go; doing it twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def cannot_open(directory: Path, error: Exception) -> str:
    """One sentence for a directory that the engine refuses."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    match = re.search(r"already initialized with path '([^']*)'", text)
    if match:
        return (
            f"store directory {directory} cannot be opened: this process has {match.group(1)} open and chDB opens one "
            "directory a process; close that first"
        )
    return f"store directory {directory} cannot be opened by chDB: {text[:300]}"


def owned_by(directory: Path) -> str:
    """One sentence that names a directory's owner, for whoever comes second."""
    pid, address = "?", ""
    try:
        note = json.loads((directory / LOCK_NAME).read_bytes())
        pid, address = str(note["pid"]), str(note["address"])
    except (OSError, ValueError, KeyError):
        log.debug("no readable owner's note in %s", directory)
    use = f"use {address} instead" if address else "close it there"
    return f"store directory {directory} is owned by process {pid} and chDB has one owner at a time: {use}, or stop that process"


class ChdbEngine:
    """The chDB engine over one directory, opened once per process.

    Parameters
    ----------
    directory
        Data directory; made when missing.
    limits
        Slots and memory of statements.
    address
        Where the owner answers, told to a second one.
    """

    def __init__(
        self, directory: Path, limits: Limits | None = None, address: str = "", clock: Clock | None = None
    ) -> None:
        self.directory = directory
        self._limits = limits or Limits()
        self._address = address
        self._clock = clock or SystemClock()
        self._lock = DirectoryLock(directory)
        self._read_slots = threading.BoundedSemaphore(self._limits.readers)
        self._write_slots = threading.BoundedSemaphore(self._limits.writers)
        self._anchor: Any = None
        self._native: Any = None
        self.version = ""
        self.timezone = ""

    def open(self) -> None:
        """Take the directory and start the engine.

        Raises
        ------
        UnavailableError
            Another owner, no permission, chDB not installed, or this process has another directory open already.
        """
        self._native = _import_chdb()
        self._lock.acquire(self._address)
        try:
            self._anchor = self._native.connect(str(self.directory))
            self.version = self._ask("SELECT version()")
            self.timezone = self._ask("SELECT timezone()")
        except RuntimeError as error:
            self._lock.release()
            raise UnavailableError(cannot_open(self.directory, error)) from error

    def announce(self, address: str) -> None:
        """Tell second owners where this one answers."""
        self._lock.note(address)

    def _ask(self, sql: str) -> str:
        return str(self._anchor.query(sql, "TabSeparated", params={}).bytes().decode().strip())

    def close(self) -> None:
        """Close the engine and let go of the directory; statements must be over."""
        if self._anchor is not None:
            self._anchor.close()
            self._anchor = None
        self._lock.release()

    def kill_statements(self) -> None:
        """Cancel all that runs; each ends with an error (QUERY_WAS_CANCELLED)."""
        self._ask("KILL QUERY WHERE query NOT LIKE 'KILL QUERY%' ASYNC")

    @contextmanager
    def read_or_command(self, statement: Statement) -> Iterator[Session]:
        """A session for anything but an INSERT with data behind it.

        Raises
        ------
        QueryError
            More than one statement, forbidden on a read-only port, unknown setting or database, no free slot in time.
        """
        with self._connection() as connection:
            kind = _classify(connection, statement)
            reads = kind == "READ_ONLY"
            if statement.readonly:
                _refuse_on_readonly(statement, kind)
            with self._slot(self._read_slots if reads else self._write_slots):
                yield self._session(connection, statement, reads)

    @contextmanager
    def insert(self, statement: Statement) -> Iterator[Session]:
        """A session for `Session.insert`.

        Raises
        ------
        QueryError
            Read-only, unknown setting or database, no free slot in time.
        """
        if statement.readonly:
            raise QueryError.make(_READONLY, "READONLY", "Cannot insert through a read-only port or request")
        with self._connection() as connection, self._slot(self._write_slots):
            yield self._session(connection, statement, reads=False)

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        connection = self._native.connect(str(self.directory))
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def _slot(self, slots: threading.BoundedSemaphore) -> Iterator[None]:
        if not slots.acquire(timeout=self._limits.wait_s):
            sentence = f"Too many simultaneous queries: no slot became free within {self._limits.wait_s:g} s"
            raise QueryError.make(_TOO_MANY, "TOO_MANY_SIMULTANEOUS_QUERIES", sentence)
        try:
            yield
        finally:
            slots.release()

    def _session(self, connection: Any, statement: Statement, reads: bool) -> Session:
        settings = {"max_memory_usage": str(self._limits.query_memory_bytes), **statement.settings}
        if not reads:  # an INSERT's data path takes no parameters beside the statement
            settings |= {f"param_{name}": value for name, value in statement.parameters.items()}
        if statement.readonly:
            settings["readonly"] = "2"  # last: it forbids nothing but writing and being taken back
        session = Session(connection, statement, reads, self._clock, self.directory)
        session.prepare(settings)
        return session


class Session:
    """One statement on its own connection."""

    def __init__(self, connection: Any, statement: Statement, reads: bool, clock: Clock, directory: Path) -> None:
        self._connection = connection
        self._directory = directory
        self._statement = statement
        self._clock = clock
        self.reads = reads

    def prepare(self, settings: Mapping[str, str]) -> None:
        """Apply database, settings and parameters to the connection."""
        if self._statement.database:
            self._run(f"USE {quote_name(self._statement.database)}", "Null")
        if settings:
            self._run(
                "SET " + ", ".join(f"{_setting(name)} = {quote(value)}" for name, value in settings.items()), "Null"
            )

    def run(self, data_format: str) -> Answer:
        """Execute the statement and return its whole output in `data_format` (a FORMAT clause in it wins)."""
        started_ns = self._clock.monotonic_ns()
        result = self._run(self._statement.sql, data_format, dict(self._statement.parameters))
        return Answer(
            bytes(result.bytes()),
            result.storage_rows_read(),
            result.storage_bytes_read(),
            result.rows_written(),
            result.bytes_written(),
            self._clock.monotonic_ns() - started_ns,
        )

    def stream(self, data_format: str) -> Generator[bytes, None, None]:
        """Execute a reading statement and yield its output block by block; closing the iterator cancels it."""
        result = self._call(
            self._connection.send_query, self._statement.sql, data_format, params=dict(self._statement.parameters)
        )
        finished = False
        try:
            while True:
                block = self._call(self._connection.streaming_fetch_result, result)
                data = bytes(block.bytes()) if block is not None and block.size() else b""
                if not data:
                    finished = True
                    return
                yield data
        finally:
            if not finished:
                self._cancel(result)

    def _cancel(self, result: Any) -> None:
        try:
            self._connection.streaming_cancel_query(result)
        except RuntimeError as error:  # the statement failed by itself: nothing is left to cancel
            log.debug("cancel: %s", error)

    def native_header(self) -> bytes:
        """A Native block of no rows, with the names and types that the statement would give; b"" where it has none.

        chDB writes nothing at all for an empty result, from which a client cannot even learn the columns.
        """
        described = f"DESCRIBE TABLE ({without_format(self._statement.text)})"
        try:
            result = self._run(described, "TabSeparatedRaw", dict(self._statement.parameters))
        except QueryError as error:  # SHOW, EXPLAIN and the like cannot be described
            log.debug("an empty result stays without columns: %s", error)
            return b""
        columns = [line.split("\t")[:2] for line in result.bytes().decode().splitlines()]
        return _varint(len(columns)) + _varint(0) + b"".join(_text(name) + _text(kind) for name, kind in columns)

    def insert(self, data_format: str, chunks: Iterable[bytes]) -> Answer:
        """Push data behind the INSERT statement; it is written when this returns.

        Raises
        ------
        QueryError
            The engine refused the statement or the data.
        """
        started_ns = self._clock.monotonic_ns()
        try:
            with held(chunks, self._directory) as path:
                done = self._run(from_file(self._statement.text, path, data_format), "Null")
        except ValueError as error:
            raise QueryError.make(_NOT_IMPLEMENTED, "NOT_IMPLEMENTED", str(error)) from error
        except NoRoomError as error:
            sentence = f"The data of the INSERT found no room ({error})"
            raise QueryError.make(_NOT_ENOUGH_SPACE, "NOT_ENOUGH_SPACE", sentence) from error
        elapsed_ns = self._clock.monotonic_ns() - started_ns
        return Answer(written_rows=done.rows_written(), written_bytes=done.bytes_written(), elapsed_ns=elapsed_ns)

    def _run(self, sql: str | bytes, data_format: str, parameters: dict[str, str] | None = None) -> Any:
        return self._call(self._connection.query, sql, data_format, params=parameters or {})

    def _call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except RuntimeError as error:
            raise QueryError.of(error) from error


def _classify(connection: Any, statement: Statement) -> str:
    text = statement.text
    facts = connection.classify_query(text)
    if facts["statement_count"] > 1:
        raise QueryError.make(
            _SYNTAX_ERROR, "SYNTAX_ERROR", "Multi-statements are not allowed: send one statement a request"
        )
    kind = str(facts["query_class"].name)
    if kind != "READ_ONLY" and writes_a_file(text):
        raise QueryError.make(
            _NOT_IMPLEMENTED, "NOT_IMPLEMENTED", "INTO OUTFILE is the client's business: take the response"
        )
    return kind


def _refuse_on_readonly(statement: Statement, kind: str) -> None:
    if kind not in ("READ_ONLY", "UNKNOWN"):
        raise QueryError.make(
            _READONLY, "READONLY", "Cannot execute query in readonly mode: this port or request only reads"
        )
    outside = reaches_outside(statement.text, statement.parameters)
    if outside is not None:
        raise QueryError.make(_READONLY, "READONLY", f"Cannot read {outside} in readonly mode: only the store's tables")


def _import_chdb() -> Any:
    try:
        from chdb import _chdb
    except ImportError as error:
        raise UnavailableError(
            f"chDB is not installed ({error}): pip install 'trainwarden[embedded]', or use a ClickHouse server"
        ) from error
    return _chdb


def _setting(name: str) -> str:
    if not _SETTING_NAME.fullmatch(name):
        raise QueryError.make(_UNKNOWN_SETTING, "UNKNOWN_SETTING", f"Unknown setting {quote(name)}")
    return name


def quote(value: str) -> str:
    """`value` as an SQL string literal."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def quote_name(name: str) -> str:
    """`name` as a quoted SQL identifier."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _text(value: str) -> bytes:
    raw = value.encode()
    return _varint(len(raw)) + raw
