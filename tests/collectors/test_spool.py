"""The spool: order, acknowledgement, thinning by value, and crashes at any system call."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors import spool as spool_module
from collectors.spool import Entry, Spool, Value
from trainwarden.errors import UsageError
from trainwarden.selfmetrics import Metrics

LIMIT = 256 * 1024


def entry(number: int, value_class: Value = Value.TICK, size: int = 100) -> Entry:
    return Entry(value_class, number, "tw.ticks", b"key", number.to_bytes(8, "big").ljust(size, b"."))


def number_of(held: spool_module.Held) -> int:
    return int.from_bytes(held.entry.value[:8], "big")


def make(path: Path, limit: int = LIMIT, metrics: Metrics | None = None) -> Spool:
    return Spool(path / "spool", limit, metrics or Metrics("test"))


def drain(spool: Spool) -> list[int]:
    numbers: list[int] = []
    while held := spool.peek(7):
        numbers += [number_of(item) for item in held]
        spool.acknowledge(held[-1].place)
    return numbers


def test_entries_come_back_in_order_and_are_gone_when_acknowledged(tmp_path: Path) -> None:
    spool = make(tmp_path)
    assert all(spool.append(entry(n)) for n in range(20))
    assert drain(spool) == list(range(20))
    assert spool.peek() == []
    assert spool.size_bytes == 0
    assert spool.append(entry(20))
    assert drain(spool) == [20]


def test_what_is_not_acknowledged_is_given_again(tmp_path: Path) -> None:
    spool = make(tmp_path)
    for n in range(10):
        spool.append(entry(n))
    spool.acknowledge(spool.peek(4)[-1].place)
    spool.peek(3)
    spool.release()
    assert [number_of(h) for h in spool.peek(3)] == [4, 5, 6]


def test_a_restart_continues_after_the_last_acknowledgement(tmp_path: Path) -> None:
    spool = make(tmp_path)
    for n in range(500):
        spool.append(entry(n))
    spool.acknowledge(spool.peek(123)[-1].place)
    spool.close()
    again = make(tmp_path)
    again.append(entry(500))
    assert drain(again) == list(range(123, 501))


def test_a_torn_tail_is_cut_and_the_rest_kept(tmp_path: Path) -> None:
    spool = make(tmp_path)
    for n in range(5):
        spool.append(entry(n))
    spool.close()
    segment = next((tmp_path / "spool").glob("*.seg"))
    os.truncate(segment, segment.stat().st_size - 3)
    again = make(tmp_path)
    again.append(entry(9))
    assert drain(again) == [0, 1, 2, 3, 9]


@pytest.mark.parametrize("zeros", [8, 4096, 4099])
def test_zeros_of_a_power_cut_are_a_torn_tail(tmp_path: Path, zeros: int) -> None:
    """Eight of them are a frame of no bytes with the right check sum."""
    spool = make(tmp_path)
    for n in range(3):
        spool.append(entry(n))
    spool.close()
    segment = next((tmp_path / "spool").glob("*.seg"))
    segment.write_bytes(segment.read_bytes() + bytes(zeros))
    again = make(tmp_path)
    again.append(entry(9))
    assert drain(again) == [0, 1, 2, 9]


def test_a_stale_position_never_skips_later_entries(tmp_path: Path) -> None:
    spool = make(tmp_path)
    for n in range(10):
        spool.append(entry(n))
    spool.acknowledge(spool.peek(5)[-1].place)
    position = (tmp_path / "spool" / "cursor").read_bytes()
    assert drain(spool) == [5, 6, 7, 8, 9]
    assert not (tmp_path / "spool" / "cursor").exists()
    for n in range(20, 30):
        spool.append(entry(n))
    spool.close()
    assert position  # it pointed into the middle of what is now entries 20..29
    assert drain(make(tmp_path)) == list(range(20, 30))


def test_a_full_spool_thins_old_ticks_first_and_keeps_steps_and_logs(tmp_path: Path) -> None:
    metrics = Metrics("test")
    spool = make(tmp_path, metrics=metrics)
    kinds = {n: Value.LOG if n % 10 == 0 else Value.STEP if n % 10 == 5 else Value.TICK for n in range(4000)}
    for n, kind in kinds.items():
        spool.append(entry(n, kind))
    assert spool.size_bytes <= LIMIT
    kept = drain(spool)
    assert kept == sorted(kept)
    assert [n for n in kinds if kinds[n] != Value.TICK] == [n for n in kept if kinds[n] != Value.TICK]
    ticks = [n for n in kept if kinds[n] == Value.TICK]
    old, new = sum(n < 2000 for n in ticks), sum(n >= 2000 for n in ticks)
    assert 0 < old < new
    assert metrics.value("tw_spool_dropped_total", topic="tw.ticks") == len(kinds) - len(kept)


def test_logs_are_the_last_to_go(tmp_path: Path) -> None:
    spool = make(tmp_path)
    for n in range(6000):
        spool.append(entry(n, Value.LOG if n % 10 == 0 else Value.STEP))
    kept = drain(spool)
    assert [n for n in kept if n % 10 == 0] == list(range(0, 6000, 10))
    assert len(kept) < 6000


def test_lent_entries_are_not_thinned_under_the_sender(tmp_path: Path) -> None:
    spool = make(tmp_path)
    for n in range(200):
        spool.append(entry(n))
    lent = spool.peek(20)
    for n in range(200, 6000):
        spool.append(entry(n))
    spool.acknowledge(lent[-1].place)
    assert [number_of(h) for h in spool.peek(5)] == [20, 21, 22, 23, 24]


def test_two_agents_do_not_share_a_spool(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(UsageError, match="belongs to a running collector"):
        make(tmp_path)


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("in the way")
    with pytest.raises(UsageError, match="cannot be used"):
        make(tmp_path)


class FullDisk:
    """os.write that fails while the disk is full; everything else is the real os."""

    def __init__(self) -> None:
        self.full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.full:
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "no space left on device")
        return os.write(descriptor, data)


def test_a_full_disk_keeps_the_newest_in_memory_and_writes_them_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics("test")
    spool = make(tmp_path, metrics=metrics)
    assert spool.append(entry(0))
    disk = FullDisk()
    monkeypatch.setattr(spool_module, "os", disk)
    assert not spool.append(entry(1))
    assert not spool.append(entry(2, Value.LOG))
    assert spool.disk_full
    disk.full = False
    assert spool.append(entry(3))
    assert not spool.disk_full
    assert drain(spool) == [0, 1, 2, 3]


def test_a_disk_that_stays_full_drops_ticks_before_logs_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics("test")
    spool = make(tmp_path, metrics=metrics)
    monkeypatch.setattr(spool_module, "os", FullDisk())
    for n in range(30):
        spool.append(entry(n, Value.LOG if n % 10 == 0 else Value.TICK, size=100_000))
    kept = drain(spool)
    assert [n for n in kept if n % 10 == 0] == [0, 10, 20]
    assert metrics.value("tw_spool_dropped_total", topic="tw.ticks") == 30 - len(kept)
    assert len(kept) == 10


# --- crashes at any system call -----------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process died here."""


@dataclass
class Mortal:
    """The os module of a process that dies at its n-th changing call; a write then got through in part."""

    calls_left: int
    torn: int

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return (
            self._counted(name, real)
            if name in ("write", "ftruncate", "unlink", "rename", "open", "truncate")
            else real
        )

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.calls_left -= 1
            if self.calls_left < 0:
                if name == "write":
                    os.write(given[0], given[1][: self.torn % (len(given[1]) + 1)])
                raise Killed
            return real(*given, **named)

        return call


OPERATIONS = st.lists(
    st.one_of(st.tuples(st.just("append"), st.integers(1, 30)), st.tuples(st.just("send"), st.integers(1, 40))),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, calls=st.integers(0, 200), torn=st.integers(0, 2000))
def test_a_kill_at_any_call_loses_nothing_that_was_kept(
    operations: list[tuple[str, int]], calls: int, torn: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder)
        spool = make(path, limit=16 * 1024 * 1024)
        spool._segment_bytes = 2000  # many segments, so that rolling and deleting are crossed too
        kept: list[int] = []
        delivered: set[int] = set()
        patch.setattr(spool_module, "os", Mortal(calls, torn))
        try:
            act(spool, operations, kept, delivered)
        except Killed:
            pass
        patch.undo()
        os.close(spool._owner)  # the kernel frees the lock of a dead process
        second_life = make(path, limit=16 * 1024 * 1024)
        for number in range(10_000, 10_040):
            assert second_life.append(entry(number))
            kept.append(number)
        second_life.close()
        found = drain(make(path, limit=16 * 1024 * 1024))
        assert [n for n in found if n in set(kept)] == [n for n in kept if n in set(found)], "order changed"
        assert set(kept) - delivered <= set(found), "an entry that was kept and not delivered is gone"
        assert len(found) == len(set(found))


def act(spool: Spool, operations: list[tuple[str, int]], kept: list[int], delivered: set[int]) -> None:
    number = 0
    for name, count in operations:
        if name == "append":
            for _ in range(count):
                number += 1
                if spool.append(entry(number)):
                    kept.append(number)
        elif held := spool.peek(count):
            delivered.update(number_of(h) for h in held)
            spool.acknowledge(held[-1].place)


@settings(max_examples=15, deadline=None)
@given(calls=st.integers(0, 120), torn=st.integers(0, 5000))
def test_a_kill_while_thinning_loses_no_log(calls: int, torn: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder)
        spool = make(path)
        for n in range(1500):
            spool.append(entry(n, Value.LOG if n % 20 == 0 else Value.TICK))
        patch.setattr(spool_module, "os", Mortal(calls, torn))
        logs = list(range(0, 1500, 20))
        try:
            for n in range(1500, 2500):
                if spool.append(entry(n, Value.LOG if n % 20 == 0 else Value.TICK)) and n % 20 == 0:
                    logs.append(n)
        except Killed:
            pass
        patch.undo()
        os.close(spool._owner)
        found = drain(make(path))
        assert found == sorted(found)
        assert set(logs) <= set(found)


def test_a_position_that_cannot_be_reset_is_no_endless_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = make(tmp_path)
    for n in range(3):
        spool.append(entry(n))
    spool.acknowledge(spool.peek(1)[-1].place)
    with monkeypatch.context() as patch:

        def read_only(path: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        patch.setattr("collectors.spool.os.unlink", read_only)
        seen: list[int] = []
        for _ in range(4):
            held = spool.peek()
            seen += [number_of(item) for item in held]
            if held:
                spool.acknowledge(held[-1].place)
        assert seen == [1, 2]
        assert spool.size_bytes == 0
        spool.append(entry(3))
        assert drain(spool) == [3]
    spool.append(entry(4))
    spool.close()
    assert drain(make(tmp_path))[-1] == 4


def test_a_file_that_cannot_be_cut_is_no_endless_repetition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = make(tmp_path)
    spool.append(entry(0))
    with monkeypatch.context() as patch:

        def refused(descriptor: int, size: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr("collectors.spool.os.ftruncate", refused)
        spool.acknowledge(spool.peek()[-1].place)
        assert spool.peek() == []
    spool.append(entry(1))
    assert drain(spool) == [1]


def test_an_entry_too_large_to_be_read_back_is_refused_and_blocks_nothing(tmp_path: Path) -> None:
    metrics = Metrics("test")
    spool = make(tmp_path, limit=64 * 1024 * 1024, metrics=metrics)
    assert not spool.append(entry(1, size=spool_module.MAX_BODY_BYTES + 1))
    assert spool.append(entry(2))
    assert drain(spool) == [2]
    assert metrics.value("tw_spool_dropped_total", topic="tw.ticks") == 1


def test_several_entries_are_kept_by_one_write_or_one_by_one(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1 << 20, Metrics("test"))
    small = [Entry(Value.STEP, i, "tw.steps", b"job", bytes([i])) for i in range(8)]
    large = [Entry(Value.STEP, 8 + i, "tw.steps", b"job", bytes(spool._segment_bytes // 3)) for i in range(4)]
    spool.extend(small)
    spool.extend(large)
    spool.extend([])
    assert [held.entry for held in spool.peek()] == (small + large)[: len(spool.peek())]
    seen: list[int] = []
    while held := spool.peek():
        seen += [item.entry.written_ns for item in held]
        spool.acknowledge(held[-1].place)
    assert seen == list(range(12))
    spool.close()


def test_entries_that_do_not_fit_on_the_disk_are_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, 1 << 20, Metrics("test"))
    entries = [Entry(Value.STEP, i, "tw.steps", b"job", bytes([i])) for i in range(3)]
    with monkeypatch.context() as full:
        full.setattr(os, "write", refused)
        spool.extend(entries)
    assert spool.disk_full
    spool.extend(entries[:1])
    assert [held.entry.written_ns for held in spool.peek()] == [0, 1, 2, 0]
    spool.close()


def refused(descriptor: int, data: bytes) -> int:
    raise OSError(28, os.strerror(28))


def test_what_was_just_written_is_not_read_back_and_after_a_backlog_it_is_so_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = make(tmp_path)
    reads: list[Path] = []
    read = spool_module._pread_file

    def counted(path: Path, start: int, size_bytes: int) -> bytes:
        reads.append(path)
        return read(path, start, size_bytes)

    monkeypatch.setattr(spool_module, "_pread_file", counted)
    spool.append(entry(0))
    spool.extend([entry(n) for n in range(1, 20)])
    assert (drain(spool), reads) == (list(range(20)), [])
    for n in range(spool_module.RECENT_ENTRIES + 5):  # nobody takes them: they are forgotten, and read
        spool.append(entry(n, size=20))
    assert drain(spool) == list(range(spool_module.RECENT_ENTRIES + 5))
    assert reads
    reads.clear()
    spool.append(entry(7))
    assert (drain(spool), reads) == ([7], [])
