"""Processor time, memory and descriptors of a process and its children."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Footprint:
    """Of all processes together; times by process, with the parent's own name first."""

    cpu_s: dict[str, float]
    pss_bytes: dict[str, int]
    files: int
    threads: int

    @property
    def total_cpu_s(self) -> float:
        """Seconds of all."""
        return sum(self.cpu_s.values())

    @property
    def total_pss_bytes(self) -> int:
        """Memory of all, shared pages by their share."""
        return sum(self.pss_bytes.values())


def footprint(pid: int) -> Footprint:
    """Of a process and what it started."""
    members = {"agent": pid, **{_name(child): child for child in _children(pid)}}
    return Footprint(
        {name: _cpu_s(member) for name, member in members.items()},
        {name: _pss_bytes(member) for name, member in members.items()},
        sum(len(os.listdir(f"/proc/{member}/fd")) for member in members.values()),
        sum(len(os.listdir(f"/proc/{member}/task")) for member in members.values()),
    )


def family_of(pid: int) -> list[int]:
    """A process and what it started."""
    return [pid, *_children(pid)]


def _children(pid: int) -> list[int]:
    """Of every thread: a process belongs to the thread that started it."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            text = Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii")
        except OSError:
            continue  # that thread has just ended
        found += [int(child) for child in text.split()]
    return [member for child in found for member in (child, *_children(child))]


def _name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    script = next((Path(word).stem for word in words if word.endswith(".py")), "")
    return f"{script or Path(words[0]).name} {pid}"


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (float(fields[11]) + float(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
