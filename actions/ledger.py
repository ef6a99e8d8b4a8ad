"""The ledger: every decision and every effect, written before it happens, in SQLite (WAL, synchronous=FULL).

Rows are only ever added (triggers refuse updates and deletes). A verb on a target begins once: its idempotency key is unique among
the rows that say ``started``. The lease row says who may act; taking it raises the fencing number in the same transaction, and
every write checks that number, so a leader that lost the lease while it was paused can write nothing. A standby takes over when the
holder is certainly gone, or when it has seen no renewal for the lease's length by its own monotonic clock: no two clocks are ever
compared. The file must lie on a local disk.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from actions.lease import Holder, is_gone
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.errors import TrainwardenError, UnavailableError
from trainwarden.private import open_database, transaction
from trainwarden.records import ActionStatus, Mode, Plan, PlanStep, Verb, decode_as, encode

LOG = logging.getLogger("trainwarden.actions.ledger")

BUSY_TIMEOUT_MS = 2000
LAYOUT = 1
TERMINAL = (
    ActionStatus.RECOMMENDED, ActionStatus.SKIPPED, ActionStatus.DENIED, ActionStatus.EXPIRED, ActionStatus.FAILED,
    ActionStatus.REVERTED, ActionStatus.VERIFIED,
)  # fmt: skip
"""A row without verb in one of these ends its plan."""

_TERMINAL_SQL = ",".join(f"'{status.value}'" for status in TERMINAL)

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS lease (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), holder TEXT NOT NULL, fence INTEGER NOT NULL,
  renewed INTEGER NOT NULL);
INSERT OR IGNORE INTO lease VALUES (1, '', 0, 0);
CREATE TABLE IF NOT EXISTS plans (plan_id TEXT PRIMARY KEY, incident_id TEXT NOT NULL, number INTEGER NOT NULL, job TEXT NOT NULL,
  signature TEXT NOT NULL, at_ns INTEGER NOT NULL, record BLOB NOT NULL, UNIQUE (incident_id, number));
CREATE TABLE IF NOT EXISTS rows (seq INTEGER PRIMARY KEY AUTOINCREMENT, at_ns INTEGER NOT NULL, plan_id TEXT NOT NULL,
  incident_id TEXT NOT NULL, job TEXT NOT NULL, key TEXT NOT NULL, verb TEXT NOT NULL, target TEXT NOT NULL, status TEXT NOT NULL,
  mode TEXT NOT NULL, rail TEXT NOT NULL, reason TEXT NOT NULL, fence INTEGER NOT NULL, started_at_ns INTEGER NOT NULL,
  detail TEXT NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS rows_begin_once ON rows (key) WHERE status = 'started' AND key <> '';
CREATE UNIQUE INDEX IF NOT EXISTS rows_end_once ON rows (plan_id) WHERE verb = '' AND status IN ({_TERMINAL_SQL});
CREATE INDEX IF NOT EXISTS rows_by_plan ON rows (plan_id);
CREATE INDEX IF NOT EXISTS rows_by_time ON rows (at_ns);
CREATE TABLE IF NOT EXISTS notes (seq INTEGER PRIMARY KEY AUTOINCREMENT, at_ns INTEGER NOT NULL, name TEXT NOT NULL,
  value TEXT NOT NULL, author TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS notes_by_name ON notes (name, seq);
CREATE TABLE IF NOT EXISTS marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
""" + "".join(
    f"CREATE TRIGGER IF NOT EXISTS {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
    f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;\n"
    for table in ("rows", "plans", "notes")
    for verb in ("UPDATE", "DELETE")
)

_COLUMNS = (
    "at_ns, plan_id, incident_id, job, key, verb, target, status, mode, rail, reason, fence, started_at_ns, detail"
)


class LedgerError(TrainwardenError):
    """The ledger cannot be read or written: nothing may be done until it can."""


class LeaseLost(LedgerError):
    """Another service has taken over: this one must stop at once and may write nothing."""


class AlreadyBegun(LedgerError):
    """The idempotency key has been used: the effect was begun before and must not begin again."""


@dataclass(frozen=True)
class Row:
    """One line of the ledger. `verb` is empty for lines about a whole plan."""

    plan_id: str
    incident_id: str
    job: str
    status: ActionStatus
    key: str = ""
    verb: str = ""
    target: str = ""
    mode: Mode = Mode.RECOMMEND
    rail: str = ""
    reason: str = ""
    started_at_ns: int = 0
    detail: Mapping[str, str] = field(default_factory=dict)
    at_ns: int = 0
    fence: int = 0
    seq: int = 0

    @classmethod
    def of(cls, plan: Plan, status: ActionStatus, reason: str = "", rail: str = "", /, **detail: str) -> Row:
        """A line about a whole plan."""
        return cls(
            plan.plan_id, plan.incident_id, plan.job, status, mode=plan.mode, rail=rail, reason=reason, detail=detail
        )


def step_row(plan: Plan, step: PlanStep, status: ActionStatus, reason: str = "", /, **detail: str) -> Row:
    """A line about one step of a plan."""
    row = Row.of(plan, status, reason, **detail)
    return replace(row, key=step.key, verb=step.verb.value, target=step.target)


@dataclass(frozen=True)
class Note:
    """An operator's word or a latch: the newest of a name counts."""

    value: str
    author: str
    at_ns: int


@dataclass(frozen=True)
class StoredPlan:
    """A plan with its signature (`planner.signature`) and, if it has ended, its last line."""

    plan: Plan
    signature: str
    ended: Row | None


class Ledger:
    """One connection, shared by the threads of one service.

    Parameters
    ----------
    path
        SQLite file, created when missing.

    Raises
    ------
    UnavailableError
        When the file cannot be opened, is no ledger, is damaged, or is of a newer layout.
    """

    def __init__(self, path: Path, clock: Clock, lease_s: float = 3.0) -> None:
        self.path = path
        self.fence = 0
        self._clock = clock
        self._lease_ns = int(lease_s * NS_PER_S)
        self._valid_until_ns = 0
        self._holder = ""
        self._observed: tuple[str, int, int] = ("", -1, 0)
        self._lock = threading.RLock()
        self._db = _open(path)

    # --- lease -------------------------------------------------------------------------------------------------------

    def take_lease(self, holder: Holder) -> str:
        """Become the leader: empty on success, else one sentence about who leads.

        The fencing number rises by one with every change of hands, and never falls.
        """
        now_ns = self._clock.monotonic_ns()
        with self._transaction() as db:
            text, fence, renewed = db.execute("SELECT holder, fence, renewed FROM lease").fetchone()
            present = Holder.parse(text)
            if present is not None and not is_gone(present, holder) and not self._is_silent(text, renewed, now_ns):
                return f"{present} leads with fence {fence}"
            db.execute("UPDATE lease SET holder = ?, fence = ?, renewed = renewed + 1", (holder.text, fence + 1))
        self.fence, self._holder, self._valid_until_ns = fence + 1, holder.text, now_ns + self._lease_ns
        return ""

    def _is_silent(self, text: str, renewed: int, now_ns: int) -> bool:
        """Whether the holder has not renewed for a whole lease since we first saw this renewal."""
        if self._observed[:2] != (text, renewed):
            self._observed = (text, renewed, now_ns)
        return now_ns - self._observed[2] >= self._lease_ns

    def renew_lease(self) -> None:
        """Keep leading; raises `LeaseLost` when somebody else has taken over."""
        now_ns = self._clock.monotonic_ns()
        with self._transaction() as db:
            self._check_fence(db)
            db.execute("UPDATE lease SET renewed = renewed + 1")
        self._valid_until_ns = now_ns + self._lease_ns

    def release_lease(self) -> None:
        """Let a standby take over at once; the fencing number stays."""
        with self._transaction() as db:
            db.execute("UPDATE lease SET holder = '' WHERE fence = ? AND holder = ?", (self.fence, self._holder))
        self._valid_until_ns = 0

    def check_lease(self) -> None:
        """Before an effect: raises `LeaseLost` when the lease has run out by our own clock, for instance after a pause."""
        if self._clock.monotonic_ns() >= self._valid_until_ns:
            raise LeaseLost(
                f"the lease of fence {self.fence} has run out: this service was paused too long, it does nothing more"
            )

    def raise_fence(self, at_least: int) -> None:
        """Continue above `at_least`: an operator's word that the wardens' fence is of a ledger that is gone."""
        with self._transaction() as db:
            self._check_fence(db)
            db.execute("UPDATE lease SET fence = ?", (max(self.fence, at_least) + 1,))
        self.fence = max(self.fence, at_least) + 1

    # --- writing -----------------------------------------------------------------------------------------------------

    def add_plan(self, plan: Plan, signature: str, rows: Sequence[Row]) -> list[Row]:
        """A plan and its first lines, together or not at all."""
        values = (plan.plan_id, plan.incident_id, plan.number, plan.job, signature, self._clock.now_ns(), encode(plan))
        with self._transaction() as db:
            self._check_fence(db)
            db.execute("INSERT INTO plans VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            return [self._insert(db, row) for row in rows]

    def add(self, row: Row) -> Row:
        """One line, durable when this returns.

        Raises
        ------
        AlreadyBegun
            A second ``started`` for the same key, or a second end of the same plan.
        """
        with self._transaction() as db:
            self._check_fence(db)
            return self._insert(db, row)

    def note(self, name: str, value: str, author: str) -> None:
        """Keep an operator's word or a latch."""
        with self._transaction() as db:
            self._check_fence(db)
            db.execute(
                "INSERT INTO notes (at_ns, name, value, author) VALUES (?, ?, ?, ?)",
                (self._clock.now_ns(), name, value, author),
            )

    def mark(self, name: str, value: int) -> None:
        """Remember a position (rows published so far)."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO marks VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", (name, value)
            )

    # --- reading -----------------------------------------------------------------------------------------------------

    def marked(self, name: str) -> int:
        """Position remembered under `name`, 0 at first."""
        found = self._select("SELECT value FROM marks WHERE name = ?", (name,))
        return int(found[0][0]) if found else 0

    def newest_note(self, name: str) -> Note | None:
        """What was said last under `name`."""
        found = self._select("SELECT value, author, at_ns FROM notes WHERE name = ? ORDER BY seq DESC LIMIT 1", (name,))
        return Note(*found[0]) if found else None

    def next_number(self, incident_id: str) -> int:
        """Number of the incident's next plan."""
        return int(
            self._select("SELECT coalesce(max(number), 0) + 1 FROM plans WHERE incident_id = ?", (incident_id,))[0][0]
        )

    def newest_plan(self, incident_id: str) -> StoredPlan | None:
        """The incident's last plan."""
        found = self._plans("WHERE incident_id = ? ORDER BY number DESC LIMIT 1", (incident_id,))
        return found[0] if found else None

    def plan(self, plan_id: str) -> StoredPlan | None:
        """One plan."""
        found = self._plans("WHERE plan_id = ?", (plan_id,))
        return found[0] if found else None

    def open_plans(self) -> list[StoredPlan]:
        """Plans without an end, oldest first."""
        return self._plans(
            "WHERE NOT EXISTS (SELECT 1 FROM rows WHERE rows.plan_id = plans.plan_id AND rows.verb = ''"
            f" AND rows.status IN ({_TERMINAL_SQL})) ORDER BY at_ns",
            (),
        )

    def recent_plans(self, limit: int) -> list[StoredPlan]:
        """The newest plans, newest first."""
        return self._plans("ORDER BY at_ns DESC LIMIT ?", (limit,))

    def rows_of(self, plan_id: str) -> list[Row]:
        """All lines of a plan, in order."""
        return self._rows("WHERE plan_id = ? ORDER BY seq", (plan_id,))

    def rows_after(self, seq: int, limit: int = 1000) -> list[Row]:
        """Lines after `seq`, in order."""
        return self._rows("WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit))

    def rows_since(
        self, at_ns: int, verb: Verb | None = None, status: ActionStatus | None = None, job: str = ""
    ) -> list[Row]:
        """Lines written from `at_ns` on, of a verb (None: any), a status and a job."""
        wanted = [
            ("at_ns >= ?", at_ns),
            ("verb = ?", verb and verb.value),
            ("status = ?", status and status.value),
            ("job = ?", job),
        ]
        chosen = [(condition, value) for condition, value in wanted if value not in (None, "")]
        where = " AND ".join(condition for condition, _ in chosen)
        return self._rows(f"WHERE {where} ORDER BY seq", tuple(value for _, value in chosen))

    def close(self) -> None:
        """Close the file; the lease is not given back."""
        with self._lock:
            self._db.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _insert(self, db: sqlite3.Connection, row: Row) -> Row:
        at_ns = self._clock.now_ns()
        values = (
            at_ns, row.plan_id, row.incident_id, row.job, row.key, row.verb, row.target, row.status.value, row.mode.value, row.rail,
            row.reason, self.fence, row.started_at_ns or at_ns, json.dumps(dict(row.detail), sort_keys=True),
        )  # fmt: skip
        cursor = db.execute(f"INSERT INTO rows ({_COLUMNS}) VALUES ({','.join('?' * len(values))})", values)
        return _row((cursor.lastrowid, *values))

    def _check_fence(self, db: sqlite3.Connection) -> None:
        holder, fence = db.execute("SELECT holder, fence FROM lease").fetchone()
        if not self.fence or (holder, fence) != (self._holder, self.fence):
            raise LeaseLost(
                f"fence {self.fence} is no longer the leader's: {holder or 'nobody'} holds the lease with fence {fence}"
            )

    def _rows(self, where: str, values: tuple[object, ...]) -> list[Row]:
        return [_row(found) for found in self._select(f"SELECT seq, {_COLUMNS} FROM rows {where}", values)]

    def _plans(self, where: str, values: tuple[object, ...]) -> list[StoredPlan]:
        found = self._select(f"SELECT plan_id, signature, record FROM plans {where}", values)
        return [
            StoredPlan(decode_as(Plan, record), signature, self._end_of(plan_id))
            for plan_id, signature, record in found
        ]

    def _end_of(self, plan_id: str) -> Row | None:
        found = self._rows(f"WHERE plan_id = ? AND verb = '' AND status IN ({_TERMINAL_SQL}) LIMIT 1", (plan_id,))
        return found[0] if found else None

    def _select(self, statement: str, values: Iterable[object]) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock, _sentences(self.path):
            return self._db.execute(statement, tuple(values)).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _sentences(self.path), transaction(self._db):
            yield self._db


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise AlreadyBegun(f"ledger {path}: refused a second entry ({error})") from None
    except sqlite3.Error as error:
        raise LedgerError(
            f"ledger {path}: {error}; nothing is done until it can be written: {_cure(str(error))}"
        ) from None


def _cure(message: str) -> str:
    if "full" in message:
        return "free space on its disk"
    if "locked" in message or "busy" in message:
        return "end the other program that holds it open"
    if "malformed" in message or "not a database" in message or "disk image" in message:
        return "restore it from a copy, or move it away and start with a new one after checking the nodes"
    return "check its disk and permissions"


def _open(path: Path) -> sqlite3.Connection:
    try:
        db = open_database(path, BUSY_TIMEOUT_MS / 1000)
        _prepare(db, path)
    except sqlite3.Error as error:
        raise UnavailableError(f"ledger {path}: {error}; {_cure(str(error))}") from None
    except OSError as error:
        raise UnavailableError(
            f"ledger {path}: {error.strerror}; the action service must be able to write there"
        ) from None
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    (damage,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if damage != "ok":
        raise sqlite3.DatabaseError(f"database disk image is malformed ({damage})")
    (layout,) = db.execute("PRAGMA user_version").fetchone()
    if layout > LAYOUT:
        raise UnavailableError(f"ledger {path} has layout {layout}, this build knows {LAYOUT}: use the newer build")
    if layout < LAYOUT:
        db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {LAYOUT}; COMMIT;")


def _row(found: tuple) -> Row:  # type: ignore[type-arg]
    (
        seq,
        at_ns,
        plan_id,
        incident_id,
        job,
        key,
        verb,
        target,
        status,
        mode,
        rail,
        reason,
        fence,
        started_at_ns,
        detail,
    ) = found
    return Row(
        plan_id, incident_id, job, ActionStatus(status), key, verb, target, Mode(mode), rail, reason, started_at_ns,
        json.loads(detail), at_ns, fence, seq,
    )  # fmt: skip
