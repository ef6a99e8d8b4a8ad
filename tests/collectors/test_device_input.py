"""Bad input to every parser of devices and of the machine: truncated, empty, huge, no UTF-8, odd names. Never a crash."""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collectors.base import Sample, Source
from collectors.files import Files
from collectors.machine import inventory, kernel, mounts, sensors, smart
from collectors.network import optics, rdma, roles
from collectors.network.counters import whole
from collectors.network.statistics import plan
from collectors.runner import take
from collectors.sources.drift import DriftSource
from collectors.sources.ethtool import EthtoolSource
from collectors.sources.host import HostSource
from collectors.sources.machine import MachineSource
from collectors.sources.mounts import MountsSource
from collectors.sources.nic import NicSource, parse_dev
from collectors.sources.rdma import RdmaSource
from tests.collectors.kit import FIXTURES, Bench, bench

TREES = ("h100", "node", "machine")
SOURCES: tuple[type[Source], ...] = (
    HostSource, NicSource, RdmaSource, EthtoolSource, MachineSource, MountsSource, DriftSource,
)  # fmt: skip
MOUNTS = "proc/26231/mountinfo"
TEXTS: dict[str, tuple[Callable[[str], object], str]] = {
    "dev": (parse_dev, "node/proc/net/dev"),
    "vmstat": (kernel.vmstat, "machine/proc/vmstat"),
    "softnet": (kernel.softnet, "machine/proc/net/softnet_stat"),
    "file-nr": (kernel.file_handles, "machine/proc/sys/fs/file-nr"),
    "interrupts": (kernel.error_interrupts, "machine/proc/interrupts"),
    "stat": (kernel.stat_numbers, "node/proc/stat"),
    "aer": (lambda text: sensors.aer_total(text, "TOTAL_ERR_COR"), "machine/sys/bus/pci/devices/0000:01:00.0/aer_dev_correctable"),
    "link": (sensors.transfers, "machine/sys/bus/pci/devices/0000:01:00.0/max_link_speed"),
    "mountinfo": (lambda text: mounts.parse_mounts(text, 24), f"machine/{MOUNTS}"),
    "mountstats": (mounts.parse_mountstats, "machine/proc/26231/mountstats"),
    "lustre": (mounts.parse_lustre, "machine/proc/vmstat"),
    "state": (rdma.number_of_state, "h100/sys/class/infiniband/mlx5_0/ports/1/state"),
    "rate": (rdma.gigabits, "h100/sys/class/infiniband/mlx5_0/ports/1/rate"),
    "counter": (whole, "h100/sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data"),
    "names": (lambda text: rdma.hardware_plan(text.split("\n"), set(), 32), "rocm-nic/ethtool_S_enp68s0.txt"),
    "statistics": (lambda text: plan(text.split("\n")), "rocm-nic/ethtool_S_enp68s0.txt"),
    "routes": (lambda text: roles.default_routes(text, text), "node/proc/net/dev"),
    "environ": (lambda text: inventory.environment(text.encode("utf-8", "replace"), ()), "node/proc/meminfo"),
    "cmdline": (inventory.kernel_parameters, "node/proc/meminfo"),
    "memory": (inventory.memory_gib, "node/proc/meminfo"),
    "nvidia": (inventory.nvidia_version, "node/proc/meminfo"),
}  # fmt: skip


def damaged(content: bytes, dice: random.Random) -> bytes:
    """The content with one kind of damage."""
    at = dice.randrange(len(content) + 1)
    junk = dice.choice([
        b"", b"\0", b"\xff\xfe", b" ", b"\n", b":", b"-1", b"nan", b"inf", b"9" * 40, b"1e309", b"0x", "\u0663".encode(), b"\\777", b"[",
        b" - ", b"device x mounted on /y with fstype nfs statvers=1.1\n", b"a" * 3000,
    ])  # fmt: skip
    kind = dice.randrange(4)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + junk + content[at:]
    if kind == 2:
        return content[:at] + junk + content[at + len(junk) :]
    return bytes(dice.randrange(256) for _ in range(dice.randrange(200)))


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_every_parser_of_text_survives_damage(name: str) -> None:
    parse, fixture = TEXTS[name]
    content = (FIXTURES / fixture).read_bytes()[:6000]
    dice = random.Random(name)
    for _ in range(120):
        parse(damaged(damaged(content, dice), dice).decode("utf-8", "replace"))
    parse("")


@pytest.mark.parametrize("parse", [optics.decode, smart.decode_health, whole], ids=["optics", "smart", "counter"])
def test_every_parser_of_bytes_survives_damage(parse: Callable[[bytes], object]) -> None:
    dice = random.Random(7)
    for _ in range(600):
        kind = dice.choice([0x03, 0x0D, 0x11, 0x18, 0x19, 0x1E, dice.randrange(256)])
        size = dice.choice([0, 1, 17, 57, 106, 175, 256, 361, 512, 640, 2378, 2560])
        row = parse(bytes([kind, *(dice.randrange(256) for _ in range(size))]))
        if isinstance(row, dict):
            assert all(isinstance(value, float) and not math.isinf(value) for value in row.values())


def machine(tmp_path: Path) -> Bench:
    """Everything in one tree; the mounts stand where a source looks for them."""
    board = bench(tmp_path)
    for tree in TREES:
        shutil.copytree(FIXTURES / tree, board.root, dirs_exist_ok=True)
    for name in ("mountinfo", "mountstats"):
        shutil.copy(board.root / "proc/26231" / name, board.root / f"proc/{name}")
        (board.root / "proc/1").mkdir(exist_ok=True)
        shutil.move(board.root / f"proc/{name}", board.root / "proc/1" / name)
    return board


def sources(board: Bench) -> list[Any]:
    return [board.build(kind) for kind in SOURCES]


def samples(board: Bench, built: list[Any], seconds: float = 11.0) -> list[Sample]:
    """What every source says, after all that they asked in the background is answered."""
    board.clock.advance_ns(int(seconds * 1e9))
    found = [take(source, board.clock.now_ns()) for source in built]
    assert all(source.settle(60) for source in built if hasattr(source, "settle"))
    return [*found, *(take(source, board.clock.now_ns()) for source in built)]


def no_error(found: list[Sample]) -> None:
    assert not [gap for sample in found for gap in sample.gaps if gap.reason.endswith("error")]
    assert not [v for s in found for b in s.blocks for _, row in b.rows() for v in row if math.isinf(v)]


@pytest.mark.parametrize("seed", range(6))
def test_no_source_fails_on_a_damaged_tree(tmp_path: Path, seed: int) -> None:
    board = machine(tmp_path)
    built = sources(board)
    no_error(samples(board, built))
    dice = random.Random(seed)
    files = sorted(path for path in board.root.rglob("*") if path.is_file())
    for path in dice.sample(files, len(files) // 2):
        with path.open("r+b") as file:
            content = damaged(file.read(), dice)
            file.seek(0)
            file.write(content)
            file.truncate()
    no_error(samples(board, built))
    no_error(samples(board, built))


def test_host_and_interfaces_survive_damage_after_damage(tmp_path: Path) -> None:
    board = machine(tmp_path)
    built = [board.build(kind) for kind in (HostSource, NicSource)]
    names = ["stat", "loadavg", "meminfo", "diskstats", "net/snmp", "net/dev", "pressure/memory"]
    paths = [*(board.root / "proc" / name for name in names), *(board.root / "sys/class/net/eth0").iterdir()]
    contents = {path: path.read_bytes()[:4000] for path in paths}
    dice = random.Random(3)
    for _ in range(150):
        for path in dice.sample(paths, 4):
            path.write_bytes(damaged(contents[path], dice))
        no_error([take(source, 0) for source in built])
        board.clock.advance_ns(10**9)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"9" * 5000, b"-5\n", b"nan\n"],
    ids=["empty", "no-utf8", "huge", "negative", "nan"],
)
def test_no_source_fails_when_all_files_are_the_same(tmp_path: Path, content: bytes) -> None:
    board = machine(tmp_path)
    for path in [path for path in board.root.rglob("*") if path.is_file()]:
        path.write_bytes(content)
    built = sources(board)
    no_error(samples(board, built))
    no_error(samples(board, built))


class Failing(Files):
    """A tree in which every read fails."""

    def read(self, name: str) -> bytes:
        raise OSError(self.number_of_error, os.strerror(self.number_of_error), name)

    number_of_error = errno.EIO


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.EACCES, errno.ENODEV, errno.EINVAL], ids=lambda n: errno.errorcode[n]
)
def test_no_source_fails_when_no_file_can_be_read(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    board = machine(tmp_path)
    monkeypatch.setattr(Failing, "number_of_error", number)
    monkeypatch.setattr(Files, "read", Failing.read)
    monkeypatch.setattr(Files, "number_of_error", number, raising=False)
    no_error(samples(board, sources(board)))


def test_no_source_fails_when_devices_vanish_between_two_looks(tmp_path: Path) -> None:
    board = machine(tmp_path)
    built = sources(board)
    samples(board, built)
    shutil.rmtree(board.root / "sys")
    shutil.rmtree(board.root / "proc")
    found = samples(board, built)
    assert not [gap for sample in found for gap in sample.gaps if gap.reason == "error"]


def test_odd_names_of_devices_are_only_names(tmp_path: Path) -> None:
    board = machine(tmp_path)
    for name in ("mlx5 0", "a,b", "\u00fc", "x" * 100):
        board.write(f"/sys/class/infiniband/{name}/ports/1/state", "4: ACTIVE")
        board.write(f"/sys/class/net/{name}/device/x", "")
        board.write(f"/sys/class/nvme/{name}/state", "live")
        board.write(f"/sys/bus/pci/devices/{name}/class", "0x020000")
    no_error(samples(board, sources(board)))
