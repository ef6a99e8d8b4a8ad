"""A rank's disk becomes slow."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import ClassVar

from trainwarden.demo.cluster import Cluster
from trainwarden.demo.faults.base import Expectation, Fault
from trainwarden.demo.groups import ControlGroup, group_of


class SlowLoader(Fault):
    """Read rate of the rank's disk limited by cgroup where permitted; else the shard's delay file makes its reads late."""

    name: ClassVar[str] = "slow-loader"
    help: ClassVar[str] = "one rank's data comes slowly"
    expectation: ClassVar[Expectation] = Expectation(kinds=("data_slow",), recommended=("rebalance",))

    def __init__(self) -> None:
        self._group: ControlGroup | None = None

    def inject(self, cluster: Cluster, number: int, rng: random.Random) -> str:
        pid, rate = cluster.trainer_pid(number), rng.choice((384, 448, 512)) * 1024
        group = group_of(cluster.network.seat.number, "blkio")
        if group.make() and group.limit_reads(disk_of(cluster.shard(number)), rate):
            self._group = group
            group.add(pid)
            return f"reads of process {pid} limited to {rate // 1024} KiB/s"
        group.remove()
        cluster.delay_file(number).write_text("130")
        return "every read of the shard delayed by 130 ms (no permission, or no block device, for a cgroup limit)"

    def undo(self, cluster: Cluster, number: int) -> None:
        cluster.delay_file(number).unlink(missing_ok=True)
        if self._group is not None:
            self._group.remove()


def disk_of(path: Path) -> tuple[int, int]:
    """Major and minor number of the whole disk under a file's file system."""
    device = path.stat().st_dev
    sysfs = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if (sysfs / "partition").exists():
        major, minor = (sysfs.resolve().parent / "dev").read_text().split(":")
        return int(major), int(minor)
    return os.major(device), os.minor(device)
