"""Migrations: repeatable, additive, checked, safe when cut short."""

from __future__ import annotations

from typing import Any

import pytest

from streams.store.errors import StoreError
from streams.store.schema import bundled, check, migrate
from trainwarden.errors import UnavailableError, UsageError

ONE = ("0001_one.sql", "-- why\nCREATE TABLE IF NOT EXISTS a (x Int8) ENGINE = Memory;\n")
TWO = (
    "0002_two.sql",
    "CREATE TABLE IF NOT EXISTS b (x Int8) ENGINE = Memory;\nALTER TABLE a ADD COLUMN IF NOT EXISTS y Int8;\n",
)


def tables(client: Any) -> set[str]:
    return {str(row[0]) for row in client.query("SHOW TABLES").result_rows}


def test_applies_all_once(fresh_client: Any) -> None:
    numbers = tuple(range(1, len(bundled()) + 1))
    assert migrate(fresh_client) == numbers
    assert migrate(fresh_client) == ()
    expected = {"host_ticks", "process_ticks", "nic_ticks", "mesh_ticks", "other_ticks", "steps", "log_events", "verdicts", "incidents",
                "actions", "deliveries", "topology", "dead_letters", "host_1m", "process_1m", "nic_1m", "steps_1m"}  # fmt: skip
    assert expected <= tables(fresh_client)


def test_only_what_is_missing_is_applied(fresh_client: Any) -> None:
    assert migrate(fresh_client, check([ONE])) == (1,)
    assert migrate(fresh_client, check([ONE, TWO])) == (2,)
    assert [row[0] for row in fresh_client.query("DESCRIBE TABLE a").result_rows] == ["x", "y"]


def test_a_migration_cut_short_is_run_again(fresh_client: Any) -> None:
    broken = ("0002_two.sql", TWO[1].replace("y Int8", "y NoSuchType"))
    with pytest.raises(StoreError, match="NoSuchType"):
        migrate(fresh_client, check([ONE, broken]))
    assert "b" in tables(fresh_client)
    assert migrate(fresh_client, check([ONE, TWO])) == (2,)


def test_an_applied_migration_never_changes(fresh_client: Any) -> None:
    migrate(fresh_client, check([ONE]))
    with pytest.raises(UnavailableError, match=r"0001_one.*never changes"):
        migrate(fresh_client, check([(ONE[0], ONE[1].replace("Int8", "Int16"))]))


def test_a_better_comment_is_no_change(fresh_client: Any) -> None:
    migrate(fresh_client, check([ONE]))
    assert migrate(fresh_client, check([(ONE[0], ONE[1].replace("why", "a better reason"))])) == ()


def test_a_newer_store_is_fine(fresh_client: Any) -> None:
    migrate(fresh_client, check([ONE, TWO]))
    assert migrate(fresh_client, check([ONE])) == ()


@pytest.mark.parametrize(
    ("named_texts", "message"),
    [
        ([("0002_two.sql", TWO[1])], "expected 0001"),
        ([ONE, ("two.sql", TWO[1])], "expected 0002"),
        ([("0001_one.sql", "CREATE TABLE a (x Int8) ENGINE = Memory")], "cannot be run twice"),
        ([("0001_one.sql", "DROP TABLE IF EXISTS a")], "cannot be run twice"),
    ],
)
def test_what_could_not_be_repeated_is_refused(named_texts: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(named_texts)
