"""Failures of many lines: one event each, ranks apart."""

from __future__ import annotations

from pathlib import Path

from collectors import patterns
from collectors.logs.desk import Channel, Desk, refused
from collectors.logs.folding import Folder
from tests.collectors.kit import Bench, bench
from trainwarden.records import LogEvent

PLAIN = """step 1
Traceback (most recent call last):
  File "/srv/train.py", line 10, in main
    run()
  File "/srv/loop.py", line 22, in run
    loss.backward()
RuntimeError: shape mismatch
step 2
"""
CHAINED = """Traceback (most recent call last):
  File "/srv/a.py", line 1, in f
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/srv/b.py", line 2, in g
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error
done
"""
ABORT = """[default3]:terminate called after throwing an instance of 'c10::CUDAError'
[default3]:  what():  CUDA error: unknown error
[default3]:CUDA kernel errors might be asynchronously reported at some other API call,so the stacktrace below might be incorrect.
[default3]:For debugging consider passing CUDA_LAUNCH_BLOCKING=1.
[default3]:Exception raised from create_event_internal at ../c10/cuda/CUDACachingAllocator.cpp:1211 (most recent call first):
[default3]:frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x42 (0x7f1 in libc10.so)
[default3]:
[default3]:next
"""
FATAL = """Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "/srv/inner.py", line 5 in inner
  File "/srv/outer.py", line 6 in outer
other
"""


def desk(tmp_path: Path) -> tuple[Bench, Desk]:
    board = bench(tmp_path)
    return board, Desk(board.context, patterns.load(), Folder(5.0, 50.0, 2.0, refused(board.context)), "logfile")


def told(tmp_path: Path, text: str) -> list[LogEvent]:
    board, place = desk(tmp_path)
    channel = Channel("train")
    place.block(channel, text.encode())
    board.clock.sleep(3)
    place.settle([channel])
    assert not channel.is_open
    return [event for event, _ in board.outlet.logs]


def test_a_traceback_is_one_event_with_its_innermost_frame(tmp_path: Path) -> None:
    [event] = told(tmp_path, PLAIN)
    assert (event.code, event.severity) == ("traceback", "warning")
    said = {"exception": "RuntimeError", "message": "shape mismatch", "frame": "/srv/loop.py:22 in run", "lines": "6"}
    assert event.attributes == said
    assert event.line.startswith("Traceback (most recent call last):")


def test_a_chain_is_one_event_of_the_last_exception(tmp_path: Path) -> None:
    [event] = told(tmp_path, CHAINED)
    assert event.attributes["exception"] == "torch.distributed.DistBackendError"
    assert event.attributes["frame"] == "/srv/b.py:2 in g"
    assert event.code == "nccl_system_error"


def test_an_abort_of_the_native_side(tmp_path: Path) -> None:
    [event] = told(tmp_path, ABORT)
    assert (event.code, event.attributes["exception"], event.attributes["local_rank"]) == (
        "cuda_error",
        "c10::CUDAError",
        "3",
    )
    assert event.attributes["message"] == "CUDA error: unknown error"
    assert event.attributes["frame"] == "../c10/cuda/CUDACachingAllocator.cpp:1211 in create_event_internal"


def test_a_dead_interpreter_names_the_innermost_frame(tmp_path: Path) -> None:
    [event] = told(tmp_path, FATAL)
    assert (event.code, event.attributes["message"]) == ("native_abort", "Segmentation fault")
    assert event.attributes["frame"] == "/srv/inner.py:5"


def test_ranks_that_speak_at_the_same_time_are_told_apart(tmp_path: Path) -> None:
    lines = PLAIN.splitlines()
    mixed = "".join(f"[rank{rank}]: {line}\n" for line in lines for rank in (0, 5))
    events = told(tmp_path, mixed.replace("[rank5]: RuntimeError: shape", "[rank5]: ValueError: other"))
    assert [(e.rank, e.attributes["exception"]) for e in events] == [(0, "RuntimeError"), (5, "ValueError")]


def test_lines_of_others_in_between_do_not_end_it(tmp_path: Path) -> None:
    noisy = PLAIN.replace("    run()\n", "    run()\nINFO: still here\niteration 5 done\n")
    [event] = told(tmp_path, noisy)
    assert event.attributes["exception"] == "RuntimeError"


def test_a_grave_line_leaves_at_once_and_once(tmp_path: Path) -> None:
    board, place = desk(tmp_path)
    channel = Channel("train")
    grave = PLAIN.replace("shape mismatch", "CUDA error: uncorrectable ECC error encountered").removesuffix("step 2\n")
    place.block(channel, grave.encode())
    assert [(event.code, urgent) for event, urgent in board.outlet.logs] == [("cuda_ecc", True)]
    board.clock.sleep(3)
    place.settle([channel])
    assert len(board.outlet.logs) == 1


def test_a_head_without_an_end_is_told_after_a_while_and_at_the_end(tmp_path: Path) -> None:
    [event] = told(tmp_path, 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n')
    assert event.attributes["frame"] == "a.py:1 in f"
    (tmp_path / "second").mkdir()
    board, place = desk(tmp_path / "second")
    channel = Channel("train")
    place.block(channel, b"Traceback (most recent call last):\n")
    place.settle([channel], last=True)
    assert board.outlet.codes == ["traceback"]


def test_endless_and_many_tracebacks_stay_bounded(tmp_path: Path) -> None:
    events = told(tmp_path, "Traceback (most recent call last):\n" + "  more\n" * 2000)
    assert len(events) == 1
    many = "".join(f"[rank{n}]: Traceback (most recent call last):\n" for n in range(1000))
    (tmp_path / "second").mkdir()
    assert len(told(tmp_path / "second", many)) <= 64


def test_the_rank_of_a_local_rank_comes_from_the_board(tmp_path: Path) -> None:
    board, place = desk(tmp_path)
    board.context.ranks.seen("j", 0, 11, pid=1, local_rank=3)
    channel = Channel("train")
    place.block(channel, ABORT.encode())
    place.settle([channel], last=True)
    assert [(event.job, event.rank) for event, _ in board.outlet.logs] == [("j", 11)]
