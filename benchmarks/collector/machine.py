"""A machine with eight GPUs, eight InfiniBand ports and eight interfaces, made of fixtures; the host's own numbers are this machine's.

/proc is the real one by links, so that its files cost what the kernel takes to write them; devices are captured files, whose drivers
cost nothing: what a firmware command takes is not in any figure.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "tests/fixtures"
PORTS = 8
BRIDGES = 8
GPU_CLASS, NETWORK_CLASS = "0x030200", "0x020700"


def build_tree(folder: Path, live_proc: bool = False) -> Path:
    """A root directory with eight of everything."""
    root = folder / "root"
    for name in ("node", "machine"):
        shutil.copytree(FIXTURES / name, root, dirs_exist_ok=True)
    dev = (root / "proc/net/dev").read_text(encoding="utf-8")
    line = next(line for line in dev.splitlines() if "eth0" in line)
    for number in range(PORTS):
        shutil.copytree(FIXTURES / "h100/sys/class/infiniband/mlx5_0", root / f"sys/class/infiniband/mlx5_{number}")
        shutil.copytree(root / "sys/class/net/eth0", root / f"sys/class/net/ens{number}")
        (root / f"sys/class/net/ens{number}/device").mkdir()
        (root / f"sys/class/net/ens{number}/device/vendor").write_text("0x1dd8\n", encoding="ascii")
        dev += line.replace("eth0", f"ens{number}") + "\n"
    (root / "proc/net/dev").write_text(dev, encoding="utf-8")
    _copy_mounts(root)
    _add_devices(root)
    if live_proc:
        _link_live(root)
    return root


def _copy_mounts(root: Path) -> None:
    (root / "proc/1").mkdir()
    for name in ("mountinfo", "mountstats"):
        shutil.copy(root / "proc/26231" / name, root / "proc/1" / name)


def _add_devices(root: Path) -> None:
    """Eight NVIDIA GPUs and eight adapters on the bus, each with the files that a working device has."""
    template = root / "sys/bus/pci/devices/0000:01:00.0"
    for number in range(BRIDGES):
        for slot, vendor, kind in ((0x18, "0x10de", GPU_CLASS), (0x58, "0x15b3", NETWORK_CLASS)):
            device = root / f"sys/bus/pci/devices/0000:{slot + number:02x}:00.0"
            shutil.copytree(template, device)
            (device / "vendor").write_text(f"{vendor}\n", encoding="ascii")
            (device / "class").write_text(f"{kind}\n", encoding="ascii")


def _link_live(root: Path) -> None:
    """The host's files as this kernel writes them; what tells of interfaces and mounts stays captured."""
    for process in (root / "proc").glob("[0-9]*"):
        if process.name != "1":
            shutil.rmtree(process)
    for name in os.listdir("/proc"):
        own = root / "proc" / name
        if name == "net" or (name == "1" and own.exists()):
            continue
        if own.is_dir():
            shutil.rmtree(own)
        elif own.exists():
            own.unlink()
        own.symlink_to(f"/proc/{name}")
    _link_net(root)
    shutil.rmtree(root / "sys/fs", ignore_errors=True)
    (root / "sys/fs").symlink_to("/sys/fs")


def _link_net(root: Path) -> None:
    for name in os.listdir("/proc/self/net"):
        own = root / "proc/net" / name
        if name != "dev" and not own.is_dir():
            own.unlink(missing_ok=True)
            own.symlink_to(f"/proc/self/net/{name}")
