"""Which network adapter is nearest to which accelerator, from sysfs: PCI paths and NUMA nodes. No device is asked."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from collectors.files import Files

MAX_DEVICES = 256
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
ACCELERATORS = {
    ("0x10de", "0x0302"), ("0x10de", "0x0300"), ("0x1002", "0x0380"), ("0x1002", "0x1200"), ("0x1002", "0x0302"),
    ("0x19e5", "0x1200"), ("0x9999", "0x0300"), ("0x9999", "0x0380"),
}  # fmt: skip
"""(vendor, class) of NVIDIA, AMD, Huawei Ascend and MetaX accelerators. A console's VGA controller of AMD is none."""


@dataclass(frozen=True)
class Device:
    """A device on the PCI tree. `path` are the addresses from the root to it; `numa` is -1 where the machine does not say."""

    name: str
    path: tuple[str, ...]
    numa: int

    @property
    def address(self) -> str:
        """Its own PCI address; empty when it has none."""
        return self.path[-1] if self.path else ""


def accelerators(files: Files) -> list[Device]:
    """Accelerators by PCI address, named ``gpu0``, ``gpu1``... in that order, as the driver numbers them."""
    found = []
    for address in files.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{address}"
        if (_once(files, f"{folder}/vendor"), _once(files, f"{folder}/class")[:6]) in ACCELERATORS:
            found.append((folder, address))
    return [Device(f"gpu{i}", _path(files, folder), _numa(files, folder)) for i, (folder, _) in enumerate(found)][
        :MAX_DEVICES
    ]


def adapters(files: Files) -> list[Device]:
    """RDMA devices; where there are none, network interfaces on PCI."""
    for family in ("infiniband", "net"):
        found = []
        for name in files.names(f"/sys/class/{family}"):
            device = Device(
                name,
                _path(files, f"/sys/class/{family}/{name}/device"),
                _numa(files, f"/sys/class/{family}/{name}/device"),
            )
            if device.address:
                found.append(device)
        if found:
            return found[:MAX_DEVICES]
    return []


def nearest(device: Device, others: Sequence[Device]) -> Device | None:
    """Who shares the longest way from the root, then the NUMA node; None when nobody shares either.

    Examples
    --------
    >>> gpu = Device("gpu0", ("pci0000:00", "0000:00:01.0", "0000:03:00.0"), 0)
    >>> far, near = Device("a", ("pci0000:80", "0000:81:00.0"), 1), Device("b", ("pci0000:00", "0000:00:01.0", "0000:04:00.0"), 0)
    >>> nearest(gpu, [far, near]).name
    'b'
    """
    ranked = sorted(others, key=lambda other: (-_shared(device, other), other.numa != device.numa, other.name))
    best = ranked[0] if ranked else None
    if best is None or (_shared(device, best) == 0 and (best.numa != device.numa or device.numa < 0)):
        return None
    return best


def affinity(gpus: Sequence[Device], nics: Sequence[Device]) -> dict[str, str]:
    """Attributes ``gpu_nic`` (``"gpu0=mlx5_0 ..."``), ``numa`` and ``gpu_pci``; GPUs share an adapter when there are too few."""
    left = list(nics)
    pairs: dict[str, str] = {}
    for gpu in gpus:
        found = nearest(gpu, left) or nearest(gpu, nics)
        if found is None:
            continue
        pairs[gpu.name] = found.name
        if found in left and _shared(gpu, found) > 0:
            left.remove(found)
    numa = {device.name: str(device.numa) for device in (*gpus, *nics) if device.numa >= 0}
    said = {"gpu_nic": pairs, "numa": numa, "gpu_pci": {gpu.name: gpu.address for gpu in gpus if gpu.address}}
    return {key: words(values) for key, values in said.items() if values}


def words(values: dict[str, str]) -> str:
    """``"a=1 b=2"``: how an attribute holds a table."""
    return " ".join(f"{key}={value}" for key, value in values.items())


def _shared(one: Device, two: Device) -> int:
    """Steps of the way from the root that both take."""
    count = 0
    for a, b in zip(one.path, two.path, strict=False):
        if a != b:
            break
        count += 1
    return count


def _path(files: Files, name: str) -> tuple[str, ...]:
    """Bridges and device that the link at `name` leads through; empty for what is not on PCI."""
    target = os.path.realpath(files.path(name)).removeprefix(files.root)
    parts = [part for part in target.split("/") if part.startswith("pci") or ADDRESS.fullmatch(part)]
    return tuple(parts) if parts and ADDRESS.fullmatch(parts[-1]) else ()


def _numa(files: Files, folder: str) -> int:
    text = _once(files, f"{folder}/numa_node")
    return int(text) if text.isdecimal() and len(text) < 5 else -1


def _once(files: Files, name: str) -> str:
    """Read without keeping the descriptor: devices do not move."""
    text = files.text(name)
    files.forget(name)
    return text
