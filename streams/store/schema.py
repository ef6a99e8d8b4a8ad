"""Numbered, additive migrations.

A migration is a file ``NNNN_name.sql`` of idempotent statements (``CREATE ... IF NOT EXISTS``, ``ALTER ... ADD COLUMN IF NOT EXISTS``): one
that was cut short is simply run again, and two processes that migrate at once do no harm. It is noted as applied after its last statement.
An applied file never changes: its checksum is compared at every start. A store that is newer than this build is fine, because every
migration only adds.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from streams.store.errors import store_errors
from trainwarden.errors import UnavailableError, UsageError

LOG = logging.getLogger("trainwarden.store.schema")

APPLIED_TABLE = """CREATE TABLE IF NOT EXISTS schema_migrations
(number UInt32, name String, checksum String, applied_at DateTime64(3, 'UTC') DEFAULT now64(3))
ENGINE = ReplacingMergeTree(applied_at) ORDER BY number"""

_FILE_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_REPEATABLE = re.compile(
    r"(CREATE (TABLE|VIEW|MATERIALIZED VIEW|DICTIONARY) IF NOT EXISTS"
    r"|CREATE OR REPLACE VIEW"
    r"|ALTER TABLE \w+ (ADD (COLUMN|INDEX|PROJECTION) IF NOT EXISTS|MODIFY (COLUMN|TTL|COMMENT|SETTING|QUERY)))"
)


@dataclass(frozen=True)
class Migration:
    """One numbered file."""

    number: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        """Of the statements only, so that a better comment is no change."""
        return hashlib.sha256("\n".join(self.statements).encode()).hexdigest()[:16]

    @property
    def statements(self) -> tuple[str, ...]:
        """Statements in order, without comments; spaces do not count."""
        bare = "\n".join(line for line in self.text.splitlines() if not line.lstrip().startswith("--"))
        parts = (" ".join(part.split()) for part in bare.split(";"))
        return tuple(part for part in parts if part)


def bundled() -> tuple[Migration, ...]:
    """The migrations of this build, in order.

    Raises
    ------
    UsageError
        When a file is misnamed, a number is missing or doubled, or a statement could not be run twice.
    """
    return check(
        (entry.name, entry.read_text(encoding="utf-8"))
        for entry in sorted(files("streams.store").joinpath("migrations").iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".sql")
    )


def check(named_texts: Any) -> tuple[Migration, ...]:
    """Migrations from (file name, text) pairs; see `bundled` for what is refused."""
    found: list[Migration] = []
    for file_name, text in named_texts:
        match = _FILE_NAME.fullmatch(file_name)
        if match is None or int(match.group(1)) != len(found) + 1:
            raise UsageError(f"migration {file_name}: expected {len(found) + 1:04d}_<name>.sql")
        migration = Migration(int(match.group(1)), match.group(2), text)
        for statement in migration.statements:
            if not _REPEATABLE.match(statement):
                raise UsageError(f"migration {file_name}: {statement[:60]!r} cannot be run twice, use IF NOT EXISTS")
        found.append(migration)
    return tuple(found)


def migrate(client: Any, migrations: Sequence[Migration] | None = None) -> tuple[int, ...]:
    """Bring the database of `client` up to this build; returns the numbers applied now.

    Raises
    ------
    UnavailableError
        When an applied migration is not the one of this build.
    StoreError
        When the store refuses a statement; what was done stays, the next run goes on.
    """
    wanted = bundled() if migrations is None else migrations
    with store_errors("migrating the store"):
        client.command(APPLIED_TABLE)
        rows = client.query("SELECT number, checksum, name FROM schema_migrations FINAL").result_rows
        applied = {int(number): (str(checksum), str(name)) for number, checksum, name in rows}
        _refuse_changed(applied, wanted)
        return tuple(_apply(client, migration) for migration in wanted if migration.number not in applied)


def _refuse_changed(applied: dict[int, tuple[str, str]], wanted: Sequence[Migration]) -> None:
    for migration in wanted:
        checksum, name = applied.get(migration.number, (migration.checksum, migration.name))
        if checksum != migration.checksum:
            raise UnavailableError(
                f"the store holds migration {migration.number:04d}_{name} with checksum {checksum}, this build has "
                f"{migration.checksum}: an applied migration never changes; use the build that made this store, or a new one"
            )
    newer = sorted(set(applied) - {migration.number for migration in wanted})
    if newer:
        LOG.info("the store is newer than this build (migration %d): that is fine, migrations only add", newer[-1])


def _apply(client: Any, migration: Migration) -> int:
    for statement in migration.statements:
        client.command(statement)
    client.command(
        "INSERT INTO schema_migrations (number, name, checksum) VALUES "
        f"({migration.number}, '{migration.name}', '{migration.checksum}')"
    )
    LOG.info("applied migration %04d_%s", migration.number, migration.name)
    return migration.number
