"""Checkpoints: exact round trips, every kind of bad save refused by name, failures that never stop training."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainwarden_hook import segments
from trainwarden_hook.checkpoint import Saver, SaveReport
from trainwarden_hook.disk import KEEP, Folder, load_file, open_file
from trainwarden_hook.memory import Buffers, Stamp
from trainwarden_hook.packing import HEADER_BYTES, Header, Plan, Refused, fingerprint, unpack
from trainwarden_hook.restore import find
from trainwarden_hook.sums import checksum

STAMP = Stamp(world=4, rank=2, generation=3, fingerprint=77)


class Rank:
    """Buffers, folder and saver of one rank of a job of its own."""

    def __init__(self, root: Path | None) -> None:
        self.job = f"t{uuid.uuid4().hex[:8]}"
        self.buffers = Buffers(self.job, "n0", 0)
        self.folder = Folder(str(root), self.job, "n0", 0) if root is not None else None
        self.reports: list[SaveReport] = []
        self.saver = Saver(self.buffers, self.folder, STAMP, self.reports.append)

    def save(self, step: int, state: dict[str, Any] | None = None, must: bool = False) -> SaveReport | None:
        failure = self.saver.save(step, state or {"model": {"w": torch.full((1000,), float(step))}}, must)
        assert self.saver.wait_idle(60)
        return failure

    def found(self, max_step: int | None = None) -> tuple[int, str, list[str]]:
        """What a new process of this rank would restore."""
        best = find(Buffers(self.job, "n0", 0), self.folder, 77, max_step)
        return best.step, best.source, best.refused

    def paths(self) -> list[str]:
        return [buffer.path for buffer in self.buffers.pair]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.saver.close()
    segments.unlink_all(made.job, "n0")


def corrupt(path: str, offset: int, data: bytes = b"\xa5") -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


ALL_KINDS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", ALL_KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7)], ids=str)
def test_every_kind_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.randint(0, 2, shape).to(dtype)
    back = round_trip({"t": source})["t"]
    assert (back.dtype, back.shape) == (source.dtype, source.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8))


def round_trip(state: dict[str, Any]) -> dict[str, Any]:
    plan = Plan(state)
    payload = memoryview(bytearray(plan.payload_bytes))
    plan.write_index(payload)
    plan.write_tensors(payload)
    header = Header(1, 1, 0, 0, len(plan.index), plan.payload_bytes, checksum(payload), 0, 0)
    return unpack(header, payload)


def test_nested_state_keeps_keys_order_and_kinds() -> None:
    state = {
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
            "param_groups": [{"betas": (0.9, 0.999), "lr": 1e-3}],
        },
        "ordered": OrderedDict([("b", 1), ("a", None)]),
        "text": "ä",
        "bytes": b"\x00\xff",
        "flag": True,
        "big": 2**70,
    }
    back = round_trip(state)
    assert str(back) == str(state)
    assert isinstance(back["ordered"], OrderedDict)


def test_a_strided_tensor_and_a_numpy_state_come_back() -> None:
    numpy = pytest.importorskip("numpy")
    back = round_trip(
        {"t": torch.arange(12).view(3, 4).t(), "n": ("MT19937", numpy.arange(5, dtype="uint32"), numpy.int64(3))}
    )
    assert torch.equal(back["t"], torch.arange(12).view(3, 4).t())
    assert back["n"][1].tolist() == [0, 1, 2, 3, 4]


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(TypeError, match=r"state\.extra\.loader is a function"):
        Plan({"extra": {"loader": lambda: None}})


def test_the_newest_save_is_found_in_memory_then_on_disk(rank: Rank) -> None:
    for step in (10, 20, 30):
        assert rank.save(step) is None
    assert rank.found()[:2] == (30, "memory")
    segments.unlink_all(rank.job, "n0")
    assert rank.found()[:2] == (30, "disk")


def test_a_restored_state_is_the_saved_one_and_independent(rank: Rank) -> None:
    rank.save(5, {"model": {"w": torch.tensor([1.5, 2.5])}, "extra": {"position": 9}})
    best = find(Buffers(rank.job, "n0", 0), None, 77, None)
    assert best.header is not None
    assert best.payload is not None
    state = unpack(best.header, best.payload)
    for step in (6, 7):
        rank.save(step)
    assert state["model"]["w"].tolist() == [1.5, 2.5]
    assert state["extra"] == {"position": 9}


Damage = Callable[[str], None]


def flip_payload(path: str) -> None:
    corrupt(path, HEADER_BYTES + 200)


def flip_header(path: str) -> None:
    corrupt(path, 20)


def no_magic(path: str) -> None:
    corrupt(path, 0, b"\x00" * 8)


def cut_short(path: str) -> None:
    os.truncate(path, HEADER_BYTES + 100)


def cut_to_nothing(path: str) -> None:
    os.truncate(path, 10)


def newer_version(path: str) -> None:
    with open(path, "rb") as file:
        page = bytearray(file.read(HEADER_BYTES))
    struct.pack_into("<I", page, 8, 3)
    size = struct.calcsize("<8sIIqiiqQQIIq")
    struct.pack_into("<I", page, size, zlib.crc32(page[:size]))
    corrupt(path, 0, bytes(page))


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (flip_payload, "corrupt"),
        (flip_header, "corrupt"),
        (no_magic, "not a finished save"),
        (cut_short, "truncated"),
        (cut_to_nothing, "truncated"),
        (newer_version, "version 3"),
    ],
)
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_bad_save_is_refused_by_name_and_the_next_best_is_taken(
    rank: Rank, damage: Damage, word: str, place: str
) -> None:
    for step in (10, 20):
        rank.save(step)
    if place == "memory":
        newest = max(rank.buffers.pair, key=lambda buffer: buffer.step).path
        rank.folder = None
    else:
        segments.unlink_all(rank.job, "n0")
        assert rank.folder is not None
        newest = next(iter(rank.folder.newest_first()))[1]
    damage(newest)
    step, source, refused = rank.found()
    assert (step, source) == (10, place)
    assert len(refused) == 1
    assert word in refused[0]
    assert newest in refused[0]


def test_a_save_of_another_model_is_refused(rank: Rank) -> None:
    rank.save(10)
    best = find(Buffers(rank.job, "n0", 0), rank.folder, 78, None)
    assert best.step == -1
    assert all("another model" in text for text in best.refused)


def test_fingerprints_differ_by_name_shape_kind_and_optimizer() -> None:
    w = torch.zeros(2, 3)
    base = fingerprint({"w": w}, "AdamW")
    others = [
        fingerprint({"v": w}, "AdamW"),
        fingerprint({"w": w.t()}, "AdamW"),
        fingerprint({"w": w.half()}, "AdamW"),
        fingerprint({"w": w}, "SGD"),
    ]
    assert base not in others
    assert fingerprint({"w": w + 1}, "AdamW") == base


def test_roll_back_takes_nothing_above_the_ordered_step(rank: Rank) -> None:
    for step in (10, 20, 30):
        rank.save(step)
    assert rank.found(max_step=25)[:2] == (20, "memory")
    assert rank.found(max_step=15)[:2] == (10, "disk")


def test_a_model_with_nan_is_not_saved_and_the_good_one_stays(rank: Rank) -> None:
    rank.save(10)
    rank.save(20, {"model": {"layer.w": torch.tensor([1.0, float("nan")])}})
    assert rank.reports[-1].error == "the model's layer.w holds NaN"
    assert rank.found()[:2] == (10, "memory")


def test_infinities_may_be_meant(rank: Rank) -> None:
    rank.save(10, {"model": {"mask": torch.tensor([0.0, float("-inf")])}})
    assert rank.found()[0] == 10


def test_the_last_three_files_stay_and_nothing_half_written(rank: Rank) -> None:
    for step in range(10, 70, 10):
        rank.save(step)
    assert rank.folder is not None
    assert [step for step, _ in rank.folder.newest_first()] == [60, 50, 40][:KEEP]
    assert not [name for name in os.listdir(rank.folder.path) if name.endswith(".tmp")]


def test_a_full_disk_is_reported_and_the_memory_save_stands(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("trainwarden_hook.disk.os.pwrite", full)
    assert rank.save(10) is None
    memory, disk = rank.reports
    assert (memory.where, memory.ok) == ("memory", True)
    assert (disk.where, disk.ok, disk.error) == ("disk", False, "No space left on device")
    assert rank.found()[:2] == (10, "memory")
    assert rank.folder is not None
    assert os.listdir(rank.folder.path) == []


def _full_after_one(plain: Callable[..., int]) -> Callable[..., int]:
    left = [1]

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        return plain(descriptor, data[:100], offset)

    return write


def _fails(code: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
def test_a_disk_that_fails_at_any_point_keeps_the_older_file_and_the_next_save_is_written(
    rank: Rank, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.save(10)
    fault = _full_after_one(os.pwrite) if call == "pwrite" else _fails(errno.EIO if call == "fsync" else errno.ENOSPC)
    with monkeypatch.context() as patch:
        patch.setattr(f"trainwarden_hook.disk.os.{call}", fault)
        assert rank.save(20) is None
    assert [(report.where, report.ok) for report in rank.reports[2:]] == [("memory", True), ("disk", False)]
    assert rank.folder is not None
    assert [step for step, _ in rank.folder.newest_first()] == [10]
    assert len(os.listdir(rank.folder.path)) == 1, "nothing half-written stays"
    rank.save(30)
    segments.unlink_all(rank.job, "n0")
    assert rank.found() == (30, "disk", [])


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
def test_shared_memory_of_a_container_that_is_too_small_costs_the_new_save_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "shm"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], check=True)
    monkeypatch.setattr(segments, "SHARED_MEMORY_DIR", str(small))
    made = Rank(None)
    try:
        megabyte = 1_000_000 // 4
        assert made.save(10, {"model": {"w": torch.ones(megabyte)}}) is None
        assert made.save(20, {"model": {"w": torch.ones(megabyte)}}) is None
        failure = made.save(30, {"model": {"w": torch.ones(4 * megabyte)}})
        assert failure is not None
        assert f"{small} is too small for a save: 4 MB are needed twice over" in failure.error
        assert made.found() == (20, "memory", []), "neither buffer was touched"
        assert made.save(40, {"model": {"w": torch.ones(megabyte)}}) is None
        assert made.found()[0] == 40
    finally:
        made.saver.close()
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_full_shared_memory_is_reported_and_the_older_save_stands(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.save(10)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("trainwarden_hook.memory.os.posix_fallocate", full)
    failure = rank.save(20, {"model": {"w": torch.ones(1_000_000)}})
    assert failure is not None
    assert "No space left" in failure.error
    assert rank.found()[:2] == (10, "memory")


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = Rank(tmp_path / "file")
    try:
        made.save(10)
        assert not made.reports[-1].ok
        assert made.found()[:2] == (10, "memory")
    finally:
        made.saver.close()
        segments.unlink_all(made.job, "n0")


def test_a_growing_state_moves_to_larger_buffers(rank: Rank) -> None:
    for step, size in ((1, 10), (2, 10_000), (3, 1_000_000), (4, 10)):
        rank.save(step, {"model": {"w": torch.full((size,), float(step))}})
    assert rank.found()[:2] == (4, "memory")


def test_disk_files_load_back(rank: Rank) -> None:
    rank.save(10, {"model": {"w": torch.arange(5)}})
    assert rank.folder is not None
    path = next(iter(rank.folder.newest_first()))[1]
    state: Any = load_file(path, 77)
    assert state["model"]["w"].tolist() == [0, 1, 2, 3, 4]
    assert open_file(path, None)[0].rank == STAMP.rank


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="gone"):
        open_file(str(tmp_path / "gone.twck"), None)


DYING = """
import os, signal, sys, torch
from trainwarden_hook.checkpoint import Saver
from trainwarden_hook.memory import Buffers, Stamp
from trainwarden_hook.packing import Plan
buffers = Buffers(sys.argv[1], "n0", 0)
saver = Saver(buffers, None, Stamp(4, 2, 3, 77), lambda report: None)
saver.save(10, {"model": {"w": torch.ones(1000)}}, False)
saver.wait_idle(60)
plain = Plan.write_tensors
def half(plan, payload):
    plain(plan, payload)
    os.kill(os.getpid(), signal.SIGKILL)
Plan.write_tensors = half
saver.save(20, {"model": {"w": torch.ones(1000)}}, False)
"""


def test_a_process_killed_in_the_middle_of_a_save_leaves_the_one_before() -> None:
    job = f"t{uuid.uuid4().hex[:8]}"
    ended = subprocess.run([sys.executable, "-c", DYING, job], check=False)
    try:
        assert ended.returncode == -signal.SIGKILL
        best = find(Buffers(job, "n0", 0), None, 77, None)
        assert (best.step, best.source) == (10, "memory")
        assert len(best.refused) == 1
    finally:
        assert segments.unlink_all(job, "n0") == 2


def test_a_save_never_overwrites_the_only_good_one(rank: Rank) -> None:
    rank.save(10)
    good = next(buffer for buffer in rank.buffers.pair if buffer.sealed)
    assert rank.buffers.choose(None) is not good
    rank.save(20)
    older, newer = sorted(rank.buffers.pair, key=lambda buffer: buffer.step)
    assert rank.buffers.choose(None) is older
    assert rank.buffers.choose(being_written_out=older) is newer
    older.sealed = False
    assert rank.buffers.choose(being_written_out=newer) is older


@pytest.mark.parametrize("names", [("a/b", "n 0"), ("x" * 200, "n0"), ("ü", "n0")])
def test_names_of_segments_are_plain_and_distinct(names: tuple[str, str]) -> None:
    path = segments.path(*names, 0, "a")
    assert os.path.dirname(path) == "/dev/shm"
    assert path != segments.path(names[0] + "_", names[1], 0, "a")


def test_a_failure_in_the_background_does_not_end_the_periodic_saves(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError('"isnan" not implemented for this kind')

    rank.save(10)
    with monkeypatch.context() as patch:
        patch.setattr("trainwarden_hook.packing.Plan.first_nan", fail)
        rank.save(20)
    assert not rank.reports[-1].ok
    assert rank.save(30) is None, "a save that failed is not being sealed any more"
    assert rank.found()[0] == 30


def test_a_report_that_fails_does_not_end_the_saves(rank: Rank) -> None:
    def fail(_: SaveReport) -> None:
        raise RuntimeError("can't start new thread")

    told, rank.saver._report = rank.saver._report, fail
    rank.save(10)
    rank.saver._report = told
    assert rank.save(20) is None
    assert rank.found()[0] == 20


def test_roll_back_removes_the_newer_files_of_nodes_that_are_out(rank: Rank) -> None:
    """Their own processes are not there to do it, and a later restart without a bound would take them."""
    assert rank.folder is not None
    gone = Folder(os.path.dirname(rank.folder.path), rank.job, "excluded", 0)
    rank.save(10)
    rank.save(40)
    newest = next(path for step, path in rank.folder.newest_first() if step == 40)
    os.rename(newest, newest.replace(rank.folder._own, gone._own))
    rank.folder.discard_above(25)
    assert [step for step, _ in rank.folder.newest_first()] == [10]
