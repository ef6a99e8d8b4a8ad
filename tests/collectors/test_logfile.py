"""The log file source: urgency, folding, rate limit, positions over a restart, the kernel's own device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from collectors.sources.logfile import CHUNK_BYTES, KernelRing, LogfileSource, redact
from collectors.tail import Position
from tests.collectors.kit import Bench, bench
from trainwarden.records import encode

XID = "<3>[  1.0] NVRM: Xid (PCI:0000:3b:00): {}, pid=1, name=python, {}\n"


def watched(tmp_path: Path, **settings: object) -> tuple[Bench, LogfileSource, Path]:
    board = bench(tmp_path)
    path = tmp_path / "kern.log"
    path.touch()
    return board, watching(board, path, **settings), path


def watching(board: Bench, path: Path, **settings: object) -> LogfileSource:
    source = board.build(LogfileSource, files={"kernel": str(path)}, **settings)
    assert isinstance(source, LogfileSource)
    source.poll()
    return source


def add(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_a_fatal_line_is_urgent_and_knows_its_job(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path)
    board.context.ranks.seen("j", 3, 0, pid=1)
    add(path, "nothing special\n" + XID.format(79, "GPU has fallen off the bus."))
    source.poll()
    [(event, urgent)] = board.outlet.logs
    assert urgent
    assert (event.source, event.code, event.severity, event.job, event.attempt) == (
        "kernel",
        "xid:79",
        "critical",
        "j",
        3,
    )
    assert event.attributes["pci"] == "0000:3b:00.0"


def test_a_mild_line_may_wait(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path)
    add(path, XID.format(13, "Graphics Exception"))
    source.poll()
    assert [urgent for _, urgent in board.outlet.logs] == [False]


def test_identical_lines_are_folded_and_counted(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path, fold_s=5.0)
    for _ in range(1000):
        add(path, XID.format(79, "GPU has fallen off the bus."))
    source.poll()
    assert len(board.outlet.logs) == 1
    board.clock.sleep(6)
    source.poll()
    assert [event.repeat for event, _ in board.outlet.logs] == [1, 999]
    board.clock.sleep(6)
    source.poll()
    assert len(board.outlet.logs) == 2


def test_a_flood_of_different_lines_is_limited_and_what_was_dropped_is_said(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path, burst=5.0, per_s=1.0)
    for n in range(100):
        add(path, f"INFO: task worker:{n} blocked for more than 120 seconds.\n")
    source.poll()
    assert len(board.outlet.logs) == 5
    assert board.context.metrics.value("tw_log_lines_dropped_total", file="kernel") == 95
    board.clock.sleep(1)
    add(path, "INFO: task other:7 blocked for more than 120 seconds.\n")
    source.poll()
    assert board.outlet.logs[-1][0].attributes["dropped_before"] == "95"


def test_a_flood_of_one_code_does_not_hide_another(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path, burst=5.0)
    for n in range(100):
        add(path, f"INFO: task worker:{n} blocked for more than 120 seconds.\n")
    add(path, XID.format(79, "GPU has fallen off the bus."))
    source.poll()
    assert board.outlet.codes[-1] == "xid:79"


def test_positions_survive_a_restart(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path)
    add(path, XID.format(79, "one"))
    source.poll()
    source.close()
    add(path, XID.format(48, "two"))
    watching(board, path)
    assert board.outlet.codes == ["xid:79", "xid:48"]


def test_a_kill_right_after_an_event_does_not_repeat_it(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path)
    add(path, XID.format(79, "one"))
    source.poll()
    watching(board, path)  # the first one was never closed
    assert board.outlet.codes == ["xid:79"]


def test_a_file_without_permission_is_a_gap_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = bench(tmp_path)
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.touch()
    bad.touch()
    source = board.build(LogfileSource, files={"bad": str(bad), "good": str(good)})
    assert isinstance(source, LogfileSource)
    real = os.open

    def refuse(path: object, *given: int) -> int:
        if Path(str(path)) == bad:
            raise PermissionError(13, "Permission denied")
        return real(str(path), *given)

    monkeypatch.setattr(os, "open", refuse)
    source.poll()
    add(good, XID.format(79, "x"))
    source.poll()
    assert [g.reason for g in source.sample(0).gaps] == ["permission:bad"]
    assert board.outlet.codes == ["xid:79"]
    monkeypatch.undo()
    source.poll()
    assert source.sample(0).gaps == ()


def test_the_thread_picks_lines_up(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path, poll_ms=10)
    import threading

    came = threading.Event()
    board.outlet.heard = came.set
    source.start()
    add(path, XID.format(79, "x"))
    assert came.wait(60)
    source.close()


def test_secrets_stay_on_the_node() -> None:
    assert (
        redact("Authorization: abc Password=hunter2 https://u:p@h/x")
        == "Authorization: *** Password=*** https://***@h/x"
    )


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """Records that reads of the kernel device give; an exception is raised."""
    records: list[object] = []
    (tmp_path / "kmsg").touch()

    def read(descriptor: int, size: int) -> bytes:
        del descriptor, size
        if not records:
            raise BlockingIOError
        found = records.pop(0)
        if isinstance(found, OSError):
            raise found
        assert isinstance(found, bytes)
        return found

    monkeypatch.setattr(os, "read", read)
    return records


def test_kernel_records_lose_their_key_value_lines_and_overwriting_is_survived(
    ring: list[object], tmp_path: Path
) -> None:
    reader = KernelRing(tmp_path / "kmsg", None, boot=7)
    ring.extend([b"3,10,1000,-;one\n SUBSYSTEM=pci\n", BrokenPipeError(32, "overwritten"), b"3,15,2000,-;two\n"])
    ring.append(b"3,17,2000,-;two\n")  # a number left out without being overwritten was never written
    assert reader.poll(1 << 20) == ["3,10,1000,-;one", "3,15,2000,-;two", "3,17,2000,-;two"]
    assert reader.lost == 4
    assert reader.position() == Position(7, 0, 17)


def test_what_the_kernel_overwrote_is_a_gap_of_one_tick_and_counted(ring: list[object], tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    source = bench(tmp_path / "bench").build(LogfileSource, files={"kernel": str(tmp_path / "kmsg")})
    assert isinstance(source, LogfileSource)
    reader = KernelRing(tmp_path / "kmsg", None, boot=7)
    source._readers["kernel"] = reader
    ring.extend([b"3,10,1,-;one\n", BrokenPipeError(32, "overwritten"), b"3,15,2,-;two\n"])
    source.poll()
    assert [gap.reason for gap in source.sample(0).gaps] == ["overwritten:kernel"]
    assert source.sample(0).gaps == ()
    assert source.context.metrics.value("tw_log_lines_dropped_total", file="kernel") == 4


def test_the_kernels_log_is_read_from_its_end_or_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_bytes(b"3,10,1,-;old\n")
    assert KernelRing(tmp_path / "kmsg", None, boot=7).poll(1 << 20) == []
    assert KernelRing(tmp_path / "kmsg", None, boot=7, from_start=True).poll(1 << 20) == ["3,10,1,-;old"]


def test_a_file_that_is_flooded_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    """Files take turns, a piece each, and one look has its limit."""
    (tmp_path / "bench").mkdir()
    board = bench(tmp_path / "bench")
    flooded, quiet = tmp_path / "a", tmp_path / "b"
    flooded.write_bytes(b"nothing to see\n" * 100_000)
    quiet.write_text(XID.format(79, "GPU has fallen off the bus."), encoding="utf-8")
    files = {"a": str(flooded), "b": str(quiet)}
    source = board.build(LogfileSource, files=files, from_start=True, bytes_per_poll=CHUNK_BYTES, budget_ms=60_000)
    assert isinstance(source, LogfileSource)
    source.poll()
    assert board.outlet.codes == ["xid:79"]
    assert source._readers["a"].position().offset <= 2 * CHUNK_BYTES  # type: ignore[union-attr]
    source.close()


def test_kernel_records_seen_before_a_restart_are_not_given_again(ring: list[object], tmp_path: Path) -> None:
    ring.extend([b"3,14,1,-;old\n", b"3,15,2,-;last\n", b"3,16,3,-;new\n"])
    assert KernelRing(tmp_path / "kmsg", Position(7, 0, 15), boot=7).poll(1 << 20) == ["3,16,3,-;new"]
    ring.append(b"3,2,3,-;first of another boot\n")
    assert KernelRing(tmp_path / "kmsg", Position(7, 0, 15), boot=8).poll(1 << 20) == ["3,2,3,-;first of another boot"]


@pytest.mark.parametrize(
    "poison",
    [
        "efa ..: admin cmd timeout",
        f"[Rank {'9' * 30}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)",
    ],
)
def test_a_line_that_nobody_thought_of_does_not_take_the_next_ones_along(tmp_path: Path, poison: str) -> None:
    board, source, path = watched(tmp_path)
    add(path, f"{poison}\n" + XID.format(79, "GPU has fallen off the bus."))
    source.poll()
    assert board.outlet.codes[-1] == "xid:79"
    for event, _ in board.outlet.logs:
        encode(event)


def test_a_pattern_that_fails_costs_its_line_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, source, path = watched(tmp_path)
    plain = source._table.match

    def match(line: str) -> object:
        if "first line" in line:
            raise KeyError("xid")
        return plain(line)

    monkeypatch.setattr(source._table, "match", match)
    add(path, "NVRM: Xid of the first line\n" + XID.format(79, "GPU has fallen off the bus."))
    source.poll()
    assert board.outlet.codes == ["xid:79"]
    [(origin, reason, payload)] = board.outlet.letters
    assert (origin, payload) == ("logfile:kernel", b"NVRM: Xid of the first line")
    assert "KeyError" in reason


def test_secrets_do_not_leave_with_the_attributes_either(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path)
    add(path, "Kernel panic - not syncing: password=hunter2 at https://me:pw@host\n")
    source.poll()
    [(event, _)] = board.outlet.logs
    assert "hunter2" not in repr(event)
    assert "me:pw" not in repr(event)
