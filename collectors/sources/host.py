"""The machine itself: processors, memory, pressure, TCP retransmits, disks, from /proc."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.asking import Question
from collectors.base import NAN, Context, Family, Rates, Row, Sample, Source, SourceError, family, highest
from collectors.files import line_value, to_number
from trainwarden.settings import option

SECTOR_BYTES = 512
CPU_FIELDS = 8
WHOLE_DISK = re.compile(r"(?:sd[a-z]+|vd[a-z]+|xvd[a-z]+|nvme\d+n\d+|mmcblk\d+)")

HOST = family(
    "host", "host",
    ("cpu_busy_ratio", "ratio", "gauge", "share of all processors' time that was not idle or waiting for disks"),
    ("cpu_user_ratio", "ratio", "gauge", "share in user code, niced included"),
    ("cpu_system_ratio", "ratio", "gauge", "share in the kernel, interrupts included"),
    ("cpu_iowait_ratio", "ratio", "gauge", "share idle with a disk request under way"),
    ("cpu_steal_ratio", "ratio", "gauge", "share taken by the hypervisor"),
    ("load1", "tasks", "gauge", "load average of one minute"),
    ("runnable_tasks", "tasks", "gauge", "tasks running or ready to run"),
    ("mem_available_ratio", "ratio", "gauge", "memory that can be had without swapping, of all"),
    ("mem_used_bytes", "bytes", "gauge", "all memory less what is available"),
    ("swap_used_ratio", "ratio", "gauge", "swap in use; 0 without swap"),
    ("psi_cpu_some_ratio", "ratio", "gauge", "share of time in which some task waited for a processor"),
    ("psi_memory_some_ratio", "ratio", "gauge", "share of time in which some task waited for memory"),
    ("psi_memory_full_ratio", "ratio", "gauge", "share of time in which all tasks waited for memory"),
    ("psi_io_some_ratio", "ratio", "gauge", "share of time in which some task waited for a disk"),
    ("psi_io_full_ratio", "ratio", "gauge", "share of time in which all tasks waited for a disk"),
    ("tcp_retrans_per_s", "1/s", "counter", "TCP segments sent again"),
    ("disk_read_bytes_per_s", "bytes/s", "counter", "read from all whole disks"),
    ("disk_write_bytes_per_s", "bytes/s", "counter", "written to all whole disks"),
    ("disk_busy_ratio", "ratio", "gauge", "share of time in which the busiest disk had a request"),
    ("run_dir_free_bytes", "bytes", "gauge", "free space where this agent writes"),
    ("context_switches_per_s", "1/s", "counter", "context switches"),
    ("clock_offset_ms", "ms", "gauge", "this node's clock less the median of its peers', by the mesh probes"),
)  # fmt: skip


class HostSource(Source):
    """Reads the same few files every tick; a kernel without PSI, or a file that fails, leaves its columns empty."""

    name: ClassVar[str] = "host"
    families: ClassVar[tuple[Family, ...]] = (HOST,)

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.host]``."""

        disk_space_every_s: float = option(10.0, "how often free space is asked for (it may hang on a dead mount)")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._rates = Rates(context.clock)
        self._cpu_before: list[float] = []
        directory = str(context.run_directory)
        self._space = Question("statvfs", context.clock, settings.disk_space_every_s, lambda: _free_bytes(directory))

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        files = self.context.files
        stat = files.text("/proc/stat")
        if not stat.startswith("cpu "):
            raise SourceError("missing", f"{files.path('/proc/stat')} has no line 'cpu'")
        row = {
            **self._cpu(stat),
            **self._load(files.text("/proc/loadavg")),
            **_memory(files.text("/proc/meminfo")),
            **self._pressure(),
            **self._disks(files.text("/proc/diskstats")),
            "tcp_retrans_per_s": self._rates.per_second(("tcp",), retransmits(files.text("/proc/net/snmp"))),
            "run_dir_free_bytes": NAN if (free := self._space.newest()) is None else free.value,
            "clock_offset_ms": self.context.facts.clock_offset_ms,
        }
        return Sample(HOST.block({"host": row}))

    def _cpu(self, stat: str) -> dict[str, float]:
        # of hundreds of processors only the first line, their sum; guest time (fields 9, 10) is contained in user and nice
        words = stat[: stat.find("\n")].split()[1:9]
        now = [number for word in words if (number := to_number(word)) is not None]
        before, self._cpu_before = self._cpu_before, now
        switches = to_number(stat.partition("\nctxt ")[2].partition("\n")[0])
        shares = cpu_shares(before, now) if len(before) == len(now) == CPU_FIELDS else {}
        return {**shares, "context_switches_per_s": self._rates.per_second(("ctxt",), switches)}

    def _load(self, loadavg: str) -> dict[str, float]:
        words = loadavg.split()
        if len(words) < 4:
            return {}
        load, runnable = to_number(words[0]), to_number(words[3].partition("/")[0])
        return {"load1": NAN if load is None else load, "runnable_tasks": NAN if runnable is None else runnable}

    def _pressure(self) -> dict[str, float]:
        row: dict[str, float] = {}
        for resource in ("cpu", "memory", "io"):
            for line in self.context.files.text(f"/proc/pressure/{resource}").splitlines():
                kind, _, rest = line.partition(" ")
                total_us = to_number(rest.rpartition("total=")[2])
                row[f"psi_{resource}_{kind}_ratio"] = self._rates.per_second(("psi", resource, kind), total_us, 1e-6)
        return row

    def _disks(self, diskstats: str) -> dict[str, float]:
        reads: list[float] = []
        writes: list[float] = []
        busy: list[float] = []
        for line in diskstats.splitlines():
            words = line.split()
            if len(words) < 13 or not WHOLE_DISK.fullmatch(words[2]):
                continue
            reads.append(to_number(words[5]) or 0.0)
            writes.append(to_number(words[9]) or 0.0)
            busy.append(self._rates.per_second(("disk", words[2]), to_number(words[12]), 1e-3))
        # without a whole disk there is nothing to read from, which is not the same as nothing being read
        return {
            "disk_read_bytes_per_s": self._rates.per_second(("read",), sum(reads) if reads else None, SECTOR_BYTES),
            "disk_write_bytes_per_s": self._rates.per_second(("write",), sum(writes) if writes else None, SECTOR_BYTES),
            "disk_busy_ratio": min(highest(busy), 1.0),
        }


def cpu_shares(before: list[float], now: list[float]) -> Row:
    """Shares of time between two ``cpu`` lines (user nice system idle iowait irq softirq steal).

    iowait may go back by a tick or two: each field's difference is floored at zero.
    """
    user, nice, system, idle, iowait, irq, softirq, steal = (max(0.0, b - a) for a, b in zip(before, now, strict=True))
    total = user + nice + system + idle + iowait + irq + softirq + steal
    if total <= 0:
        return {}
    return {
        "cpu_busy_ratio": (total - idle - iowait) / total,
        "cpu_user_ratio": (user + nice) / total,
        "cpu_system_ratio": (system + irq + softirq) / total,
        "cpu_iowait_ratio": iowait / total,
        "cpu_steal_ratio": steal / total,
    }


def retransmits(snmp: str) -> float | None:
    """``Tcp: RetransSegs`` of /proc/net/snmp: a line of names, then a line of values."""
    names, values = [*(line.split() for line in snmp.splitlines() if line.startswith("Tcp:")), [], []][:2]
    return to_number(dict(zip(names, values, strict=False)).get("RetransSegs", ""))


def _memory(meminfo: str) -> Row:
    total, available, swap, swap_free = (
        _kib(meminfo, name) for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    )
    row: dict[str, float] = {}
    if total and available is not None:
        row = {"mem_available_ratio": available / total, "mem_used_bytes": (total - available) * 1024}
    if swap is not None and swap_free is not None:
        row["swap_used_ratio"] = (swap - swap_free) / swap if swap else 0.0
    return row


def _kib(meminfo: str, name: str) -> float | None:
    """One line of /proc/meminfo; the other fifty are not taken apart for it."""
    words = line_value(meminfo, name).split()
    return to_number(words[0]) if words else None


def _free_bytes(directory: str) -> float:
    found = os.statvfs(directory)
    return float(found.f_bavail * found.f_frsize)
