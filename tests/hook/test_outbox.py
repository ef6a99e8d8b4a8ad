"""The outbox: order kept, nothing lost at the end, nothing sent twice by a fork, nothing waited for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainwarden_hook.outbox import MAX_PENDING, MAX_QUEUED, Outbox
from trainwarden_hook.rows import Row
from trainwarden_hook.scalars import DeviceScalar
from trainwarden_hook.wire import Sender, encode


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "collector.sock"))
        receiver.settimeout(10)
        yield receiver


@pytest.fixture
def outbox(collector: socket.socket) -> Outbox:
    return Outbox(Sender(str(collector.getsockname())))


def take(collector: socket.socket) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(collector.recv(65536))
    return row


def a_row(step: int, loss: Any = None) -> Row:
    return Row('{"t":"step"', step, False, 0, 1, 9, 9, 0, 0, 0, 0, [0, 0, 0, 0], 5, 1, loss=loss)


def late(arrived: list[bool]) -> DeviceScalar:
    return DeviceScalar(torch.tensor(0.25), lambda: arrived[0], lambda: None)


def test_order_is_kept_across_kinds(outbox: Outbox, collector: socket.socket) -> None:
    outbox.put(a_row(1))
    outbox.send("save", {"step": 2})
    outbox.put(a_row(2))
    assert [(row["t"], row["step"]) for row in (take(collector) for _ in range(3))] == [
        ("step", 1),
        ("save", 2),
        ("step", 2),
    ]


def test_what_comes_after_a_late_number_waits_for_it(outbox: Outbox, collector: socket.socket) -> None:
    arrived = [False]
    outbox.put(a_row(1, late(arrived)))
    outbox.send("save", {"step": 1})
    collector.setblocking(False)
    with pytest.raises(BlockingIOError):
        collector.recv(100)
    collector.settimeout(10)
    arrived[0] = True
    assert take(collector)["loss"] == 0.25
    assert take(collector)["t"] == "save"


def test_too_many_late_numbers_go_without(outbox: Outbox, collector: socket.socket) -> None:
    for step in range(MAX_PENDING + 2):
        outbox.put(a_row(step, late([False])))
    rows = [take(collector) for _ in range(2)]
    assert [(row["step"], "loss" in row) for row in rows] == [(0, False), (1, False)]


def test_flush_sends_the_rest_incomplete(outbox: Outbox, collector: socket.socket) -> None:
    outbox.put(a_row(7, late([False])))
    assert outbox.flush()
    assert take(collector)["step"] == 7


def test_flush_of_an_outbox_never_used_is_at_once(outbox: Outbox) -> None:
    assert outbox.flush()


def test_a_sender_without_a_collector_makes_it_silent() -> None:
    silent = Outbox(Sender(None))
    silent.put(a_row(1))
    silent.send("save", {"step": 1})
    assert silent.flush()


def test_a_forked_child_sends_only_its_own(outbox: Outbox, collector: socket.socket) -> None:
    arrived = [False]
    outbox.put(a_row(1, late(arrived)))
    child = os.fork()
    if child == 0:
        outbox.send("hello", {"step": 2})
        sent = outbox.flush()
        os._exit(0 if sent else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert take(collector)["t"] == "hello"
    arrived[0] = True
    assert take(collector)["step"] == 1


def test_the_last_steps_of_a_script_that_just_ends_arrive(collector: socket.socket) -> None:
    script = (
        "import trainwarden_hook as tw\n"
        "for number in range(3):\n"
        "    with tw.step(number) as s: s.report(loss=1.0)\n"
        "raise RuntimeError('the script fails')\n"
    )
    environment = {**os.environ, "TRAINWARDEN_SOCKET": str(collector.getsockname()), "TRAINWARDEN_JOB": "ends"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "the script fails" in run.stderr
    rows = [take(collector) for _ in range(4)]
    assert [row["step"] for row in rows if row["t"] == "step"] == [0, 1, 2]


def test_a_body_that_cannot_be_made_is_left_out(outbox: Outbox, collector: socket.socket) -> None:
    broken = a_row(1)
    broken.parts = []
    outbox.put(broken)
    outbox.put(encode("save", {"step": 1}))
    assert take(collector)["t"] == "save"


def test_a_device_that_fails_costs_its_numbers_and_not_the_outbox(outbox: Outbox, collector: socket.socket) -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    outbox.put(a_row(1, DeviceScalar(torch.tensor(0.5), fail, lambda: None)))
    outbox.put(a_row(2, 0.25))
    assert outbox.flush()
    first, second = take(collector), take(collector)
    assert (first["step"], "loss" in first) == (1, False), "the step itself is what a dying rank has to tell"
    assert (second["step"], second["loss"]) == (2, 0.25)


def test_a_thread_that_cannot_be_started_is_started_later(
    outbox: Outbox, collector: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        outbox.put(a_row(1))
    outbox.put(a_row(2))
    assert outbox.flush()
    row = take(collector)
    assert (row["step"], row["dropped"]) == (2, 1)


def test_a_thread_that_falls_behind_costs_rows_and_no_memory(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, go_on = threading.Event(), threading.Event()
    told: list[int] = []

    def stand_still(body: bytes) -> bool:
        busy.set()
        return go_on.wait(60)

    monkeypatch.setattr(outbox._sender, "send_body", stand_still)
    monkeypatch.setattr(outbox._sender, "note_dropped", told.append)
    outbox.send("save", {"step": 0})
    assert busy.wait(60)
    for step in range(MAX_QUEUED + 5):
        outbox.put(a_row(step))
    assert outbox._queue.qsize() == MAX_QUEUED
    go_on.set()
    assert outbox.flush(10)
    assert sum(told) == 5
