from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from trainwarden.embedded.ports import LOOPBACK, free_port
from trainwarden.embedded.ready import ask_metadata, wait_for_broker
from trainwarden.embedded.tansu import BINARY_ENV, LIMITS, TansuBroker, find_tansu, serve
from trainwarden.errors import UnavailableError


def test_it_starts_answers_metadata_and_stops(tmp_path: Path) -> None:
    with TansuBroker(tmp_path / "logs" / "tansu.log") as broker:
        metadata = ask_metadata(broker.host, broker.port)
        pid = broker.pid
        assert metadata.brokers[0][1:] == ("127.0.0.1", broker.port)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert b"listening on" in (tmp_path / "logs" / "tansu.log").read_bytes()


def test_it_is_found_without_copying_it_into_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert os.access(find_tansu(), os.X_OK)
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        broker = TansuBroker(tmp_path / "tansu.log", port=taken.getsockname()[1])
        with pytest.raises(UnavailableError, match="is in use by another process"):
            broker.start()
    assert not (tmp_path / "tansu.log").exists()


def test_a_program_that_dies_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "tansu"
    program.write_text("#!/bin/sh\necho 'fatal Error: no memory'\necho bye\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv(BINARY_ENV, str(program))
    with pytest.raises(UnavailableError, match="the Tansu broker ended with code 3: fatal Error: no memory"):
        TansuBroker(tmp_path / "tansu.log").start()


def test_wrong_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINARY_ENV, str(tmp_path / "nope"))
    with pytest.raises(UnavailableError, match="nope, which is no file"):
        find_tansu()
    plain = tmp_path / "plain"
    plain.write_text("")
    monkeypatch.setenv(BINARY_ENV, str(plain))
    with pytest.raises(UnavailableError, match="is not executable"):
        find_tansu()


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="writable log at"):
        TansuBroker(tmp_path / "file" / "tansu.log").start()


def test_the_command_states_the_limits_and_stops_when_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    stop.set()
    with caplog.at_level("INFO"):
        serve(LOOPBACK, free_port(), tmp_path, stop)
    assert LIMITS in caplog.text


def test_the_command_tells_when_the_broker_ended_by_itself(tmp_path: Path) -> None:
    port = free_port()

    def crash_once_up() -> None:
        wait_for_broker(LOOPBACK, port, timeout_s=20)
        own = next(p for p in Path("/proc").glob("[0-9]*") if _listens_as(p, port))
        os.kill(int(own.name), 9)

    crasher = threading.Thread(target=crash_once_up)
    crasher.start()
    with pytest.raises(UnavailableError, match="the Tansu broker ended with code -9"):
        serve(LOOPBACK, port, tmp_path, threading.Event())
    crasher.join()


def _listens_as(process: Path, port: int) -> bool:
    try:
        return f"tcp://127.0.0.1:{port}".encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False
