"""A launcher that breaks by itself is no failed job: its warden must start another one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from pathlib import Path

import pytest

pytest.importorskip("torch")
from trainwarden_hook import elastic, launcher, segments, sole, worlds, zygote


class NoZygote:
    closed = True

    def read(self) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a launcher without torch, workers and signals."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setattr(zygote, "preload", lambda modules: [])
    monkeypatch.setattr(zygote, "start", NoZygote)
    monkeypatch.setattr(elastic, "quiet_hostname", lambda node: None)
    monkeypatch.setattr(launcher, "_install_signals", lambda numbers: None)
    monkeypatch.setattr(launcher, "_ignore_signals", lambda: None)
    path = tmp_path / "x.py"
    path.write_text("")
    return str(path)


@pytest.mark.parametrize(
    "broken", [OSError(28, "No space left on device"), RuntimeError("the zygote is gone: no worker can be started")]
)
def test_what_breaks_the_launcher_is_neither_wrong_use_nor_failed_workers(
    broken: Exception, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(_: worlds.Runner) -> int:
        raise broken

    monkeypatch.setattr(worlds.Runner, "run", breaks)
    job = f"t{uuid.uuid4().hex[:8]}"
    code = launcher.main(["--standalone", "--job", job, "--node", "n0", "--run-dir", str(tmp_path / "run"), script])
    assert code == launcher.EXIT_BROKEN
    assert str(broken) in caplog.text
    assert code not in {0, 1, 2}, "a warden takes these for an end that is meant"
    assert not os.path.exists(tmp_path / "run" / "mailbox.sock")


def test_a_second_launcher_of_a_job_on_a_node_is_refused_and_touches_nothing(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = f"t{uuid.uuid4().hex[:8]}"
    held = Path(segments.path(job, "n0", 0, "a"))
    (tmp_path / "run").mkdir()
    box = tmp_path / "run" / "mailbox.sock"
    for file in (held, box):
        file.write_bytes(b"of the first")
    try:
        with sole.claim(job, "n0"):
            monkeypatch.setattr(sole.claim, "__defaults__", (0.01,))
            code = launcher.main(["--standalone", "--job", job, "--node", "n0", "--run-dir", str(box.parent), script])
        assert code == launcher.EXIT_BROKEN, "a warden tries again: it may be the launcher before that is in the way"
        assert f"process {os.getpid()} already runs job {job!r} on node n0" in capsys.readouterr().err
        assert held.exists()
        assert box.exists()
    finally:
        held.unlink()


def test_the_claim_is_free_with_the_end_of_who_held_it_and_other_nodes_have_their_own() -> None:
    job = f"t{uuid.uuid4().hex[:8]}"
    first = sole.claim(job, "n0")
    sole.claim(job, "n1").close()
    sole.claim(f"{job}x", "n0").close()
    got: list[int] = []

    def second() -> None:
        with sole.claim(job, "n0", 60.0) as claim:
            got.append(claim.fileno())

    waiting = threading.Thread(target=second)
    waiting.start()
    # whichever is first, the closing or the question: the second gets it
    first.close()
    waiting.join(60)
    assert got


def test_where_too_many_ask_nobody_waits_for_ever() -> None:
    job, asking = f"t{uuid.uuid4().hex[:8]}", contextlib.ExitStack()
    with sole.claim(job, "n0"), asking:
        code = 0
        while code == 0:
            one = asking.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            code = one.connect_ex(sole._name(job, "n0"))
        with pytest.raises(sole.Occupied, match="another process already runs job"):
            sole.claim(job, "n0", 0.05)


def test_a_name_that_cannot_be_had_for_another_reason_is_no_second_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sole, "_name", lambda job, node: "\0" + "x" * 200)
    with pytest.raises(OSError, match="too long"):
        sole.claim("j", "n0", 60.0)
