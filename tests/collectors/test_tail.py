"""Following a file: rotation, truncation, partial lines, restarts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors import patterns
from collectors.logs.desk import Channel, Desk, refused
from collectors.logs.folding import Folder
from collectors.tail import HEAD_BYTES, MAX_LINE_BYTES, Tail
from tests.collectors.kit import bench

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


def test_an_unrelated_neighbour_is_not_taken_for_a_rotated_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "1\n")
    tail = Tail(path, None, from_start=True)
    tail.poll(MANY)
    add(tmp_path / "log.stderr", "not ours\n")
    path.rename(tmp_path / "log.1")
    add(path, "2\n")
    assert polls(tail) == ["2"]


def test_several_rotations_between_two_looks_lose_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "log")
    writer.write("0")
    tail = Tail(writer.path, None, from_start=True)
    assert tail.poll(MANY) == ["0"]
    for number in range(1, 5):
        writer.write(str(number))
        writer.rename()
    writer.write("5")
    assert polls(tail, 20) == ["1", "2", "3", "4", "5"]


def test_what_was_written_before_a_copytruncate_is_read_from_the_copy(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "log")
    writer.write("first")
    tail = Tail(writer.path, None, from_start=True)
    assert tail.poll(MANY) == ["first"]
    writer.write("not read yet")
    writer.copytruncate()
    writer.write("after")
    assert polls(tail, 6) == ["not read yet", "after"]


def test_a_hole_of_gigabytes_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    add(path, "x" * 100 + "\n")
    tail = Tail(path, None, from_start=True)
    tail.poll(MANY)
    with path.open("r+b") as file:  # a writer that does not append goes on at its old place
        file.truncate(0)
        file.seek(8 << 30)
        file.write(b"behind the hole\n")
    assert polls(tail, 3) == ["behind the hole"]


def test_a_line_of_ten_megabytes_is_cut_and_memory_is_bounded(tmp_path: Path) -> None:
    board = bench(tmp_path)
    path = tmp_path / "log"
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, x\n"
    add(path, "z" * 10_000_000 + xid + xid)
    tail, got = Tail(path, None, from_start=True), 0
    desk = Desk(board.context, patterns.load(), Folder(5.0, 20.0, 2.0, refused(board.context)), "logfile")
    while block := tail.block(256 * 1024) or (tail._offset < path.stat().st_size and b"\n"):
        got = max(got, len(block))
        desk.block(Channel("log"), block)
    assert board.outlet.codes == ["xid:79"]
    assert got <= MAX_LINE_BYTES + 1 + len(xid) * 2


class Writer:
    """Writes and rotates a log; times of modification are a millisecond apart, as the kernel's own are not in a fast test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._now_ns = 10**18
        self._files = 0
        path.touch()

    def write(self, line: str) -> None:
        add(self.path, f"{line}\n")
        self._stamp(self.path)

    def rename(self) -> None:
        for number in range(self._files, 0, -1):
            self._aside(number).rename(self._aside(number + 1))
        self._files += 1
        self.path.rename(self._aside(1))
        self.path.touch()
        self._stamp(self.path)

    def copytruncate(self) -> None:
        for number in range(self._files, 0, -1):
            self._aside(number).rename(self._aside(number + 1))
        self._files += 1
        self._aside(1).write_bytes(self.path.read_bytes())
        self._stamp(self._aside(1))
        os.truncate(self.path, 0)
        self._stamp(self.path)

    def _aside(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _stamp(self, path: Path) -> None:
        self._now_ns += 1_000_000
        os.utime(path, ns=(self._now_ns, self._now_ns))


@pytest.mark.parametrize("rotation", ["rename", "copytruncate"])
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.sampled_from(["write", "write", "write", "poll", "rotate", "restart"]), max_size=40),
    chunk=st.integers(16, 4 * HEAD_BYTES),
)
def test_a_rotating_writer_loses_and_repeats_nothing(
    rotation: str, tmp_path_factory: pytest.TempPathFactory, steps: list[str], chunk: int
) -> None:
    writer = Writer(tmp_path_factory.mktemp("model") / "log")
    tail, number, got, written = Tail(writer.path, None, from_start=True), 0, list[str](), list[str]()
    tail.poll(chunk)
    for step in [*steps, "write"]:
        if step == "write":
            number += 1
            line = f"{number} " + "x" * (number * 7 % 90)
            writer.write(line)
            written.append(line)
        elif step == "poll":
            got += tail.poll(chunk)
        elif step == "rotate" and writer.path.stat().st_size:
            if rotation == "copytruncate" and tail.position() is not None:
                got += tail.poll(chunk)  # a copy made twice between two looks is lost by nature
            getattr(writer, rotation)()
            if rotation == "copytruncate":
                for _ in range(200):
                    got += tail.poll(chunk)
        elif step == "restart":
            position = tail.position()
            tail.close()
            tail = Tail(writer.path, position, from_start=True)
    for _ in range(400):
        got += tail.poll(chunk)
    assert got == written


def test_while_it_goes_from_file_to_file_it_says_that_more_may_come(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("first\n", encoding="utf-8")
    tail = Tail(path, None, from_start=True)
    assert tail.poll(1000) == ["first"]
    assert not tail.unsettled
    for number in (2, 1):
        path.rename(tmp_path / f"a.log.{number}")
        path.write_text(f"after {number}\n", encoding="utf-8")
    lines = tail.poll(1000)
    while tail.unsettled:
        lines += tail.poll(1000)
    assert lines == ["after 2", "after 1"]
