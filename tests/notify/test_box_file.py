"""The file of the outbox: whose it is, and what an older build does with a newer one."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from actions.notify.outbox import LAYOUT, Outbox
from trainwarden.errors import UnavailableError


def test_nobody_else_reads_any_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = os.umask(0o022)
    try:
        box = Outbox(folder / "notify.sqlite")
        assert box.take()
        modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
        box.close()
    finally:
        os.umask(before)
    assert len(modes) >= 4
    assert set(modes.values()) == {0o600}, modes


def test_a_newer_layout_is_refused_each_time_and_not_marked_as_ours(tmp_path: Path) -> None:
    path = tmp_path / "notify.sqlite"
    Outbox(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {LAYOUT + 1}")
    db.close()
    for _ in range(2):
        with pytest.raises(UnavailableError, match=f"layout {LAYOUT + 1}"):
            Outbox(path)
