"""The hook's datagrams: golden bytes, garbage, exits, generations, pids of another namespace."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectors.sources import steps
from collectors.sources.steps import StepsSource, WireError, parse
from tests.collectors.kit import Bench, bench
from trainwarden.errors import UsageError

STEP = (
    b'{"v":1,"t":"step","job":"j","generation":1,"node":"n0","rank":0,"world":4,"pid":123,"step":17,"phase":"train","start_ns":1700000000000000000,'
    b'"duration_ms":60.5,"data_ms":1.5,"forward_ms":20.0,"backward_ms":30.0,"wait_ms":5.0,"optimizer_ms":4.0,"checkpoint_ms":0.0,'
    b'"arrived_ns":1700000000051500000,"cpu_ms":58.0,"loss":2.25,"grad_norm_local":0.5,"grad_norm":0.25,"samples":64,"hook_us":55.0}'
)


def built(tmp_path: Path) -> tuple[Bench, StepsSource]:
    board = bench(tmp_path)
    source = board.build(StepsSource, socket=str(tmp_path / "run" / "hook.sock"))
    assert isinstance(source, StepsSource)
    return board, source


def datagram(kind: str, **fields: Any) -> bytes:
    return json.dumps({"v": 1, "t": kind, "job": "j", "generation": 1, "node": "n0", "rank": 2, **fields}).encode()


def test_golden_step(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    source.handle(STEP)
    [(job, attempt, rank, world, row)] = board.outlet.steps
    assert (job, attempt, rank, world) == ("j", 1, 0, 4)
    assert (row.step, row.phase, row.started_at_ns, row.arrived_at_ns) == (
        17,
        "train",
        1700000000000000000,
        1700000000051500000,
    )
    assert (row.duration_ms, row.data_ms, row.forward_ms, row.backward_ms, row.wait_ms) == (60.5, 1.5, 20, 30, 5)
    assert (row.optimizer_ms, row.checkpoint_ms, row.cpu_ms, row.loss, row.grad_norm_local, row.grad_norm) == (
        4,
        0,
        58,
        2.25,
        0.5,
        0.25,
    )
    assert (row.samples, row.finite) == (64, True)
    assert math.isnan(row.param_checksum)
    [state] = board.context.ranks.all()
    assert (state.pid, state.last_step, state.phase, state.world) == (123, 17, "train", 4)
    assert board.outlet.layout_changes == 1


@pytest.mark.parametrize("said", [{"loss": "nan"}, {"grad_norm": "inf"}, {"grad_norm_local": "-inf"}])
def test_numbers_that_json_cannot_say(tmp_path: Path, said: dict[str, str]) -> None:
    board, source = built(tmp_path)
    source.handle(datagram("step", step=1, duration_ms=1.0, **said))
    row = board.outlet.steps[0][4]
    assert not row.finite
    value = getattr(row, next(iter(said)))
    assert not math.isfinite(value)


def test_an_absent_loss_is_not_a_bad_one(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    source.handle(datagram("step", step=1, duration_ms=1.0))
    row = board.outlet.steps[0][4]
    assert row.finite
    assert math.isnan(row.loss)


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (b"", "not a hook datagram"),
        (b"\xff\xfe\x00", "not a hook datagram"),
        (b"[]", "not a hook datagram"),
        (b"{" * 5000, "not a hook datagram"),
        (b'{"v":2,"t":"step","job":"j","generation":1,"rank":0}', "version 2, this collector reads 1"),
        (b'{"v":1,"t":"dance","job":"j","generation":1,"rank":0}', "of kind 'dance', expected one of hello"),
        (b'{"v":1,"t":"step","job":"","generation":1,"rank":0}', "length >= 1 - at `$.job`"),
        (b'{"v":1,"t":"step","job":"j","generation":1,"rank":-1}', ">= 0 - at `$.rank`"),
        (b'{"v":1,"t":"step","job":"j","generation":1,"rank":0}', "without the number of the step"),
        (b'{"v":1,"t":"step","job":"j","generation":1,"rank":"0"}', "Expected `int`"),
        (b'{"v":1,"t":"step","job":"j","generation":1}', "missing required field `rank`"),
    ],
)
def test_garbage_is_counted_and_becomes_a_dead_letter(tmp_path: Path, payload: bytes, sentence: str) -> None:
    board, source = built(tmp_path)
    source.handle(payload)
    [(origin, reason, kept)] = board.outlet.letters
    assert (origin, kept) == ("hook", payload)
    assert sentence in reason
    assert board.context.metrics.value("tw_bad_datagrams_total") == 1
    source.handle(STEP)
    assert len(board.outlet.steps) == 1


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode) | st.recursive(
    st.none() | st.floats() | st.text(max_size=5), lambda inner: st.dictionaries(st.sampled_from(list(
        json.loads(STEP))), inner, max_size=6), max_leaves=8).map(lambda v: json.dumps(v).encode()))  # fmt: skip
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    try:
        parse(payload)
    except WireError:
        pass


def test_keys_of_a_newer_hook_are_ignored() -> None:
    assert parse(datagram("hello", new_key={"a": [1]}, pid=5)).pid == 5


@pytest.mark.parametrize(("code", "severity"), [(-9, "critical"), (1, "critical"), (0, "info")])
def test_an_exit_is_published_at_once(tmp_path: Path, code: int, severity: str) -> None:
    board, source = built(tmp_path)
    source.handle(datagram("hello", pid=7, world=4, local_rank=0))
    source.handle(datagram("exit", pid=7, exit_code=code, at_ns=5))
    [(event, urgent)] = board.outlet.logs
    assert urgent
    assert (event.code, event.severity, event.job, event.attempt, event.rank) == (
        f"worker_exit:{code}",
        severity,
        "j",
        1,
        2,
    )
    assert event.attributes == {"rank": "2", "pid": "7", "exit_code": str(code), "generation": "1", "at_ns": "5"}
    assert len(board.context.ranks.all()) == (0 if code == 0 else 1)


def test_an_exit_of_an_older_generation_leaves_the_newer_one_alone(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    source.handle(datagram("hello", pid=7, generation=2))
    source.handle(datagram("exit", pid=6, exit_code=-15))
    assert [(s.pid, s.ended_monotonic_ns) for s in board.context.ranks.all()] == [(7, 0)]
    assert board.outlet.codes == ["worker_exit:-15"]


def test_a_new_generation_replaces_the_old_layout(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    for rank in (2, 3):
        source.handle(datagram("hello", rank=rank, pid=10 + rank, world=4))
    source.handle(datagram("hello", rank=1, generation=2, pid=20, world=3))
    source.handle(datagram("step", rank=2, generation=1, step=99))  # a straggling word of the old one
    assert [(s.generation, s.rank, s.pid) for s in board.context.ranks.layouts()["j"]] == [(2, 1, 20)]


def test_saves_and_goodbyes(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    source.handle(datagram("save", step=500, bytes=1024, stall_ms=12.5, persist_ms=80.0, where="disk", ok=True))
    source.handle(datagram("save", step=501, where="disk", ok=False, error="No space left on device"))
    source.handle(datagram("restore", step=500, **{"from": "memory"}, ok=True))
    source.handle(datagram("hello", pid=1))
    source.handle(datagram("bye", reason="finished"))
    assert board.outlet.codes == ["save_ok", "save_failed", "restored", "hook_bye"]
    assert [urgent for _, urgent in board.outlet.logs] == [False, True, False, False]
    saved, failed, restored = (event.attributes for event, _ in board.outlet.logs[:3])
    assert (saved["step"], saved["bytes"], saved["stall_ms"], saved["where"]) == ("500", "1024", "12.5", "disk")
    assert failed["error"] == "No space left on device"
    assert restored["where"] == "memory"
    assert board.context.ranks.all()[0].leaving


def test_the_hook_says_what_it_dropped(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    source.handle(datagram("step", step=1, dropped=7))
    assert board.context.metrics.value("tw_hook_dropped_total") == 7


def test_a_pid_of_another_namespace_is_translated(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    board.write("/proc/4242/status", "Name:\tpython\nNSpid:\t4242\t17\n")
    source.handle(datagram("hello", pid=17), sender_pid=4242)
    assert board.context.ranks.all()[0].pid == 4242
    # a helper that speaks for somebody else is believed
    source.handle(datagram("hello", rank=3, pid=99), sender_pid=4242)
    assert board.context.ranks.all()[1].pid == 99


def test_the_real_socket(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    came = threading.Semaphore(0)
    board.outlet.heard = came.release
    source.start()
    path = str(tmp_path / "run" / "hook.sock")
    assert os.stat(path).st_mode & 0o777 == 0o666
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hook:
        for step in range(50):
            hook.sendto(datagram("step", step=step, pid=os.getpid()), path)
        hook.sendto(b"junk", path)
    for _ in range(51):
        assert came.acquire(timeout=60)
    assert [row.step for *_, row in board.outlet.steps] == list(range(50))
    assert board.context.ranks.all()[0].pid == os.getpid()
    assert source.sample(0).gaps == ()
    source.close()
    assert not os.path.exists(path)


def test_a_socket_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    came = threading.Event()
    board.outlet.heard = came.set
    source.start()
    path = tmp_path / "run" / "hook.sock"
    path.unlink()
    source.sample(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hook:
        hook.sendto(STEP, str(path))
    assert came.wait(60)
    source.close()


def test_a_dead_socket_is_replaced_and_a_living_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "hook.sock"
    steps.bind(path, 65536).close()
    with steps.bind(path, 65536), pytest.raises(UsageError, match="belongs to a running collector"):
        steps.bind(path, 65536)


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "hook.sock"
    path.write_text("precious")
    with pytest.raises(UsageError, match="is no socket"):
        steps.bind(path, 65536)
    assert path.read_text() == "precious"


def test_a_path_longer_than_a_unix_address(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with steps.bind(deep / "hook.sock", 65536):
        assert (deep / "hook.sock").exists()


def test_an_evaluation_that_begins_is_known_and_no_dead_letter(tmp_path: Path) -> None:
    """The hook says so because it is silent while the job evaluates; the step row with phase eval ends it."""
    board, source = built(tmp_path)
    source.handle(STEP)
    source.handle(datagram("phase", rank=0, world=4, pid=123, step=18, phase="eval", at_ns=1))
    [state] = board.context.ranks.layouts()["j"]
    assert (state.phase, state.last_step) == ("eval", 17)
    assert not board.outlet.letters


def test_a_save_that_begins_is_known_until_it_ends(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    begins, ends = (datagram("phase", rank=0, phase=phase, step=17) for phase in ("checkpoint", "train"))
    phases = []
    for said in (STEP, begins, ends, begins, STEP.replace(b'"phase":"train"', b'"phase":"checkpoint"')):
        source.handle(said)
        phases.append(board.context.ranks.layouts()["j"][0].phase)
    assert phases == ["train", "checkpoint", "train", "checkpoint", "train"], "a step that held a save is over"


def test_a_refused_save_is_no_failed_one(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    for error in ("the loss of step 179 is not finite", "No space left on device"):
        source.handle(datagram("save", rank=0, step=180, where="memory", ok=False, error=error))
    assert board.outlet.codes == ["save_refused", "save_failed"]


@pytest.mark.parametrize(
    "said",
    [
        {"step": 2**64},
        {"step": -1},
        {"step": 1, "start_ns": -(2**70)},
        {"step": 1, "arrived_ns": 10**400},
        {"step": 1, "samples": 2**63},
        {"step": 1, "world": -3},
        {"step": 1, "pid": 2**40},
    ],
)
def test_numbers_that_no_record_holds_are_dead_letters_and_harm_nobody(tmp_path: Path, said: dict[str, int]) -> None:
    """One of them in a report would lose the whole report, and all reports that leave with it."""
    board, source = built(tmp_path)
    source.handle(datagram("step", duration_ms=1.0, **said))
    source.handle(datagram("step", step=2, duration_ms=1.0))
    assert [row.step for *_, row in board.outlet.steps] == [2]
    assert len(board.outlet.letters) == 1
    for *_, row in board.outlet.steps:
        msgspec.msgpack.encode(row)
