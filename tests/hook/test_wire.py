"""Datagrams: golden bytes, numbers that JSON has not, drops that are counted and told."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainwarden_hook.environment import Environment
from trainwarden_hook.steps import StepRecorder
from trainwarden_hook.wire import Sender, encode

GOLDEN = {
    "hello": (
        {"job": "j", "generation": 1, "node": "n0", "rank": 0, "world": 4, "pid": 123, "local_rank": 0, "at_ns": 5},
        b'{"v":1,"t":"hello","job":"j","generation":1,"node":"n0","rank":0,"world":4,"pid":123,"local_rank":0,"at_ns":5}',
    ),
    "exit": (
        {"job": "j", "generation": 2, "node": "n0", "rank": 3, "pid": 9, "exit_code": -9, "at_ns": 7},
        b'{"v":1,"t":"exit","job":"j","generation":2,"node":"n0","rank":3,"pid":9,"exit_code":-9,"at_ns":7}',
    ),
    "save": (
        {
            "job": "j",
            "step": 40,
            "bytes": 10,
            "stall_ms": 1.25,
            "persist_ms": None,
            "where": "memory",
            "ok": False,
            "error": "no",
        },
        b'{"v":1,"t":"save","job":"j","step":40,"bytes":10,"stall_ms":1.25,"where":"memory","ok":false,"error":"no"}',
    ),
    "restore": (
        {"job": "j", "step": 500, "from": "memory", "ok": True},
        b'{"v":1,"t":"restore","job":"j","step":500,"from":"memory","ok":true}',
    ),
    "bye": ({"job": "j", "rank": 1, "reason": "finished"}, b'{"v":1,"t":"bye","job":"j","rank":1,"reason":"finished"}'),
}


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "collector.sock"))
        receiver.settimeout(5)
        yield receiver


def environment(path: str | None) -> Environment:
    return Environment("j", "n0", 1, 0, 0, 4, path, None, None, None, 60.0)


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_bytes(kind: str) -> None:
    fields, expected = GOLDEN[kind]
    assert encode(kind, fields) == expected


@pytest.mark.parametrize(("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_numbers_that_json_has_not_go_as_text(value: float, text: str) -> None:
    assert json.loads(encode("step", {"loss": value}))["loss"] == text


class Times:
    """A recorder whose clock readings are set by hand."""

    def __init__(self, collector: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        monkeypatch.setattr("trainwarden_hook.steps.now_ns", lambda: self.now_ns)
        monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000_000 + self.now_ns)
        monkeypatch.setattr(time, "process_time_ns", lambda: self.now_ns // 2)
        self.sender = Sender(str(collector.getsockname()))
        self.recorder = StepRecorder(self.sender, environment(None), None)

    def step(self, number: int, **loss: Any) -> None:
        self.recorder.begin(number, 0, self.now_ns)
        for index, length_ms in enumerate((1, 20, 25, 4)):
            with self.recorder.phases[index]:
                self.now_ns += length_ms * 1_000_000
        self.recorder.report(loss.get("loss"), 64)
        self.recorder.end()


def test_golden_step(collector: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(collector, monkeypatch)
    monkeypatch.setattr(times.recorder, "_head", '{"v":1,"t":"step","job":"j","pid":123')
    times.step(16, loss=0.75)
    times.step(17, loss=0.5)
    collector.recv(65536)
    assert collector.recv(65536) == (
        b'{"v":1,"t":"step","job":"j","pid":123,"step":17,"phase":"train","start_ns":1000050000000,"duration_ms":50.000,'
        b'"data_ms":1.000,"forward_ms":20.000,"backward_ms":25.000,"optimizer_ms":4.000,"cpu_ms":25.000,"hook_us":0.0,'
        b'"samples":64,"loss":0.5}'
    )


def test_step_by_hand_is_what_the_general_encoder_writes(
    collector: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Times(collector, monkeypatch)
    times.step(3, loss=math.nan)
    row = json.loads(collector.recv(65536))
    assert row == json.loads(encode("step", {key: value for key, value in row.items() if key not in {"v", "t"}}))
    assert (row["phase"], row["loss"], row["step"]) == ("first", "nan", 3)


def test_unmarked_gap_between_steps_is_data(collector: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(collector, monkeypatch)
    times.step(0)
    times.now_ns += 30_000_000
    times.recorder.begin(1, 0, times.now_ns)
    times.now_ns += 10_000_000
    times.recorder.end()
    collector.recv(65536)
    row = json.loads(collector.recv(65536))
    assert (row["duration_ms"], row["data_ms"]) == (40.0, 30.0)


def test_an_evaluation_between_steps_is_no_data(collector: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(collector, monkeypatch)
    times.step(0)
    times.recorder.send_phase("eval")
    times.now_ns += 9_000_000_000
    times.recorder.send_evaluation(1_000_000_000_000, 9_000_000_000)
    times.recorder.forget_gap()
    times.step(1)
    rows = [json.loads(collector.recv(65536)) for _ in range(4)]
    assert [row["t"] for row in rows] == ["step", "phase", "step", "step"]
    assert (rows[2]["phase"], rows[2]["duration_ms"], rows[3]["duration_ms"]) == ("eval", 9000.0, 50.0)


def test_a_full_collector_never_blocks_and_drops_are_told(collector: socket.socket) -> None:
    sender = Sender(str(collector.getsockname()))
    while sender.send("step", {"step": sender.sent}):
        pass
    assert sender.dropped == 1
    sender.send("step", {"step": -1})
    while True:
        collector.settimeout(0.05)
        try:
            collector.recv(65536)
        except TimeoutError:
            break
    assert sender.send("step", {"step": 7})
    assert json.loads(collector.recv(65536)) == {"v": 1, "t": "step", "step": 7, "dropped": 2}
    sender.send("step", {"step": 8})
    assert "dropped" not in json.loads(collector.recv(65536))


def test_a_missing_collector_is_a_drop_and_no_error(tmp_path: Path) -> None:
    sender = Sender(str(tmp_path / "nobody.sock"))
    assert not sender.send("hello", {})
    assert sender.dropped == 1


def test_without_a_socket_the_hook_is_silent() -> None:
    sender = Sender(None)
    assert sender.silent
    assert not sender.send("hello", {})
    assert sender.dropped == 0


def test_a_path_longer_than_a_unix_address(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 90) / ("y" * 90)
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        short = tmp_path / "s"
        short.symlink_to(folder)
        receiver.bind(str(short / "c.sock"))
        receiver.settimeout(5)
        assert Sender(str(folder / "c.sock")).send("hello", {"rank": 1})
        assert json.loads(receiver.recv(1000))["rank"] == 1
