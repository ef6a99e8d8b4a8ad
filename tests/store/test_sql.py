"""`trainwarden sql`: saved queries all run, nothing can be changed, mistakes are one sentence."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import NoReturn

import pytest

from streams.store import query as store_query
from streams.store import service as store_service
from streams.store.errors import StoreError
from streams.store.query import saved_queries, sql
from streams.store.service import prepare
from tests.store.server import StoreProcess
from tests.store.story import FAULT_S, SAVED_EVERY, STEP_MS, fill, story
from trainwarden.config import Config, from_table
from trainwarden.embedded.ports import free_port
from trainwarden.errors import UnavailableError, UsageError


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """Configuration of a store that holds the story."""
    with StoreProcess(tmp_path_factory.mktemp("sql-store")) as process:
        url = process.url("trainwarden")
        client = prepare(url)
        fill(client, story(time.time_ns()))
        client.close()
        yield from_table({"store": {"url": url}})


def rows(config: Config, query: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(sql(config, query, "csv"))))


def test_the_question_of_the_readme(told: Config) -> None:
    text = sql(told, "select kind, culprit, status from incidents")
    assert [cell.strip() for cell in text.splitlines()[1].strip("│").split("│")] == ["rank_frozen", "node:n2", "closed"]


@pytest.mark.parametrize("name", sorted(saved_queries()))
def test_every_saved_query_runs(told: Config, name: str) -> None:
    found = sql(told, f"@{name}", "json")
    assert all(json.loads(line) for line in found.splitlines())
    assert found or name == "unacted_verdicts", "the story gives an answer to every question but one"
    assert len(saved_queries()[name].about) > 20


def test_goodput_counts_steps_that_were_done_again(told: Config) -> None:
    first, second = rows(told, "@goodput")
    assert int(first["steps_done_again"]) == (int(FAULT_S * 1000 / STEP_MS) - 1) % SAVED_EVERY
    assert int(second["steps_done_again"]) == 0
    assert float(second["since_last_attempt_s"]) == pytest.approx(12.2, abs=0.2)
    assert 90 < float(first["goodput_percent"]) <= 100


def test_time_to_heal(told: Config) -> None:
    (row,) = rows(told, "@time_to_heal")
    assert (row["kind"], row["healed"], row["detect_s_median"], row["act_s_median"], row["recover_s_median"]) == (
        "rank_frozen", "1", "3.2", "0.4", "15")  # fmt: skip


def test_telemetry_gaps(told: Config) -> None:
    found = {(row["node"], row["ticks"], row["missing"]) for row in rows(told, "@telemetry_gaps")}
    assert found == {(f"n{i}", "120", "0") for i in range(4)}


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE steps",
        "INSERT INTO steps SELECT * FROM steps",
        "ALTER TABLE steps DELETE WHERE 1",
        "CREATE TABLE x (a Int8) ENGINE = Memory",
        "SET readonly = 0",
        "SELECT 1 INTO OUTFILE '/tmp/x'",
        "SELECT 1; DROP TABLE steps",
        "SELECT * FROM file('/etc/passwd', 'LineAsString')",
    ],
)
def test_nothing_can_be_changed_or_read_from_elsewhere(told: Config, statement: str) -> None:
    before = sql(told, "SELECT count() FROM steps", "csv")
    try:
        sql(told, statement)
    except UsageError:
        pass
    else:
        assert statement.startswith("SET"), "a SET ends with its request"
    assert sql(told, "SELECT count() FROM steps", "csv") == before


@pytest.mark.parametrize(
    ("query", "format", "message"),
    [
        ("selec 1", "table", "Syntax error"),
        ("select nope from steps", "table", "nope"),
        ("@slowest_rank", "table", "did you mean @slowest_ranks"),
        ("@zzz", "table", "known: @"),
        ("select 1", "xml", "expected one of table, csv, json, markdown"),
    ],
)
def test_mistakes_are_one_sentence(told: Config, query: str, format: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        sql(told, query, format)
    assert "\n" not in str(caught.value)


def test_saved_queries_are_listed(told: Config) -> None:
    assert sql(told, "@").count("\n") == len(saved_queries())


def test_nobody_answers() -> None:
    with pytest.raises(UnavailableError, match="no ClickHouse store answers"):
        sql(from_table({"store": {"url": f"clickhouse://127.0.0.1:{free_port()}/trainwarden"}}), "select 1")


@pytest.mark.slow
def test_the_directory_answers_after_the_store_has_stopped(tmp_path: Path) -> None:
    process = StoreProcess(tmp_path / "chdb")
    process.start()
    client = prepare(process.url("trainwarden"))
    fill(client, story(time.time_ns()))
    client.close()
    process.stop()
    config = tmp_path / "tw.toml"
    config.write_text(f'run_dir = "{tmp_path}"\n[store]\nurl = "{process.url("trainwarden")}"\ndirectory = "chdb"\n')
    # in a process of its own: chDB opens one directory in a process's life
    query = "select kind, culprit, status from incidents"
    command = [sys.executable, "-m", "trainwarden.cli", "sql", query, "--format", "csv", "-c", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, '"kind","culprit","status"\n"rank_frozen","node:n2","closed"\n'), (
        done.stderr
    )


def test_the_store_s_password_is_in_no_message(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"clickhouse://analyst:hunter2@127.0.0.1:{free_port()}/x"
    settings = from_table({"store": {"url": url}, "kafka": {"url": "memory://hidden"}})

    def gone_meanwhile(_: Config) -> NoReturn:
        raise StoreError("connection reset")

    monkeypatch.setattr(store_query, "opened", gone_meanwhile)
    with pytest.raises(UnavailableError) as failure:
        sql(settings, "select 1")
    assert "no store answers at clickhouse://analyst:***@127.0.0.1" in str(failure.value)
    monkeypatch.setattr(store_service, "open_store", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(store_service, "StoreWriter", lambda *_: None)
    monkeypatch.setattr(store_service, "run_until", lambda *_: None)
    with caplog.at_level(logging.INFO):
        store_service.run(settings, threading.Event())
    assert "writing to clickhouse://analyst:" in caplog.text
    assert "hunter2" not in caplog.text
