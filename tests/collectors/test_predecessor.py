"""A collector that starts again names the one before it, and only one that has spoken."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from collectors.predecessor import NAME, Predecessor

A, B, C = ("0" * 15 + letter for letter in "abc")


def test_the_first_names_nobody_and_the_next_names_it(tmp_path: Path) -> None:
    first = Predecessor(tmp_path, A)
    assert first.spoken() == ""
    assert first.spoken() == ""
    second = Predecessor(tmp_path, B)
    assert [second.spoken(), second.spoken()] == [A, A]
    assert Predecessor(tmp_path, C).spoken() == B


def test_who_never_spoke_is_nobodys_predecessor(tmp_path: Path) -> None:
    Predecessor(tmp_path, A).spoken()
    Predecessor(tmp_path, B)
    assert Predecessor(tmp_path, C).spoken() == A


def test_a_file_that_is_torn_names_nobody(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"\xff\xfe")
    assert Predecessor(tmp_path, A).spoken() == ""
    assert Predecessor(tmp_path, B).spoken() == A


def test_a_disk_that_takes_nothing_is_told_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Predecessor(tmp_path, A).spoken()

    def refuses(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuses)
    assert Predecessor(tmp_path, B).spoken() == A
    assert "after the next start the node is silent for a while" in caplog.text
