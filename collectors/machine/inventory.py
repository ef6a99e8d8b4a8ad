"""What a node runs: versions, kernel parameters, the communication library's settings. Compared with its peers and with itself before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from zlib import crc32

from collectors.files import Files

NODE_OWN = re.compile(
    r"(boot_image|root|rootflags|initrd|resume|ip|bootif|hostname|rd\..*|.*uuid.*|.*mac.*)", re.IGNORECASE
)
SECRET = re.compile(r"(token|pass|secret|key|credential|auth)", re.IGNORECASE)
LOGIN = re.compile(r"://[^/\s@]*@")
NVIDIA_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
VALUE_CHARS, VARIABLES_MAX = 200, 60
PREFIXES = ("NCCL_", "RCCL_", "HCCL_", "CUDA_VISIBLE_", "OMP_")
VARIABLES = frozenset({"CUDA_VERSION", "PYTORCH_VERSION", "NVIDIA_PYTORCH_VERSION"})

FILES: Mapping[str, str] = {
    "kernel": "/proc/sys/kernel/osrelease",
    "bios": "/sys/class/dmi/id/bios_version",
    "bios_date": "/sys/class/dmi/id/bios_date",
    "model": "/sys/class/dmi/id/product_name",
    "microcode": "/sys/devices/system/cpu/cpu0/microcode/version",
    "smt": "/sys/devices/system/cpu/smt/active",
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "clock_source": "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    "driver.nvidia": "/sys/module/nvidia/version",
    "driver.nvidia_peermem": "/sys/module/nvidia_peermem/version",
    "driver.amdgpu": "/sys/module/amdgpu/version",
    "driver.mlx5_core": "/sys/module/mlx5_core/version",
    "driver.efa": "/sys/module/efa/version",
    "parameter.numa_balancing": "/proc/sys/kernel/numa_balancing",
    "parameter.zone_reclaim_mode": "/proc/sys/vm/zone_reclaim_mode",
    "parameter.swappiness": "/proc/sys/vm/swappiness",
    "parameter.overcommit_memory": "/proc/sys/vm/overcommit_memory",
    "parameter.max_map_count": "/proc/sys/vm/max_map_count",
    "parameter.nr_hugepages": "/proc/sys/vm/nr_hugepages",
    "parameter.rmem_max": "/proc/sys/net/core/rmem_max",
    "parameter.wmem_max": "/proc/sys/net/core/wmem_max",
    "parameter.tcp_congestion_control": "/proc/sys/net/ipv4/tcp_congestion_control",
}
CHOICES = {"parameter.transparent_hugepages": "/sys/kernel/mm/transparent_hugepage/enabled"}


def machine_items(files: Files) -> dict[str, str]:
    """Everything that can be read of the machine itself; what cannot is left out."""
    found = {item: files.text(path) for item, path in FILES.items()}
    found |= {item: chosen(files.text(path)) for item, path in CHOICES.items()}
    found["os"] = os_name(files.text("/etc/os-release"))
    found["memory_gib"] = memory_gib(files.text("/proc/meminfo"))
    found["firmware.nic"] = summary(
        files.text(f"/sys/class/infiniband/{name}/fw_ver") for name in files.names("/sys/class/infiniband")
    )
    found["firmware.nvme"] = summary(
        files.text(f"/sys/class/nvme/{name}/firmware_rev") for name in files.names("/sys/class/nvme")
    )
    found["driver.nvidia"] = found["driver.nvidia"] or nvidia_version(files.text("/proc/driver/nvidia/version"))
    found["driver.ascend"] = setting(files.text("/usr/local/Ascend/driver/version.info"), "Version")
    command_line = files.text("/proc/cmdline")
    if command_line:
        found["kernel_parameters"] = " ".join(kernel_parameters(command_line))
    return {item: clean(value) for item, value in found.items() if value}


def chosen(text: str) -> str:
    """The choice in brackets.

    Examples
    --------
    >>> chosen("always [madvise] never")
    'madvise'
    """
    return text.partition("[")[2].partition("]")[0]


def os_name(os_release: str) -> str:
    """``PRETTY_NAME`` of /etc/os-release."""
    return setting(os_release, "PRETTY_NAME").strip("\"'")


def setting(text: str, name: str) -> str:
    """Value of a ``name=value`` line; empty without one."""
    return next((line.partition("=")[2].strip() for line in text.splitlines() if line.startswith(f"{name}=")), "")


def memory_gib(meminfo: str) -> str:
    """Memory in whole GiB: a module that is gone shows, the kernel's own share does not."""
    total = next((line.split()[1:2] for line in meminfo.splitlines() if line.startswith("MemTotal:")), [])
    return (
        str(round(int(total[0]) / 2**20))
        if total and total[0].isascii() and total[0].isdigit() and len(total[0]) < 20
        else ""
    )


def nvidia_version(text: str) -> str:
    """Driver version in /proc/driver/nvidia/version.

    Examples
    --------
    >>> nvidia_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build")
    '550.54.15'
    """
    found = NVIDIA_VERSION.search(text)
    return found.group(1) if found else ""


def summary(values: Iterable[str]) -> str:
    """Values with their number, most frequent first: one adapter with another firmware shows.

    Examples
    --------
    >>> summary(["28.39", "28.39", "28.36", ""])
    '28.39 x2, 28.36 x1'
    """
    counted = Counter(value for value in values if value)
    ordered = sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{value} x{count}" for value, count in ordered)


def kernel_parameters(command_line: str) -> list[str]:
    """Parameters in order of name, without those that differ from node to node by nature; secrets are not kept."""
    kept = []
    for word in command_line.split():
        name, equals, _ = word.partition("=")
        if not NODE_OWN.fullmatch(name):
            kept.append(f"{name}{equals}***" if equals and SECRET.search(name) else word)
    return sorted(kept)


def environment(content: bytes, image_variables: Iterable[str]) -> dict[str, str]:
    """The variables that matter here, by item; nothing else of a process's environment is kept, for it may hold secrets."""
    images = set(image_variables)
    found: dict[str, str] = {}
    for entry in content.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        key = name.decode("utf-8", "replace")
        if not equals or SECRET.search(key) or len(found) >= VARIABLES_MAX:
            continue
        if key in images:
            found["image"] = clean(value.decode("utf-8", "replace"))
        elif key.startswith(PREFIXES) or key in VARIABLES:
            found[f"env.{key[:80]}"] = clean(value.decode("utf-8", "replace"))
    return found


def over_ranks(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Items of all ranks of a node: the common value, or all different ones in order."""
    values: dict[str, set[str]] = {}
    for found in environments:
        for item, value in found.items():
            if value:
                values.setdefault(item, set()).add(value)
    return {item: " | ".join(sorted(different))[:VALUE_CHARS] for item, different in sorted(values.items())}


def clean(value: str) -> str:
    """A value as it may be published: one line, no login; a long one ends in its checksum, so that a change at its end shows."""
    text = LOGIN.sub("://***@", " ".join(value.split()))
    return text if len(text) <= VALUE_CHARS else f"{text[: VALUE_CHARS - 9]} {crc32(text.encode()):08x}"


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(item, before, after) of what is new or different. What could not be read this time is no change."""
    return [(item, before.get(item, ""), value) for item, value in sorted(after.items()) if before.get(item) != value]
