from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streams.store.connect import connect
from trainwarden.addresses import hide_password
from trainwarden.embedded.ports import free_port
from trainwarden.errors import ConfigError, UnavailableError


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://x", "is not understood, expected clickhouse://"),
        ("clickhouse://", "names no host"),
        ("clickhouse://h:99999", "the port is no number"),
        ("clickhouse://u:hush@h:x", r"clickhouse://u:\*\*\*@h:x"),
        ("chdb://relative/dir", "names no directory"),
        ("chdb:///", "names no directory"),
    ],
)
def test_addresses_that_are_none_are_explained(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        connect(url)


def test_passwords_stay_out_of_messages() -> None:
    assert hide_password("clickhouse://u:hush@h:8123/d") == "clickhouse://u:***@h:8123/d"
    assert hide_password("clickhouse://h:8123/d") == "clickhouse://h:8123/d"


def test_nobody_there_is_one_sentence() -> None:
    port = free_port()
    with pytest.raises(UnavailableError) as caught:
        connect(f"clickhouse://127.0.0.1:{port}")
    assert str(caught.value) == (
        f"no ClickHouse store answers at 127.0.0.1:{port}: start one (trainwarden store, or a server) or correct the store's address"
    )


def test_a_directory_nobody_owns_is_opened_and_let_go(tmp_path: Path) -> None:
    code = """
import sys
from streams.store.connect import connect
client = connect(f"chdb://{sys.argv[1]}")
client.command("CREATE TABLE IF NOT EXISTS t (a Int8) ENGINE = MergeTree ORDER BY a")
client.insert("t", [[1]], column_names=["a"])
print(client.command("SELECT count() FROM t"))
client.close()
"""
    argv = [sys.executable, "-c", code, str(tmp_path / "store")]
    assert [subprocess.run(argv, capture_output=True, text=True, check=True).stdout for _ in range(2)] == ["1\n", "2\n"]
