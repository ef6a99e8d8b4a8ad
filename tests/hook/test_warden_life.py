"""What a warden does with a launcher that it finds, loses or must not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainwarden_hook.launcher_process import LauncherProcess, start_ticks
from trainwarden_hook.warden import Warden
from trainwarden_hook.warden_state import Memory, StateFile

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
MARKER = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"


def until(what: str, look: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


class Life:
    """A warden whose launcher leaves a file when it is started."""

    def __init__(self, root: Path) -> None:
        self.file = StateFile(str(root / "state"))
        self.memory = Memory("n1", "j")
        self.run_dir = root / "run"
        self.run_dir.mkdir()
        self.started = root / "started"
        command = [sys.executable, "-c", MARKER, str(self.started)]
        self.process = LauncherProcess(command, "n1", "j", str(self.run_dir))
        self.warden = Warden(self.memory, self.file, b"0" * 16, self.process)
        self.keeper = threading.Thread(target=self.warden.keep, daemon=True)

    def leave_behind(self) -> subprocess.Popen[bytes]:
        """A launcher of an earlier warden."""
        launcher = subprocess.Popen(SLEEPER, start_new_session=True)
        pid_file = self.run_dir / "launcher.pid"
        pid_file.write_text(json.dumps([launcher.pid, start_ticks(launcher.pid)]))
        return launcher


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    monkeypatch.setattr("trainwarden_hook.warden.ADOPT_S", 0.1)
    made = Life(tmp_path)
    yield made
    made.warden.end()
    if made.keeper.is_alive():
        made.keeper.join(60)
    made.file.close()


def test_a_launcher_found_on_an_excluded_node_is_stopped(life: Life) -> None:
    """The warden before was killed between writing the exclusion down and stopping the launcher."""
    life.memory.excluded = "compute_slow"
    launcher = life.leave_behind()
    try:
        life.keeper.start()
        until("the launcher to be stopped", lambda: launcher.poll() is not None)
        assert life.warden.status()["state"] == "excluded"
    finally:
        launcher.kill()
        launcher.wait()
    assert not life.started.exists()


def test_a_job_that_finished_under_an_adopted_launcher_is_not_run_again(life: Life) -> None:
    launcher = life.leave_behind()
    assert life.process.find_earlier()
    life.warden._told = {"state": "finished", "ranks": []}
    launcher.kill()
    launcher.wait()
    life.keeper.start()
    until("the end to be noticed", lambda: life.memory.finished)
    assert not life.started.exists()


def test_a_finished_job_takes_no_order_between_the_launchers_last_word_and_its_end(life: Life) -> None:
    """The launcher has hung up and its exit is not yet seen: what it said last counts."""
    life.warden._take(None, {"state": {"state": "finished", "generation": 1, "ranks": []}})  # type: ignore[arg-type]
    assert life.warden.status()["state"] == "finished"
    answer = life.warden._world({"generation": 2, "members": ["n1"], "rendezvous_id": "x"})
    assert (answer["status"], life.memory.order) == ("refused", None)


def test_a_disk_that_is_full_when_the_launcher_ends_does_not_end_the_warden(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.keeper.start()
    until("the first launcher", lambda: life.started.exists() and life.process.pid)
    plain, refused = life.file.save, threading.Event()

    def full_once(memory: Memory) -> None:
        if not refused.is_set():
            refused.set()
            raise OSError(28, "No space left on device")
        plain(memory)

    monkeypatch.setattr(life.file, "save", full_once)
    asked: list[int | None] = []

    def poll() -> int | None:
        asked.append(None if asked else 0)
        return asked[-1]

    monkeypatch.setattr(life.process, "poll", poll)
    until("the refusal", refused.is_set)
    until("the keeper to look again", lambda: len(asked) > 2 or not life.keeper.is_alive())
    assert life.keeper.is_alive(), "nobody starts the launcher any more"
    monkeypatch.undo()
    os.kill(life.process.pid or 0, 9)


def test_a_launcher_nobody_wrote_down_goes_on_and_the_second_ones_end_is_no_news(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warden before was killed between starting it and writing its number down; the second found the job taken (3)."""
    told: list[str] = []
    monkeypatch.setattr(life.warden._sender, "send", lambda kind, fields: told.append(kind))
    first = subprocess.Popen(SLEEPER, start_new_session=True)
    try:
        (life.run_dir / "launcher.pid").write_text("[12")
        assert not life.process.find_earlier()
        monkeypatch.setattr(life.process, "_command", [sys.executable, "-c", "raise SystemExit(3)"])
        life.process.start()
        second = life.process._child
        assert second is not None
        life.process.adopt(first.pid)
        life.warden._told = {"state": "running", "ranks": [{"rank": 0, "pid": first.pid, "alive": True}]}
        second.wait(60)
        life.warden._look_after()
        assert (life.process.pid, told) == (first.pid, []), "no rank has died"
        life.warden._look_after()
        assert life.process.pid == first.pid
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
