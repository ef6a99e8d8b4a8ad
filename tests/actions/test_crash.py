"""kill -9 and SIGSTOP of real service processes in the middle of a plan: the successor finishes it and nothing is done twice."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from actions.ledger import Ledger, StoredPlan
from tests.actions.builders import NODES, incident
from tests.actions.fake_warden import FakeWarden
from tests.actions.harness import Rig, rig, wait_for
from trainwarden.clock import SystemClock
from trainwarden.records import ActionStatus, encode

ROOT = Path(__file__).parents[2]
ROWS = 8
"""Rows of a plan that isolates and restarts after a save: plan, then started and done of three steps, then verified."""


def write_files(made: Rig) -> None:
    nodes = "\n".join(f'{name} = "{url}"' for name, url in made.urls.items())
    (made.directory / "config.toml").write_text(f"""
run_dir = "{made.directory}"
[kafka]
url = "memory://own"
[policy]
mode = "auto"
[actions]
listen = "127.0.0.1:0"
verify_s = 60
[backends.warden]
secret_file = "{made.directory / "secret"}"
connect_timeout_ms = 10000
status_timeout_ms = 10000
answer_timeout_ms = 20000
[backends.warden.nodes]
{nodes}
[rails.cool_down]
job_s = 0
""")
    reported = incident(last_step=made.wardens["n0"].now_step(), observed_at_ns=time.time_ns())
    (made.directory / "incident").write_bytes(encode(reported))


@contextmanager
def process(made: Rig, die_after_rows: int = 0, later_s: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    program = [sys.executable, "-m", "tests.actions.service_process"]
    files = [str(made.directory / "config.toml"), str(made.directory / "incident"), str(die_after_rows), str(later_s)]
    with (made.directory / "service.log").open("ab") as log:
        running = subprocess.Popen(
            [*program, *files], cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    try:
        yield running
    finally:
        if running.poll() is None:
            os.kill(running.pid, signal.SIGCONT)
            running.kill()
        running.wait()


@contextmanager
def ledger_at_rest(made: Rig) -> Iterator[None]:
    """No process is within a transaction meanwhile: one that is stopped in it keeps the file locked for all."""
    with closing(sqlite3.connect(made.directory / "ledger.sqlite", timeout=60, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


def ended(made: Rig) -> StoredPlan:
    """The incident's plan once it has ended, as the ledger on disk says."""

    def look() -> StoredPlan | None:
        if not (made.directory / "ledger.sqlite").exists():
            return None
        ledger = Ledger(made.directory / "ledger.sqlite", SystemClock())
        try:
            stored = ledger.newest_plan("i1")
        finally:
            ledger.close()
        return stored if stored is not None and stored.ended is not None else None

    try:
        found: StoredPlan = wait_for("the plan to end", look)
    except AssertionError as error:
        raise AssertionError(f"{error}:\n{(made.directory / 'service.log').read_text()[-5000:]}") from error
    return found


def assert_healed_once(made: Rig, stored: StoredPlan) -> None:
    assert stored.ended is not None
    assert stored.ended.status is ActionStatus.VERIFIED, (made.directory / "service.log").read_text()
    assert stored.plan.number == 1
    assert made.wardens["n2"].did("stop") == 1
    for name in NODES:
        assert made.wardens[name].did("world") == 1, name
        assert made.wardens[name].did("save") <= 2, name
    assert made.wardens["n2"].excluded
    assert [made.wardens[name].generation for name in NODES] == [2, 2, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("rows", range(1, ROWS + 1))
def test_killed_after_each_row_of_the_ledger(tmp_path: Path, rows: int) -> None:
    with rig(tmp_path) as made:
        write_files(made)
        with process(made, die_after_rows=rows) as first:
            assert first.wait(120) == -signal.SIGKILL
        with process(made):
            assert_healed_once(made, ended(made))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "verb"), [("n0", "save"), ("n2", "stop"), ("n0", "world"), ("n2", "world"), ("n3", "world")]
)
def test_killed_when_an_effect_was_done_but_not_yet_answered(tmp_path: Path, node: str, verb: str) -> None:
    with rig(tmp_path) as made:
        write_files(made)
        running: list[subprocess.Popen[bytes]] = []

        def kill(warden: FakeWarden, done: str) -> None:
            if done == verb and running:
                running.pop().kill()

        made.wardens[node].on_effect = kill
        with process(made) as first:
            running.append(first)
            assert first.wait(120) == -signal.SIGKILL
        with process(made):
            assert_healed_once(made, ended(made))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 6, 7, 8, 9])
def test_killed_between_the_rounds_of_a_restart(tmp_path: Path, rows: int) -> None:
    """n1 never answers: the first round fails, the second goes without it; nobody is told of a round twice."""
    with rig(tmp_path, n1="http://127.0.0.1:9") as made:
        write_files(made)
        path = made.directory / "config.toml"
        path.write_text(path.read_text() + "[rails.breaker]\nshare_ratio = 0.5\n")
        with process(made, die_after_rows=rows) as first:
            assert first.wait(120) == -signal.SIGKILL
        with process(made):
            stored = ended(made)
        assert stored.ended is not None
        assert stored.ended.status is ActionStatus.VERIFIED, (made.directory / "service.log").read_text()
        worlds = [args["generation"] for verb, _, args in made.wardens["n0"].effects if verb == "world"]
        assert worlds == [2, 3]
        assert made.wardens["n0"].members == ["n0", "n3"]


@pytest.mark.slow
def test_a_standby_takes_over_at_once_when_the_leader_is_killed(tmp_path: Path) -> None:
    with rig(tmp_path) as made, ExitStack() as stack:
        write_files(made)
        path, log = made.directory / "config.toml", made.directory / "service.log"
        path.write_text(path.read_text().replace("answer_timeout_ms = 20000", "answer_timeout_ms = 60000"))
        leaders: list[subprocess.Popen[bytes]] = []

        def kill_once_another_stands_by(warden: FakeWarden, done: str) -> None:
            if done == "world" and leaders:
                leader = leaders.pop()
                stack.enter_context(process(made))
                wait_for("the standby", lambda: f"standing by: process {leader.pid}" in log.read_text())
                leader.kill()

        made.wardens["n0"].on_effect = kill_once_another_stands_by
        leaders.append(stack.enter_context(process(made)))
        assert_healed_once(made, ended(made))
        assert "leading with fence 2" in log.read_text()


@pytest.mark.slow
def test_a_paused_leader_finds_itself_replaced_and_does_nothing_more(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        write_files(made)
        paused: list[subprocess.Popen[bytes]] = []

        def pause(warden: FakeWarden, done: str) -> None:
            if done == "stop" and paused:
                with ledger_at_rest(made):
                    os.kill(paused[0].pid, signal.SIGSTOP)
                    os.waitid(os.P_PID, paused[0].pid, os.WSTOPPED | os.WNOWAIT)
                paused.pop()

        made.wardens["n2"].on_effect = pause
        with process(made) as first:
            paused.append(first)
            wait_for("the leader to be paused", lambda: not paused)
            with process(made):
                assert_healed_once(made, ended(made))
                old = made.wardens["n0"].fence - 1
                os.kill(first.pid, signal.SIGCONT)
                log = made.directory / "service.log"
                wait_for("the old leader to say so", lambda: "no longer the leader" in log.read_text())
                assert f"fence {old} is no longer the leader's" in log.read_text()
            assert_healed_once(made, ended(made))


@pytest.mark.slow
def test_a_leader_that_skips_its_own_check_is_refused_by_the_wardens(tmp_path: Path) -> None:
    """The last line of defence: the command of the paused leader leaves its process after the pause."""
    from actions.backends.base import Order
    from tests.actions.test_warden_backend import cluster

    with cluster(tmp_path) as (backend, wardens):
        old, new = Order("i1.1.isolate.n1", "demo", 1), Order("lead.2", "", 2)
        assert backend.isolate(Order("x", "demo", 1), "n0").status == "done"
        backend.announce(new)
        assert backend.isolate(old, "n1").status == "refused"
        assert not wardens["n1"].effects


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_plan_that_was_begun_long_ago_is_not_begun_again(tmp_path: Path, rows: int) -> None:
    """Killed before the first effect (a save is none) and started again only after the plan has expired."""
    with rig(tmp_path) as made:
        write_files(made)
        path = made.directory / "config.toml"
        path.write_text(path.read_text().replace("verify_s = 60", "verify_s = 60\nplan_ttl_s = 60"))
        with process(made, die_after_rows=rows) as first:
            assert first.wait(120) == -signal.SIGKILL
        with process(made, later_s=61.0):
            stored = ended(made)
            assert stored.ended is not None
            assert (stored.ended.status, stored.ended.rail) == (ActionStatus.DENIED, "expiry")
            assert not any(warden.did("stop") + warden.did("world") for warden in made.wardens.values())
