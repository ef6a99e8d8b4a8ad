"""Bad input to the agent and to the sources that share its thread: what `test_device_input` and the sources' own tests do not ask.

Truncated, empty, huge, non-UTF-8, unreadable: test_device_input. Hanging: test_devices, test_agent. Lines of 10 MB: test_tail. Parsers:
test_fuzz.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from collectors.accelerators import INSTANCE_SIGNALS, NAMES, ROW_BYTES
from collectors.base import Sample, Source
from collectors.files import Files
from collectors.nvidia import wire
from collectors.nvidia.gpu import Spans
from collectors.nvidia.library import Library
from collectors.nvidia.sampler import Options, Sampler
from collectors.sources.fabric import FabricSource
from collectors.sources.host import HostSource
from collectors.sources.logfile import LogfileSource
from collectors.sources.nic import NicSource
from collectors.sources.process import ProcessSource
from tests.collectors.kit import Bench, bench, devices, values
from tests.collectors.nvml_stub import CALLS, COMPILER, NOT_SUPPORTED, Stub, built
from tests.collectors.test_device_input import SOURCES, machine, no_error, samples, sources
from trainwarden.clock import NS_PER_S

PID = 26231
EVERY: tuple[type[Source], ...] = (*SOURCES, ProcessSource, FabricSource)
IDENTITY = {
    "DeviceGetCount",
    "DeviceGetCount_v2",
    "DeviceGetHandleByIndex_v2",
    "DeviceGetUUID",
    "DeviceGetPciInfo_v3",
    "DeviceGetName",
}
NUMBER = re.compile(rb"(?<![\w.:-])\d{3,18}(?![\w.:])")


def node(tmp_path: Path) -> tuple[Bench, list[Any]]:
    """A machine with a rank on it, and every source that reads files."""
    board = machine(tmp_path)
    board.context.ranks.seen("j", 0, 2, pid=PID)
    return board, [board.build(kind) for kind in EVERY]


def counters(built: list[Any], found: list[Sample]) -> dict[str, float]:
    """Present values of all columns that are rates of counters."""
    kinds = {family.name: family.metrics for source in built for family in source.families}
    return {
        f"{block.family}/{device}/{metric.name}": value
        for sample in found
        for block in sample.blocks
        for device, row in block.rows()
        for metric, value in zip(kinds[block.family], row, strict=True)
        if metric.kind == "counter" and not math.isnan(value)
    }


def test_what_is_listed_and_gone_when_it_is_read_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Files.names
    monkeypatch.setattr(
        Files, "names", lambda self, directory: [*names(self, directory), "ghost0", "mlx5_9", "0000:99:00.0"]
    )
    board, built = node(tmp_path)
    no_error(samples(board, built))
    no_error(samples(board, built))


def test_a_file_of_gigabytes_is_refused_and_not_kept(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write("/proc/meminfo", "")
    os.truncate(board.root / "proc/meminfo", 8 << 30)
    files = Files(board.root, board.clock)
    with pytest.raises(OSError, match="more than 32 MiB") as caught:
        files.read("/proc/meminfo")
    assert caught.value.errno == errno.EFBIG
    assert files.text("/proc/meminfo") == ""
    (tmp_path / "node").mkdir()
    other = machine(tmp_path / "node")
    for name in ("proc/meminfo", "proc/vmstat", "sys/class/infiniband/mlx5_0/ports/1/state"):
        os.truncate(other.root / name, 8 << 30)
    no_error(samples(other, sources(other)))


def test_counters_that_go_backwards_have_no_rate_below_zero(tmp_path: Path) -> None:
    board, built = node(tmp_path)
    samples(board, built)
    before = counters(built, samples(board, built))
    assert len(before) > 80
    for path in [path for part in ("proc", "sys") for path in (board.root / part).rglob("*") if path.is_file()]:
        content = path.read_bytes()
        path.write_bytes(NUMBER.sub(lambda found: str(int(found[0]) // 2).encode().rjust(len(found[0]), b" "), content))
    after = counters(built, samples(board, built))
    assert after
    assert {name: value for name, value in {**before, **after}.items() if value < 0} == {}


def test_a_wall_clock_that_is_stepped_back_changes_no_rate(tmp_path: Path) -> None:
    board, built = node(tmp_path)
    samples(board, built)
    before = counters(built, samples(board, built))
    board.clock.step_ns(-86_400 * NS_PER_S)
    after = counters(built, samples(board, built))
    assert after.keys() >= before.keys()
    assert all(value >= 0 for value in after.values())


def test_devices_that_are_listed_twice_have_one_row(tmp_path: Path) -> None:
    board, built = node(tmp_path)
    for name in ("net/dev", "diskstats", "1/mountinfo", "1/mountstats", "stat", "meminfo", "vmstat", "net/snmp"):
        path = board.root / "proc" / name
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*lines, *lines[1:]]))
    found = samples(board, built) + samples(board, built)
    no_error(found)
    assert [b.devices for s in found for b in s.blocks if len(set(b.devices)) != len(b.devices)] == []
    assert devices(found[-len(EVERY) + EVERY.index(NicSource)], "nic").count("eth0") == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO], ids=["permission", "eio"])
def test_a_process_that_cannot_be_read_is_not_called_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    board = bench(tmp_path, "node")
    board.context.ranks.seen("j", 0, 2, pid=PID)
    source = board.build(ProcessSource)
    assert values(source, board.second(source), "process", "rank2")["alive"] == 1

    def refuse(self: Files, name: str) -> bytes:
        raise OSError(number, os.strerror(number), name)

    with monkeypatch.context() as refused:
        refused.setattr(Files, "read", refuse)
        sample = board.second(source)
    assert [gap.reason for gap in sample.gaps] == ["unreadable"]
    assert "alive" not in values(source, sample, "process", "rank2")
    assert values(source, board.second(source), "process", "rank2")["alive"] == 1
    shutil.rmtree(board.root / f"proc/{PID}")
    source.context.files.forget(f"/proc/{PID}")
    assert values(source, board.second(source), "process", "rank2")["alive"] == 0


def test_hundreds_of_interfaces_of_containers_are_passed_over(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    dev = board.root / "proc/net/dev"
    lines = "".join(f"veth{number:07x}: {' '.join(['1'] * 16)}\n" for number in range(1000))
    dev.write_text(dev.read_text() + lines)
    source = board.build(NicSource)
    assert devices(board.second(source), "nic") == ("eth0",)
    source.close()


def test_a_processor_that_is_added_does_not_break_the_shares(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(HostSource)
    board.second(source)
    stat = board.root / "proc/stat"
    lines = stat.read_text().splitlines(keepends=True)
    stat.write_text("".join([lines[0], *(f"cpu{n} 1 2 3 4 5 6 7 8 9 10\n" for n in range(512)), *lines[1:]]))
    board.second(source)
    row = values(source, board.second(source), "host", "host")
    assert row["context_switches_per_s"] == 0


@pytest.mark.skipif(COMPILER is None, reason="the stand-in for the driver library needs a C compiler")
def test_sixty_four_gpus_fit_into_the_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(tmp_path / "nvml", 64)
    monkeypatch.setenv("NVML_STUB_STATE", str(stub.path))
    for gpu in range(64):  # none of them can do anything: the longest inventory, with a reason for each column
        for call in (call for call in CALLS if call.startswith(("DeviceGet", "Gpm")) and call not in IDENTITY):
            stub.code(call, NOT_SUPPORTED, gpu=gpu)
        for field in range(300):
            stub.field(field, gpu=gpu, code=NOT_SUPPORTED)
    sampler = Sampler(Library(str(built())), Options(NAMES, INSTANCE_SIGNALS, Spans(), names={}))
    messages: list[bytes] = []
    while not any(
        message[:1] == wire.ROWS and wire.frame_of(message, ROW_BYTES, 4 * len(INSTANCE_SIGNALS)).gpus == 64
        for message in messages
    ):
        messages = sampler.tick()
    told = messages + [message for _ in range(4) for message in sampler.tick()]
    inventories = [wire.facts_of(message) for message in told if message[:1] == wire.INVENTORY]
    assert 100_000 < max(map(len, told)) < wire.MESSAGE_BYTES
    assert len(inventories[-1]["gpus"]) == 64
    assert wire.hung_mask([True] * 64) == 2**64 - 1


def test_a_hundred_thousand_lines_a_second_are_all_read_and_what_is_held_back_is_counted(tmp_path: Path) -> None:
    board = bench(tmp_path)
    path = tmp_path / "train.log"
    path.touch()
    source = board.build(LogfileSource, files={"train": str(path)}, burst=20.0, budget_ms=10_000)
    assert isinstance(source, LogfileSource)
    source.poll()
    known = 1000
    step = 100_000 // known
    with path.open("w", encoding="utf-8") as file:
        for number in range(100_000):
            task = f"INFO: task worker:{number} blocked for more than 120 seconds.\n"
            file.write(task if number % step == 0 else f"iteration {number} loss 2.31 lr 1e-4 tokens/s 91021\n")
    size = path.stat().st_size
    looks = 0
    while (position := source._readers["train"].position()) is None or position.offset < size:
        source.poll()
        looks += 1
    assert looks <= size // source.settings.bytes_per_poll + 2
    told = sum(event.repeat for event, _ in board.outlet.logs)
    assert told == 20
    assert told + board.context.metrics.value("tw_log_lines_dropped_total", file="train") == known
