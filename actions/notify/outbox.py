"""The outbox: what is to be told, what was told, in one SQLite file, so that a restart neither forgets nor repeats.

A notice and the memory that it was decided are one transaction; the bus position is committed after it. Delivery is at least once, in order
of revision per receiver and incident.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actions.notify.base import Cause
from trainwarden.clock import NS_PER_S
from trainwarden.errors import UnavailableError
from trainwarden.private import open_database, transaction
from trainwarden.records import ActionResult, Incident, Plan, Record, decode, decode_as, encode, stable_id

BUSY_S = 5.0
KEPT_ACTIONS = 50
KEPT_DAYS = 30
LAYOUT = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS incidents (incident_id TEXT PRIMARY KEY, revision INTEGER NOT NULL, touched_ns INTEGER NOT NULL,
  record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS history (n INTEGER PRIMARY KEY, incident_id TEXT NOT NULL, digest TEXT NOT NULL, record BLOB NOT NULL,
  UNIQUE (incident_id, digest));
CREATE TABLE IF NOT EXISTS told (receiver TEXT NOT NULL, incident_id TEXT NOT NULL, firing INTEGER NOT NULL, culprits TEXT NOT NULL,
  severity TEXT NOT NULL, labels TEXT NOT NULL, started_ns INTEGER NOT NULL, last_ns INTEGER NOT NULL, history_n INTEGER NOT NULL,
  rounds INTEGER NOT NULL, PRIMARY KEY (receiver, incident_id));
CREATE TABLE IF NOT EXISTS outbox (n INTEGER PRIMARY KEY, notice_id TEXT NOT NULL UNIQUE, receiver TEXT NOT NULL, incident_id TEXT NOT NULL,
  revision INTEGER NOT NULL, cause TEXT NOT NULL, firing INTEGER NOT NULL, round INTEGER NOT NULL, body BLOB NOT NULL,
  created_ns INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, next_ns INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'waiting',
  error TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS outbox_waiting ON outbox (receiver, n) WHERE state = 'waiting';
"""


@dataclass(frozen=True)
class Told:
    """What a receiver knows about an incident. `rounds` counts how often it began to fire for this receiver."""

    firing: bool
    culprits: str
    severity: str
    labels: Mapping[str, str]
    started_ns: int
    last_ns: int
    history_n: int
    rounds: int


@dataclass(frozen=True)
class Waiting:
    """A notice that is to be sent."""

    n: int
    notice_id: str
    receiver: str
    incident_id: str
    revision: int
    cause: Cause
    firing: bool
    round: int
    body: bytes
    created_ns: int
    attempts: int
    next_ns: int


class Outbox:
    """One file, one owner at a time (a lock beside it says which process), usable from several threads.

    Raises
    ------
    UnavailableError
        When the file cannot be opened, is none of ours, or is of a newer layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._guard = threading.RLock()
        self._lock_file = -1
        try:
            self._db = open_database(path, BUSY_S)
            layout = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if layout < LAYOUT:
                self._db.executescript(f"{_SCHEMA} PRAGMA user_version = {LAYOUT};")
        except (sqlite3.Error, OSError) as error:
            raise UnavailableError(
                f"outbox {path}: {error}; it must be a writable file of ours on a local disk"
            ) from None
        if layout > LAYOUT:
            self._db.close()
            raise UnavailableError(
                f"outbox {path} has layout {layout}, this build reads {LAYOUT}: upgrade, or move the file away"
            )

    def take(self) -> bool:
        """Become the owner; False while another process is."""
        if self._lock_file < 0:
            descriptor = os.open(f"{self.path}.owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            self._lock_file = descriptor
        return True

    def close(self) -> None:
        """Close the file and let others own it."""
        with self._guard:
            self._db.close()
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing."""
        with self._guard, transaction(self._db):
            yield

    # --- what is known ---------------------------------------------------------------------------------------------------

    def learn_incident(self, incident: Incident, now_ns: int) -> bool:
        """Keep the newest revision; False for one that is not newer."""
        known = self.incident(incident.incident_id)
        if known is not None and known.revision >= incident.revision:
            return False
        self._run(
            "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?)",
            incident.incident_id,
            incident.revision,
            now_ns,
            encode(incident),
        )
        return True

    def learn_history(self, record: Plan | ActionResult) -> int:
        """Keep a plan or an action once; its number, or 0 when it was known."""
        digest = stable_id("history", encode(record).hex())
        with self._guard:
            cursor = self._db.execute(
                "INSERT OR IGNORE INTO history (incident_id, digest, record) VALUES (?, ?, ?)",
                (record.incident_id, digest, encode(record)),
            )
            return int(cursor.lastrowid or 0) if cursor.rowcount else 0

    def incident(self, incident_id: str) -> Incident | None:
        """Newest revision known."""
        rows = self._run("SELECT record FROM incidents WHERE incident_id = ?", incident_id)
        return decode_as(Incident, rows[0][0]) if rows else None

    def history(self, incident_id: str) -> list[tuple[int, Record]]:
        """(number, plan or action) of an incident, oldest first; the newest `KEPT_ACTIONS` only."""
        rows = self._run(
            "SELECT n, record FROM history WHERE incident_id = ? ORDER BY n DESC LIMIT ?", incident_id, KEPT_ACTIONS
        )
        return [(int(n), decode(record)) for n, record in reversed(rows)]

    def told(self, receiver: str, incident_id: str) -> Told | None:
        """What `receiver` was told, None when nothing."""
        rows = self._run(
            "SELECT firing, culprits, severity, labels, started_ns, last_ns, history_n, rounds FROM told "
            "WHERE receiver = ? AND incident_id = ?",
            receiver, incident_id,
        )  # fmt: skip
        if not rows:
            return None
        firing, culprits, severity, labels, *numbers = rows[0]
        return Told(bool(firing), culprits, severity, json.loads(labels), *numbers)

    def firing(self, receiver: str, told_before_ns: int) -> list[str]:
        """Incidents that fire for `receiver` and were last told before that time."""
        rows = self._run(
            "SELECT incident_id FROM told WHERE receiver = ? AND firing = 1 AND last_ns <= ? ORDER BY last_ns",
            receiver,
            told_before_ns,
        )
        return [str(row[0]) for row in rows]

    # --- what is to be told ----------------------------------------------------------------------------------------------

    def put(self, notice: Waiting, told: Told) -> None:
        """Queue a notice and remember that it was decided; call it inside a `transaction`."""
        self._run(
            "INSERT OR IGNORE INTO outbox (notice_id, receiver, incident_id, revision, cause, firing, round, body, created_ns, next_ns) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            notice.notice_id, notice.receiver, notice.incident_id, notice.revision, notice.cause.value, notice.firing, notice.round,
            notice.body, notice.created_ns, notice.next_ns,
        )  # fmt: skip
        self._run(
            "INSERT OR REPLACE INTO told VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", notice.receiver, notice.incident_id, told.firing,
            told.culprits, told.severity, json.dumps(dict(told.labels)), told.started_ns, told.last_ns, told.history_n, told.rounds,
        )  # fmt: skip

    def next_due(self, receiver: str, now_ns: int) -> Waiting | None:
        """The notice to send now: per incident only its oldest one, so that a receiver hears of revisions in order."""
        rows = self._run(
            "SELECT n, notice_id, receiver, incident_id, revision, cause, firing, round, body, created_ns, attempts, next_ns "
            "FROM outbox AS o WHERE receiver = ? AND state = 'waiting' AND next_ns <= ? AND NOT EXISTS (SELECT 1 FROM outbox AS before "
            "WHERE before.receiver = o.receiver AND before.incident_id = o.incident_id AND before.state = 'waiting' AND before.n < o.n) "
            "ORDER BY n LIMIT 1",
            receiver, now_ns,
        )  # fmt: skip
        if not rows:
            return None
        n, notice_id, who, incident_id, revision, cause, firing, round_, *rest = rows[0]
        return Waiting(n, notice_id, who, incident_id, revision, Cause(cause), bool(firing), round_, *rest)

    def delivered_firing(self, notice: Waiting) -> bool:
        """Whether any firing notice of the same round reached the receiver."""
        return bool(self._run(
            "SELECT 1 FROM outbox WHERE receiver = ? AND incident_id = ? AND round = ? AND firing = 1 AND state = 'sent' LIMIT 1",
            notice.receiver, notice.incident_id, notice.round,
        ))  # fmt: skip

    def settle(self, notice: Waiting, state: str, error: str = "") -> None:
        """A notice is `sent`, `failed` or `dropped` for good."""
        self._run(
            "UPDATE outbox SET state = ?, error = ?, attempts = ? WHERE n = ?",
            state,
            error,
            notice.attempts + 1,
            notice.n,
        )

    def postpone(self, notice: Waiting, next_ns: int, error: str) -> None:
        """Try again later."""
        self._run(
            "UPDATE outbox SET attempts = ?, next_ns = ?, error = ? WHERE n = ?",
            notice.attempts + 1,
            next_ns,
            error,
            notice.n,
        )

    def waiting(self) -> tuple[int, int]:
        """(how many notices wait, when the oldest was queued; 0 for none)."""
        count, oldest = self._run("SELECT count(*), coalesce(min(created_ns), 0) FROM outbox WHERE state = 'waiting'")[
            0
        ]
        return int(count), int(oldest)

    def prune(self, now_ns: int) -> None:
        """Forget what ended long ago."""
        before_ns = now_ns - KEPT_DAYS * 24 * 3600 * NS_PER_S
        with self.transaction():
            self._run("DELETE FROM outbox WHERE state != 'waiting' AND created_ns < ?", before_ns)
            self._run("DELETE FROM told WHERE firing = 0 AND last_ns < ?", before_ns)
            self._run(
                "DELETE FROM incidents WHERE touched_ns < ? AND incident_id NOT IN (SELECT incident_id FROM told WHERE firing = 1)",
                before_ns,
            )
            self._run("DELETE FROM history WHERE incident_id NOT IN (SELECT incident_id FROM incidents)")

    def _run(self, statement: str, *values: object) -> list[Any]:
        with self._guard:
            return self._db.execute(statement, values).fetchall()
