"""Stacks on demand: recorded flight records, RAS, py-spy, the kernel's word, requests."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.logs import flight, ras
from collectors.logs.threads import Alike, Place, ThreadError, alike, from_kernel, from_py_spy, with_kernel_state
from collectors.logs.unpickle import PickleError
from collectors.sources.stacks import Findings, StacksSource, together
from tests.collectors.kit import FIXTURES, Bench, bench
from trainwarden.records import LogEvent

RECORDED = FIXTURES / "stacks"


def entry(
    group: str, sequence: int, name: str = "nccl:all_reduce", state: str = "started", **more: object
) -> dict[str, object]:
    return {
        "process_group": (group, "desc"),
        "collective_seq_id": sequence,
        "profiling_name": name,
        "state": state,
        "is_p2p": False,
        **more,
    }


def record(rank: int, *entries: object, members: str = "[0, 1, 2, 3]") -> flight.Record:
    content = {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "d", "ranks": members}},
        "entries": list(entries),
    }
    return flight.read(pickle.dumps(content, protocol=2), rank)


def test_a_recorded_hang_names_who_waits_and_who_did_not_come() -> None:
    records = [flight.read((RECORDED / f"nccl_trace_rank_{rank}").read_bytes(), rank) for rank in range(3)]
    [stall] = flight.stalls(records)
    assert (stall.name, stall.sequence, stall.waiting, stall.missing, stall.silent) == (
        "all_reduce",
        4,
        (0, 1),
        (2,),
        (),
    )
    assert stall.frame == "/srv/j1/train.py:11 in <module>"
    assert stall.text() == "all_reduce number 4 of group 0: ranks 0-1 wait, ranks 2 did not come"


def test_a_rank_without_a_record_and_one_that_does_something_else() -> None:
    done = [entry("0", 1, state="completed"), entry("0", 2, retired=True)]
    records = [
        record(0, *done, entry("0", 3)),
        record(1, *done, entry("0", 3)),
        record(2, *done, entry("0", 3, "nccl:broadcast")),
    ]
    [stall] = flight.stalls(records)
    assert (stall.waiting, stall.missing, stall.silent, stall.others) == ((0, 1), (), (3,), ((2, "broadcast"),))
    assert "rank 2 launched broadcast instead" in stall.text()


def test_nobody_waits_and_transfers_between_two_are_left_out() -> None:
    assert flight.stalls([record(0, entry("0", 1, state="completed"), entry("0", 2, is_p2p=True))]) == []


@pytest.mark.parametrize("content", [[], {"entries": 3}, {"no": 1}])
def test_what_is_no_flight_record(content: object) -> None:
    with pytest.raises(PickleError, match="no flight record"):
        flight.read(pickle.dumps(content), 0)


KEYS = st.sampled_from(
    ["frames", "process_group", "collective_seq_id", "state", "pg_id", "ranks", "filename", "retired"]
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=15,
)


@settings(max_examples=40, deadline=None)
@given(entries=st.lists(ANY, max_size=4), config=ANY)
def test_odd_records_never_raise_anything_else(entries: list[object], config: object) -> None:
    try:
        read = flight.read(pickle.dumps({"entries": entries, "pg_config": config}, protocol=4), 0)
    except PickleError:
        return
    flight.stalls([read])


def test_ras_names_ranks_that_are_behind_and_processes_that_are_gone() -> None:
    many = ras.parse((RECORDED / "ras_behind.txt").read_text())
    assert (many.version, many.behind) == ("2.24.3", (ras.Behind("#0-0", (3, 7), 6649, 6650),))
    one = ras.parse((RECORDED / "ras_one.txt").read_text())
    assert one.behind == (ras.Behind("#0-0", (7,), 60, 64),)
    dead = ras.parse((RECORDED / "ras_dead.txt").read_text())
    assert dead.dead == ("Process 3487984 on node 172.16.64.213 managing GPU 5",)
    assert "does not answer" in dead.text()


@given(text=st.text(max_size=300))
def test_no_answer_raises(text: str) -> None:
    ras.parse(text)


def test_py_spy_puts_the_main_thread_first() -> None:
    places = from_py_spy((RECORDED / "py_spy.json").read_bytes())
    assert [place.name for place in places] == ["MainThread", "pin_memory"]
    assert places[0].frames == ("all_reduce (distributed_c10d.py:2806)", "train (train.py:40)")
    assert places[0].collective == "all_reduce (distributed_c10d.py:2806)"
    with pytest.raises(ThreadError, match="something else"):
        from_py_spy(b"Process 4711: python")


def task(board: Bench, pid: int, thread: int, **files: str) -> None:
    for name, content in files.items():
        board.write(f"/proc/{pid}/task/{thread}/{name}", content)


def test_the_kernels_word_on_each_thread(tmp_path: Path) -> None:
    board = bench(tmp_path)
    task(board, 7, 7, status="Name:\tpython\nState:\tD (disk sleep)\n", syscall="202 0x7f\n", wchan="futex_wait",
         stack="[<0>] rpc_wait_bit_killable+0x1e/0xb0 [sunrpc]\n[<0>] nfs4_wait+0x4\n")  # fmt: skip
    task(board, 7, 9, status="Name:\tpt_main\nState:\tS (sleeping)\n", wchan="0", syscall="running\n")
    task(board, 7, 11, status="")
    first, second = from_kernel(7, str(board.root))
    assert (first.name, first.state, first.frames) == (
        "python",
        "D",
        ("rpc_wait_bit_killable", "nfs4_wait", "syscall_202"),
    )
    assert (second.state, second.frames) == ("S", ("running",))
    with pytest.raises(ThreadError, match="threads of process 8"):
        from_kernel(8, str(board.root))


def test_equal_stacks_are_one_group_and_the_odd_one_is_last() -> None:
    waits = from_py_spy((RECORDED / "py_spy.json").read_bytes())
    elsewhere = from_py_spy(
        b'[{"thread_id": 1, "thread_name": "MainThread", "frames": [{"name": "read", "filename": "data.py", "line": 3}]}]'
    )
    groups = alike({0: waits, 1: waits, 2: elsewhere})
    assert [(group.ranks, bool(group.collective)) for group in groups] == [((0, 1), True), ((2,), False)]


# --- the source -------------------------------------------------------------------------------------------------------------


class Listening:
    """A RAS service that gives one answer."""

    def __init__(self, answer: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.asked = b""
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            self.asked = connection.recv(100)
            connection.sendall(self._answer)

    def close(self) -> None:
        self._thread.join(30)
        self._socket.close()


def built(tmp_path: Path, **given: Any) -> tuple[Bench, StacksSource]:
    board = bench(tmp_path)
    defaults = {"ras_address": "", "flight_prefix": str(tmp_path / "nccl_trace_rank_"), "py_spy": ""}
    source = board.build(StacksSource, **{**defaults, **given})
    assert isinstance(source, StacksSource)
    return board, source


def asked(board: Bench, source: StacksSource, reason: str = "hang suspected") -> LogEvent:
    heard = threading.Event()
    board.outlet.heard = heard.set
    assert source.request(reason)
    assert heard.wait(60)
    source.close()
    [(event, urgent)] = board.outlet.logs
    assert urgent
    return event


def place_dumps(tmp_path: Path, board: Bench) -> None:
    for rank in range(3):
        path = tmp_path / f"nccl_trace_rank_{rank}"
        shutil.copy(RECORDED / path.name, path)
        os.utime(path, (board.clock.now_ns() / 1e9, board.clock.now_ns() / 1e9))


def test_one_event_with_everything(tmp_path: Path) -> None:
    service = Listening((RECORDED / "ras_behind.txt").read_bytes())
    spy = tmp_path / "py-spy"
    spy.write_text(f"#!/bin/sh\ncat {RECORDED}/py_spy.json\n")
    spy.chmod(spy.stat().st_mode | stat.S_IXUSR)
    board, source = built(tmp_path, ras_address=service.address, py_spy=str(spy))
    place_dumps(tmp_path, board)
    (tmp_path / "nccl_trace_rank_9").write_bytes(pickle.dumps({"entries": [Path("/x")]}))
    os.utime(tmp_path / "nccl_trace_rank_9", (board.clock.now_ns() / 1e9,) * 2)
    board.context.ranks.seen("j", 2, 0, pid=4711)
    event = asked(board, source)
    service.close()
    assert service.asked == b"verbose status\n"
    assert (event.code, event.severity, event.job, event.attempt) == ("stacks", "info", "j", 2)
    assert event.line == "all_reduce number 4 of group 0: ranks 0-1 wait, ranks 2 did not come"
    assert (
        event.attributes["waiting_ranks"],
        event.attributes["missing_ranks"],
        event.attributes["flight_records"],
    ) == ("0-1", "2", "3")
    assert "ranks 3,7 launched 6649" in event.attributes["ras"]
    assert event.attributes["stacks"].startswith("ranks 0 [active]: all_reduce")
    assert "flight record of rank 9: opcode" in event.attributes["problems"]
    assert event.attributes["reason"] == "hang suspected"


def test_old_records_links_and_pipes_are_left_alone(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    place_dumps(tmp_path, board)
    os.utime(tmp_path / "nccl_trace_rank_0", (0, 0))
    (tmp_path / "nccl_trace_rank_1").unlink()
    (tmp_path / "nccl_trace_rank_1").symlink_to("/etc/passwd")
    (tmp_path / "nccl_trace_rank_2").unlink()
    os.mkfifo(tmp_path / "nccl_trace_rank_2")
    assert source.collect().dumps == 0


def test_py_spy_that_fails_leaves_the_kernels_word(tmp_path: Path) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\necho 'Permission Denied: try sudo' >&2\nexit 1\n")
    spy.chmod(spy.stat().st_mode | stat.S_IXUSR)
    board, source = built(tmp_path, py_spy=str(spy))
    board.context.ranks.seen("j", 0, 3, pid=7)
    task(board, 7, 7, status="Name:\tpython\nState:\tD (disk sleep)\n", wchan="rpc_wait_bit_killable")
    event = asked(board, source)
    assert "Permission Denied" in event.attributes["problems"]
    assert event.attributes["stacks"] == "ranks 3 [D]: rpc_wait_bit_killable"


def test_a_live_process_that_sleeps(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(300)"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        places = from_kernel(child.pid)
    finally:
        child.kill()
        child.wait()
    assert places[0].thread == child.pid
    assert places[0].name.startswith("python")
    assert places[0].state in ("S", "R")


def test_a_file_asks_once_and_requests_have_a_distance(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    request = tmp_path / "stacks.n0.request"
    request.write_text("watchdog on rank 5, token=abc\n")
    heard = threading.Event()
    board.outlet.heard = heard.set
    assert board.second(source).gaps == ()
    assert heard.wait(60)
    assert not request.exists()
    [(event, _)] = board.outlet.logs
    assert event.attributes["reason"] == "watchdog on rank 5, token=***"
    assert event.line == "nothing could be read: no ranks are known on this node"
    source.close()
    assert not source.request("again")
    board.clock.sleep(61)
    assert source.request("much later")
    source.close()


def test_everything_is_bounded(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    for rank in range(300):
        board.context.ranks.seen("j", 0, rank, pid=1000 + rank)
        task(board, 1000 + rank, 1000 + rank, status="Name:\tpython\nState:\tS (x)\n", wchan=f"wait_{rank}" + "x" * 200)
    event = asked(board, source)
    assert sum(len(text) for text in event.attributes.values()) < 20_000
    assert len(event.line) <= 500


def test_no_request_no_cost(tmp_path: Path) -> None:
    board, source = built(tmp_path)
    before = threading.active_count()
    for _ in range(5):
        board.second(source)
    assert threading.active_count() == before
    assert board.outlet.logs == []


def group(ranks: tuple[int, ...], state: str, *frames: str) -> Alike:
    return Alike(ranks, frames, state, next((frame for frame in frames if "all_reduce" in frame), ""))


def test_a_stopped_rank_is_named_before_those_that_wait_for_it() -> None:
    wait = group((0, 1), "idle", "all_reduce (train.py:5)")
    stopped = group((2,), "T", "wait (threading.py:327)", "loader (data.py:3)")
    sentence = Findings(groups=[wait, stopped]).sentence()
    assert sentence.startswith("ranks 2 are stopped")
    assert "at loader (data.py:3)" in sentence  # not where the library waits
    everybody = Findings(groups=[group((0, 1), "T", "all_reduce (train.py:5)")]).sentence()
    assert everybody == "ranks 0-1 are at all_reduce (train.py:5)"


def test_the_same_problem_of_several_ranks_is_said_once() -> None:
    assert together(["rank 0: no", "RAS at x: y", "rank 2: no", "rank 1: other"]) == [
        "RAS at x: y",
        "ranks 0,2: no",
        "rank 1: other",
    ]


def test_the_kernel_knows_that_a_process_is_stopped(tmp_path: Path) -> None:
    places = [Place(7, "MainThread", "idle", ("f (a.py:1)",)), Place(8, "x", "idle", ())]
    status = tmp_path / "proc/7/task/7/status"
    status.parent.mkdir(parents=True)
    for word, state in (("T (stopped)", "T"), ("D (disk sleep)", "D"), ("S (sleeping)", "idle")):
        status.write_text(f"Name:\tpython\nUmask:\t0022\nState:\t{word}\nTgid:\t7\n")
        assert [place.state for place in with_kernel_state(places, 7, str(tmp_path))] == [state, "idle"]
    assert with_kernel_state([], 7, str(tmp_path)) == []
    assert with_kernel_state(places, 9, str(tmp_path)) == places
