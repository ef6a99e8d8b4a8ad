"""Mistakes in how the commands are called: one clear sentence, exit code 2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainwarden_hook.addresses import UsageError
from trainwarden_hook.launcher import main as launcher_main
from trainwarden_hook.options import parse, parse_conf, parse_nodes
from trainwarden_hook.rendezvous import main as rendezvous_main
from trainwarden_hook.warden import main as warden_main


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--nnodes", "4:2", "--standalone", "x.py"], "--nnodes"),
        (["--nnodes", "two", "--standalone", "x.py"], "--nnodes"),
        (["--standalone"], "no training script"),
        (["--nnodes", "2", "x.py"], "--rdzv-endpoint"),
        (["--rdzv-endpoint", "host", "x.py"], "HOST:PORT"),
        (["--rdzv-endpoint", "h:99999", "x.py"], "HOST:PORT"),
        (["--rdzv-endpoint", "h:²", "x.py"], "HOST:PORT"),
        (["--nnodes", "²", "--standalone", "x.py"], "--nnodes"),
        (["--standalone", "--nnodes", "2", "x.py"], "one node"),
        (["--standalone", "--nproc-per-node", "0", "x.py"], "nproc"),
        (["--standalone", "--rdzv-conf", "a", "x.py"], "key=value"),
        (["--standalone", "/no/such/script.py"], "no training script"),
    ],
)
def test_launcher(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher_main(argv) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert word in told


def test_a_run_directory_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "x.py").write_text("")
    assert launcher_main(["--standalone", "--run-dir", str(tmp_path / "file" / "run"), str(tmp_path / "x.py")]) == 2
    assert "run directory" in capsys.readouterr().err


def test_good_options() -> None:
    options = parse(["--standalone", "--", "train.py", "--lr", "1"], {"TRAINWARDEN_NODE": "n3", "TRAINWARDEN_JOB": "j"})
    assert (options.node, options.job, options.rdzv_id, options.script) == ("n3", "j", "j", ["train.py", "--lr", "1"])
    assert parse_nodes("2:4") == (2, 4)
    assert parse_nodes("3") == (3, 3)
    assert parse_conf("last_call_timeout=1")["last_call_timeout"] == "1"
    assert parse_conf("")["keep_alive_interval"] == "1"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


def test_rendezvous_port_in_use(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert rendezvous_main(["--listen", f"127.0.0.1:{taken}"]) == 2
    assert f"port {taken} on 127.0.0.1 is in use" in capsys.readouterr().err


class Files:
    def __init__(self, folder: Path) -> None:
        self.secret = folder / "secret"
        self.secret.write_bytes(b"0123456789abcdef\n")
        self.folder = folder

    def argv(self, listen: str = "127.0.0.1:0", launcher: tuple[str, ...] = ("--", "trainwarden-run")) -> list[str]:
        return [
            "--node",
            "n0",
            "--job",
            "j",
            "--listen",
            listen,
            "--secret-file",
            str(self.secret),
            "--state-dir",
            str(self.folder / "state"),
            "--run-dir",
            str(self.folder / "run"),
            *launcher,
        ]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def failing(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert warden_main(argv) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


def test_warden_port_in_use(files: Files, taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert "in use" in failing(files.argv(f"127.0.0.1:{taken}"), capsys)


def test_warden_without_secret(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.secret.unlink()
    assert "cannot read the secret file" in failing(files.argv(), capsys)


def test_warden_with_a_short_secret(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.secret.write_bytes(b"short")
    assert "at least 16" in failing(files.argv(), capsys)


def test_warden_without_a_launcher(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no launcher given" in failing(files.argv(launcher=()), capsys)


def test_warden_state_directory_that_is_a_file(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    (files.folder / "state").write_text("")
    assert "state directory" in failing(files.argv(), capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_warden_state_directory_without_permission(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    (files.folder / "state").mkdir(mode=0o500)
    assert "no permission" in failing(files.argv(), capsys)


def test_an_endpoint_of_a_command_names_its_flag() -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        parse(["--rdzv-endpoint", "nonsense", "x.py"], {})


def test_console_commands_show_help() -> None:
    for name in ("launcher", "warden", "rendezvous"):
        shown = subprocess.run(
            [sys.executable, "-m", f"trainwarden_hook.{name}", "--help"], capture_output=True, check=True
        )
        assert b"usage" in shown.stdout
