"""A launcher that breaks by itself is no failed job: its warden must start another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
from trainwarden_hook import elastic, launcher, worlds, zygote


class NoZygote:
    closed = True

    def read(self) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "broken", [OSError(28, "No space left on device"), RuntimeError("the zygote is gone: no worker can be started")]
)
def test_what_breaks_the_launcher_is_neither_wrong_use_nor_failed_workers(
    broken: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: worlds.Runner) -> int:
        raise broken

    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setattr(zygote, "preload", lambda modules: [])
    monkeypatch.setattr(zygote, "start", NoZygote)
    monkeypatch.setattr(elastic, "quiet_hostname", lambda node: None)
    monkeypatch.setattr(launcher, "_install_signals", lambda: None)
    monkeypatch.setattr(launcher, "_ignore_signals", lambda: None)
    monkeypatch.setattr(worlds.Runner, "run", breaks)
    script = tmp_path / "x.py"
    script.write_text("")
    code = launcher.main(["--standalone", "--node", "n0", "--run-dir", str(tmp_path / "run"), str(script)])
    assert code == launcher.EXIT_BROKEN
    assert code not in {0, 1, 2}, "a warden takes these for an end that is meant"
    assert not os.path.exists(tmp_path / "run" / "mailbox.sock")
