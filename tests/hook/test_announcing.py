"""Saves and evaluations that a script makes by itself are told of when they begin, and are no data of the next step."""

from __future__ import annotations

import importlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainwarden_hook import announcing, pauses
from trainwarden_hook.environment import Environment
from trainwarden_hook.job import Job

from trainwarden.embedded.ports import free_port

Row = dict[str, Any]
JOB = Path(__file__).parent / "jobs" / "first_save.py"
LIMIT_S = 200.0


class Heard:
    """The collector's end of the socket, read at once: the kernel queues ten datagrams."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hook.sock"
        self.rows: list[Row] = []
        self._more = threading.Condition()
        self._seen = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while (payload := self._socket.recv(65536)) != b"end":
            with self._more:
                self.rows.append(json.loads(payload))
                self._more.notify_all()

    def until(self, wanted: Callable[[Row], bool]) -> Row:
        """The next datagram that is wanted."""
        with self._more:
            while True:
                assert self._more.wait_for(lambda: len(self.rows) > self._seen, LIMIT_S), self.rows
                self._seen += 1
                if wanted(self.rows[self._seen - 1]):
                    return self.rows[self._seen - 1]

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"end", str(self.path))


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    found = Heard(tmp_path)
    yield found
    found.close()


@pytest.fixture
def job(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """An open job of one rank; what was put around torch is taken off again."""
    plain, serialization, train, finders = (
        torch.save,
        torch.serialization.save,
        torch.nn.Module.train,
        list(sys.meta_path),
    )
    monkeypatch.setattr(announcing, "_ear", announcing._Ear())
    monkeypatch.setenv("TRAINWARDEN_SOCKET", str(heard.path))
    opened = Job(Environment.read())
    # a socket holds ten datagrams, and a test may be slow to read them
    monkeypatch.setattr(opened.sender, "send_body", lambda body: heard.rows.append(json.loads(body)))
    opened.open()
    yield opened
    torch.save, torch.serialization.save, torch.nn.Module.train = plain, serialization, train  # type: ignore[method-assign]
    sys.meta_path[:] = finders


def kinds(job: Job, heard: Heard) -> list[tuple[str, str]]:
    """(kind, phase) of all that was said so far."""
    assert job.recorder.outbox.flush(LIMIT_S)
    return [(row["t"], row["phase"]) for row in heard.rows if row["t"] in ("phase", "step")]


def test_a_save_between_steps_is_announced_and_is_no_data(
    job: Job, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job.step(0):
        pass
    monkeypatch.setattr(pauses, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(pauses, "LEAST_NS", 0)
    torch.save({"a": torch.zeros(3)}, io.BytesIO())
    with job.step(1):
        pass
    with job.step(2):
        pass
    said = kinds(job, heard)
    assert said == [
        ("step", "first"),
        ("phase", "checkpoint"),
        ("phase", "train"),
        ("step", "checkpoint"),
        ("step", "train"),
    ]
    row = next(row for row in heard.rows if row.get("step") == 1 and row["t"] == "step")
    assert 0 < row["checkpoint_ms"] <= row["duration_ms"]
    assert row["data_ms"] + row["checkpoint_ms"] <= row["duration_ms"] + 0.002, (
        "what was saved is not in the data as well"
    )


def test_small_files_do_not_make_steps_with_saves(job: Job, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "LEAST_NS", 10**12)
    for number in range(2):
        with job.step(number):
            for _ in range(40):
                torch.save({"loss": 0.5}, io.BytesIO())
    said = kinds(job, heard)
    assert [entry for entry in said if entry[0] == "step"] == [("step", "first"), ("step", "train")]
    assert said.count(("phase", "checkpoint")) == 2 * pauses.TOLD_EACH_STEP, "of many the first are told"


def test_an_evaluation_is_seen_by_the_switch_of_the_model(job: Job, heard: Heard) -> None:
    model, other = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(2, 2)), torch.nn.Dropout()
    job.tap_gradients(model)
    with job.step(0):
        model.train()
    other.eval()
    with job.evaluation():
        model.eval()
        assert not model[0].training
        model.train()
    model.eval()
    with job.step(1):
        model.train()
        assert model[0].training
    said = kinds(job, heard)
    assert said == [
        ("step", "first"),
        ("phase", "eval"),
        ("step", "eval"),
        ("phase", "eval"),
        ("step", "eval"),
        ("step", "train"),
    ]


def test_a_save_within_an_evaluation_leaves_the_evaluation_on(job: Job, heard: Heard) -> None:
    with job.step(0):
        pass
    with job.evaluation(), job.saving():
        pass
    assert kinds(job, heard)[1:] == [("phase", "eval"), ("phase", "checkpoint"), ("phase", "eval"), ("step", "eval")]


def test_a_save_in_another_thread_holds_nothing_up(job: Job, heard: Heard) -> None:
    thread = threading.Thread(target=torch.save, args=({}, io.BytesIO()))
    thread.start()
    thread.join()
    assert kinds(job, heard) == []


def test_one_wrapper_by_whatever_name_and_errors_pass(job: Job, heard: Heard) -> None:
    assert torch.save is torch.serialization.save
    with pytest.raises(ZeroDivisionError), job.saving():
        _ = 1 / 0
    assert kinds(job, heard) == [("phase", "checkpoint"), ("phase", "train")]


def test_libraries_that_are_imported_later(
    job: Job, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, text in {
        "megatron/__init__.py": "",
        "megatron/training/__init__.py": "",
        "megatron/training/checkpointing.py": "def save_checkpoint(step, *rest):\n    return step\n",
        "megatron/training/training.py": "from .checkpointing import save_checkpoint\ndef evaluate_and_print_results():\n    return 7\n",
        "deepspeed/__init__.py": "",
        "deepspeed/runtime/__init__.py": "",
        "deepspeed/runtime/engine.py": "class DeepSpeedEngine:\n    def save_checkpoint(self, path):\n        return path\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    training = importlib.import_module("megatron.training.training")
    engine = importlib.import_module("deepspeed.runtime.engine")
    assert training.__spec__ is not None
    assert "trainwarden" not in type(training.__spec__.loader).__module__, "who asks for the source gets it"
    assert (training.save_checkpoint(3), training.evaluate_and_print_results()) == (3, 7)
    assert engine.DeepSpeedEngine().save_checkpoint("here") == "here"
    for name in [name for name in sys.modules if name.split(".")[0] in ("megatron", "deepspeed")]:
        del sys.modules[name]
    save = [("phase", "checkpoint"), ("phase", "train")]
    assert kinds(job, heard) == [*save, ("phase", "eval"), ("step", "eval"), *save]


def test_it_can_be_switched_off(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(announcing.SWITCH, "0")
    monkeypatch.setenv("TRAINWARDEN_SOCKET", str(heard.path))
    before, plain = list(sys.meta_path), torch.save
    Job(Environment.read()).open()
    assert (sys.meta_path, torch.save) == (before, plain)


def test_what_fails_here_leaves_the_save_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.recorder.pauses, "save_begins", lambda: 1 / 0)
    file = io.BytesIO()
    torch.save({"a": 1}, file)
    assert file.tell() > 0


def begins(phase: str) -> Callable[[Row], bool]:
    return lambda row: (row["t"], row["rank"], row.get("phase")) == ("phase", 0, phase)


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_a_real_job_tells_of_its_first_evaluation_and_its_first_save(heard: Heard, tmp_path: Path) -> None:
    port = free_port()
    shared = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "TRAINWARDEN_SOCKET": str(heard.path), "TRAINWARDEN_JOB": f"j{os.getpid()}", "TRAINWARDEN_NODE": "n0",
        "TRAINWARDEN_GENERATION": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, str(JOB), str(tmp_path)]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    try:
        began = time.monotonic()
        for phase, name in (("eval", "evaluation"), ("checkpoint", "save")):
            heard.until(begins(phase))
            (tmp_path / name).touch()
        row = heard.until(lambda row: (row["t"], row["rank"], row.get("step")) == ("step", 0, 3))
        heard.until(lambda row: row["t"] == "bye")
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    told = [(one["phase"], one["step"]) for one in heard.rows if one["t"] == "phase"]
    assert told == [("eval", 1), ("checkpoint", 2), ("train", 2)], "of the rank that does it, each once"
    assert row["data_ms"] <= row["duration_ms"] <= 1000 * (time.monotonic() - began)
    [evaluated] = [one for one in heard.rows if one["t"] == "step" and one["phase"] == "eval"]
    assert (evaluated["rank"], evaluated["step"]) == (0, 1)
