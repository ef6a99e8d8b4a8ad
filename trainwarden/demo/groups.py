"""Control groups, version 1 or 2, for hurting a process on purpose."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
CONTROLLERS = ("cpu", "blkio")


class ControlGroup:
    """A group of one controller (``cpu`` or ``blkio``). `make` says whether it could be made here."""

    def __init__(self, controller: str, name: str) -> None:
        self._v1 = (ROOT / controller).is_dir()
        self._parent = ROOT / controller if self._v1 else ROOT
        self._path = self._parent / name

    def make(self) -> bool:
        """Create the group; False without permission or controller."""
        try:
            self._path.mkdir(exist_ok=True)
        except OSError:
            return False
        return os.access(self._path / "cgroup.procs", os.W_OK)

    def add(self, pid: int) -> None:
        """Move a process in, with all its threads."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def limit_cpu(self, cores: float) -> None:
        """At most `cores` of CPU time."""
        quota = max(1000, int(cores * PERIOD_US))
        if self._v1:
            (self._path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._path / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._path / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    def limit_reads(self, device: tuple[int, int], bytes_per_s: int) -> bool:
        """At most `bytes_per_s` read from a block device; False when the device cannot be limited."""
        major, minor = device
        try:
            if self._v1:
                (self._path / "blkio.throttle.read_bps_device").write_text(f"{major}:{minor} {bytes_per_s}")
            else:
                (self._path / "io.max").write_text(f"{major}:{minor} rbps={bytes_per_s}")
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Put its processes back into the parent and remove the group."""
        with contextlib.suppress(OSError):
            for pid in (self._path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self._parent / "cgroup.procs").write_text(pid)
            self._path.rmdir()


def group_of(seat: int, controller: str) -> ControlGroup:
    """The group of a demonstration, by its seat, so that the next one in this seat finds what a killed one left."""
    return ControlGroup(controller, f"trainwarden-demo-{seat}")
