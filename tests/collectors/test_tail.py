"""Following a file: rotation, truncation, partial lines, restarts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.tail import HEAD_BYTES, MAX_LINE_BYTES, Tail

MANY = 1 << 20


def add(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def polls(tail: Tail, times: int = 4) -> list[str]:
    return [line for _ in range(times) for line in tail.poll(MANY)]


def test_a_file_that_is_there_at_first_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "old\n")
    tail = Tail(path, None)
    assert tail.poll(MANY) == []
    add(path, "new\n")
    assert tail.poll(MANY) == ["new"]


def test_a_file_that_comes_later_is_read_from_its_start(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log", None)
    assert tail.poll(MANY) == []
    add(tmp_path / "log", "first\n")
    assert tail.poll(MANY) == ["first"]


def test_a_line_is_given_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    tail = Tail(path, None)
    tail.poll(MANY)
    add(path, "NVRM: Xi")
    assert tail.poll(MANY) == []
    add(path, "d 79\nnext")
    assert tail.poll(MANY) == ["NVRM: Xid 79"]


def test_rotation_by_rename_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "0\n")
    tail = Tail(path, None, from_start=True)
    assert tail.poll(MANY) == ["0"]
    path.rename(tmp_path / "log.1")
    add(tmp_path / "log.1", "1\n")  # the writer still holds the old file
    add(path, "2\n")
    first = tail.poll(MANY)
    add(tmp_path / "log.1", "1b\n")
    assert first + polls(tail) == ["1", "1b", "2"]


def test_copytruncate_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "a long line that is copied away\n")
    tail = Tail(path, None, from_start=True)
    tail.poll(MANY)
    os.truncate(path, 0)
    add(path, "b\n")
    assert tail.poll(MANY) == ["b"]
    assert tail.truncations == 1


def test_truncated_and_grown_past_the_old_end_is_noticed_by_its_head(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "short\n")
    tail = Tail(path, None, from_start=True)
    tail.poll(MANY)
    os.truncate(path, 0)
    add(path, "another first line\nsecond\n")
    assert tail.poll(MANY) == ["another first line", "second"]


def test_a_restart_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "1\n2\npart")
    tail = Tail(path, None, from_start=True)
    assert tail.poll(MANY) == ["1", "2"]
    position = tail.position()
    add(path, "ial\n3\n")
    assert Tail(path, position).poll(MANY) == ["partial", "3"]


def test_a_restart_after_rotation_reads_the_rest_of_the_old_file_first(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "1\n")
    tail = Tail(path, None, from_start=True)
    tail.poll(MANY)
    position = tail.position()
    add(path, "2\n")
    path.rename(tmp_path / "log.1")
    add(path, "3\n")
    assert polls(Tail(path, position)) == ["2", "3"]


def test_a_reused_inode_is_not_taken_for_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "x" * 300 + "\n")
    tail = Tail(path, None, from_start=True)
    tail.poll(MANY)
    position = tail.position()
    with path.open("w") as file:  # same inode, other content, longer than the old position
        file.write("y" * 400 + "\nnew\n")
    assert Tail(path, position).poll(MANY) == ["y" * 400, "new"]


def test_odd_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\0\0\0after a hole\n 10%|#\r 20%|##\r 30%|###\nbad \xff utf\r\n")
    assert Tail(path, None, from_start=True).poll(MANY) == ["after a hole", " 30%|###", "bad � utf"]


def test_an_endless_line_is_cut_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "z" * (3 * MAX_LINE_BYTES))
    tail = Tail(path, None, from_start=True)
    found = [line for _ in range(8) for line in tail.poll(MAX_LINE_BYTES)]
    add(path, "zzz\nnext\n")
    found += polls(tail)
    assert [len(line) for line in found[:-1]] == [MAX_LINE_BYTES]
    assert found[-1] == "next"
    assert tail.cut_lines == 1


def test_what_is_no_file_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        Tail(tmp_path / "pipe", None).poll(MANY)


STEPS = st.lists(st.sampled_from(["write", "part", "poll", "rotate", "restart"]), max_size=40)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, chunk=st.integers(16, 4 * HEAD_BYTES))
def test_any_history_of_rotations_and_restarts_gives_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], chunk: int
) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"
    path.touch()
    tail, number, rotations, got, written, pending = Tail(path, None, from_start=True), 0, 0, [], [], ""
    for step in [*steps, "poll"]:
        if step in ("write", "part"):
            number += 1
            line = f"{number} " + "x" * (number % 50)
            pending = pending + line if step == "part" else pending
            add(path, line if step == "part" else f"{line}\n")
            if step == "write":
                written.append(pending + line)
                pending = ""
        elif step == "poll":
            for _ in range(300):
                got += tail.poll(chunk)
        elif step == "rotate" and not pending:
            for _ in range(300):
                got += tail.poll(chunk)
            rotations += 1
            path.rename(path.with_name(f"log.{rotations}"))
            path.touch()
        elif step == "restart":
            position = tail.position()
            tail.close()
            tail = Tail(path, position, from_start=True)
    assert got == written
