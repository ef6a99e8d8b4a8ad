from __future__ import annotations

import os
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from actions.lease import Holder, is_gone
from actions.ledger import AlreadyBegun, LeaseLost, Ledger, LedgerError, Row, step_row
from tests.actions.builders import leading, plan
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.errors import UnavailableError
from trainwarden.records import ActionStatus, Verb

OTHER = Holder("elsewhere", "boot", "pid:[1]", 2, "9", "other")


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.sqlite"


def test_rows_come_back_as_they_were(path: Path, clock: SimulatedClock) -> None:
    made = plan(clock)
    with leading(path, clock) as ledger:
        ledger.add_plan(made, "signature", [Row.of(made, ActionStatus.STARTED, "why", "", kind="compute_slow")])
        row = ledger.add(step_row(made, made.steps[0], ActionStatus.STARTED, "", members="n0,n1"))
        assert (row.seq, row.fence, row.at_ns, row.detail) == (2, 1, clock.now_ns(), {"members": "n0,n1"})
        ledger.release_lease()
    with leading(path, clock) as ledger:
        assert [r.status for r in ledger.rows_of(made.plan_id)] == [ActionStatus.STARTED, ActionStatus.STARTED]
        assert ledger.rows_after(1) == [row]
        stored = ledger.plan(made.plan_id)
        assert stored is not None
        assert (stored.plan, stored.signature, stored.ended) == (made, "signature", None)
        assert ledger.open_plans() == [stored]
        ended = ledger.add(Row.of(made, ActionStatus.VERIFIED))
        assert ledger.open_plans() == []
        assert ledger.newest_plan("i1") == replace(stored, ended=ended)
        assert ledger.next_number("i1") == 2


@pytest.mark.parametrize(
    "statement",
    ["UPDATE rows SET reason = 'x'", "DELETE FROM rows", "DELETE FROM plans", "UPDATE notes SET value = ''"],
)
def test_nothing_written_is_ever_changed(path: Path, clock: SimulatedClock, statement: str) -> None:
    made = plan(clock)
    with leading(path, clock) as ledger:
        ledger.add_plan(made, "s", [Row.of(made, ActionStatus.STARTED)])
        ledger.note("latch:breaker", "x", "rail")
        raw = sqlite3.connect(path)
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            raw.execute(statement)
        raw.close()


def test_a_step_begins_once_and_a_plan_ends_once(path: Path, clock: SimulatedClock) -> None:
    made = plan(clock)
    with leading(path, clock) as ledger:
        ledger.add_plan(made, "s", [])
        begun = step_row(made, made.steps[0], ActionStatus.STARTED)
        ledger.add(begun)
        with pytest.raises(AlreadyBegun):
            ledger.add(begun)
        ledger.add(step_row(made, made.steps[0], ActionStatus.DONE))
        ledger.add(Row.of(made, ActionStatus.FAILED))
        with pytest.raises(AlreadyBegun):
            ledger.add(Row.of(made, ActionStatus.VERIFIED))
        with pytest.raises(AlreadyBegun):
            ledger.add_plan(made, "s", [])
        assert len(ledger.rows_of(made.plan_id)) == 3


def test_it_is_durable_before_it_returns(path: Path, clock: SimulatedClock) -> None:
    with leading(path, clock) as ledger:
        raw = ledger._db
        assert raw.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert raw.execute("PRAGMA synchronous").fetchone()[0] == 2
        assert path.stat().st_mode & 0o777 == 0o600


def test_nobody_else_reads_any_of_its_files(path: Path, clock: SimulatedClock) -> None:
    before = os.umask(0o022)
    try:
        with leading(path, clock) as ledger:
            made = plan(clock)
            ledger.add_plan(made, "s", [Row.of(made, ActionStatus.STARTED)])
            modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert len(modes) >= 3
    assert set(modes.values()) == {0o600}, modes


# --- lease ----------------------------------------------------------------------------------------------------------------


def test_one_leads_and_the_other_says_who(path: Path, clock: SimulatedClock) -> None:
    with leading(path, clock) as first:
        second = Ledger(path, clock)
        assert second.take_lease(OTHER) == "process 1 on host leads with fence 1"
        with pytest.raises(LeaseLost, match="fence 0 is no longer the leader's"):
            second.note("x", "y", "z")
        first.release_lease()
        assert second.take_lease(OTHER) == ""
        assert second.fence == 2
        second.close()


def test_a_renewed_lease_is_never_taken(path: Path, clock: SimulatedClock) -> None:
    with leading(path, clock) as first:
        second = Ledger(path, clock)
        for _ in range(20):
            clock.advance_ns(NS_PER_S)
            first.renew_lease()
            assert "leads with fence 1" in second.take_lease(OTHER)
        second.close()


def test_a_paused_leader_loses_and_can_write_nothing(path: Path, clock: SimulatedClock) -> None:
    made = plan(clock)
    with leading(path, clock) as first:
        second = Ledger(path, clock)
        assert second.take_lease(OTHER) != ""
        clock.advance_ns(int(2.9 * NS_PER_S))
        assert second.take_lease(OTHER) != ""
        first.check_lease()
        clock.advance_ns(int(0.2 * NS_PER_S))
        assert second.take_lease(OTHER) == ""
        for write in (
            first.renew_lease,
            first.check_lease,
            lambda: first.add(Row.of(made, ActionStatus.DONE)),
            lambda: first.note("a", "b", "c"),
        ):
            with pytest.raises(LeaseLost):
                write()
        first.release_lease()
        second.renew_lease()
        assert second.rows_after(0) == []
        second.close()


def test_a_wall_clock_that_jumps_moves_nothing(path: Path, clock: SimulatedClock) -> None:
    with leading(path, clock) as first:
        second = Ledger(path, clock)
        second.take_lease(OTHER)
        clock.step_ns(10_000 * NS_PER_S)
        assert "leads" in second.take_lease(OTHER)
        first.renew_lease()
        second.close()


def test_many_at_once_and_one_wins(path: Path, clock: SimulatedClock) -> None:
    ledgers = [Ledger(path, clock) for _ in range(6)]
    answers: list[str] = []
    threads = [
        threading.Thread(
            target=lambda own=own, number=number: answers.append(own.take_lease(replace(OTHER, host=f"h{number}")))
        )
        for number, own in enumerate(ledgers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.count("") == 1
    assert sorted(own.fence for own in ledgers) == [0, 0, 0, 0, 0, 1]
    for own in ledgers:
        own.close()


def test_the_fence_only_rises(path: Path, clock: SimulatedClock) -> None:
    fences = []
    for _ in range(3):
        with leading(path, clock) as ledger:
            fences.append(ledger.fence)
            ledger.release_lease()
    assert fences == [1, 2, 3]
    with leading(path, clock) as ledger:
        ledger.raise_fence(40)
        assert ledger.fence == 41
        ledger.renew_lease()


def test_who_is_certainly_gone() -> None:
    me = Holder.myself()
    assert Holder.parse(me.text) == me
    assert Holder.parse("") is None
    assert Holder.parse("a|b|c|not a number|e|f") is None
    assert not is_gone(me, me)
    assert is_gone(replace(me, started="1"), me), "the pid was given to another process"
    assert is_gone(replace(me, pid=2**22 + 1), me)
    assert is_gone(replace(me, boot="before"), me)
    assert not is_gone(replace(me, namespace="pid:[9]", pid=2**22 + 1), me), "another container: in doubt it lives"
    assert not is_gone(replace(me, host="elsewhere", pid=2**22 + 1), me)


def test_a_killed_leader_is_replaced_at_once(path: Path, clock: SimulatedClock) -> None:
    me = Holder.myself()
    first = Ledger(path, clock)
    assert first.take_lease(replace(me, started="1")) == ""
    second = Ledger(path, clock)
    assert second.take_lease(me) == ""
    first.close()
    second.close()


# --- what goes wrong --------------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_ledger(path: Path, clock: SimulatedClock) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(UnavailableError, match="restore it from a copy"):
        Ledger(path, clock)


def test_a_damaged_ledger(path: Path, clock: SimulatedClock) -> None:
    with leading(path, clock) as ledger:
        for number in range(60):
            made = plan(clock, number=number, plan_id=f"p{number}")
            ledger.add_plan(made, "s" * 500, [Row.of(made, ActionStatus.STARTED, "x" * 500)])
        ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 8192))
    with pytest.raises(UnavailableError, match="restore it from a copy"):
        Ledger(path, clock)


def test_a_newer_layout_is_not_touched(path: Path, clock: SimulatedClock) -> None:
    with leading(path, clock) as ledger:
        ledger._db.execute("PRAGMA user_version = 99")
    with pytest.raises(UnavailableError, match="layout 99, this build knows 1"):
        Ledger(path, clock)


def test_a_full_disk_refuses_and_changes_nothing(path: Path, clock: SimulatedClock) -> None:
    made = plan(clock)
    with leading(path, clock) as ledger:
        ledger.add_plan(made, "s", [])
        pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count = {pages}")
        huge = Row.of(made, ActionStatus.WAITING, "x" * 2_000_000)
        with pytest.raises(LedgerError, match="full; nothing is done until it can be written: free space"):
            ledger.add(huge)
        before = len(ledger.rows_after(0))
        ledger._db.execute("PRAGMA max_page_count = 100000")
        ledger.add(Row.of(made, ActionStatus.WAITING))
        assert len(ledger.rows_after(0)) == before + 1


def test_a_locked_ledger_refuses(path: Path, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actions.ledger.BUSY_TIMEOUT_MS", 20)
    with leading(path, clock) as ledger:
        raw = sqlite3.connect(path, isolation_level=None)
        raw.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LedgerError, match="locked; nothing is done until it can be written: end the other program"):
            ledger.note("a", "b", "c")
        raw.execute("ROLLBACK")
        raw.close()
        ledger.note("a", "b", "c")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path: Path, clock: SimulatedClock) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UnavailableError, match="must be able to write there"):
        Ledger(tmp_path / "sub" / "ledger.sqlite", clock)


def test_a_path_under_a_file(tmp_path: Path, clock: SimulatedClock) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"ledger .*file/ledger"):
        Ledger(tmp_path / "file" / "ledger.sqlite", clock)


def test_rows_since_filters(path: Path, clock: SimulatedClock) -> None:
    made = plan(clock)
    with leading(path, clock) as ledger:
        ledger.add_plan(made, "s", [Row.of(made, ActionStatus.STARTED)])
        clock.advance_ns(NS_PER_S)
        ledger.add(step_row(made, made.steps[1], ActionStatus.STARTED))
        assert len(ledger.rows_since(0)) == 2
        assert [r.verb for r in ledger.rows_since(clock.now_ns())] == ["restart"]
        assert [r.target for r in ledger.rows_since(0, Verb.RESTART, ActionStatus.STARTED, "demo")] == ["demo"]
        assert ledger.rows_since(0, Verb.RESTART, ActionStatus.STARTED, "other") == []
