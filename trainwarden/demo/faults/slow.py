"""A rank loses its processor."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from trainwarden.demo.cluster import Cluster
from trainwarden.demo.faults.base import Expectation, Fault
from trainwarden.demo.groups import ControlGroup, group_of
from trainwarden.embedded.tether import tethered

MIN_SHARE = 0.01
MEASURE_S = 1.0


class Slow(Fault):
    """CPU quota of a third of what the rank uses, by cgroup where permitted, else five busy processes on the rank's own core."""

    name: ClassVar[str] = "slow"
    help: ClassVar[str] = "one rank loses CPU"
    expectation: ClassVar[Expectation] = Expectation(
        kinds=("compute_slow",), executed=("checkpoint", "isolate", "restart"), leaves=True
    )

    def __init__(self) -> None:
        self._group: ControlGroup | None = None
        self._burners: list[subprocess.Popen[bytes]] = []
        self._used = 0.0

    def prepare(self, cluster: Cluster, number: int) -> None:
        self._used = cores_used(cluster.trainer_pid(number))

    def inject(self, cluster: Cluster, number: int, rng: random.Random) -> str:
        pid = cluster.trainer_pid(number)
        share = max(MIN_SHARE, self._used * rng.choice((0.25, 0.30, 0.35)))
        group = group_of(cluster.network.seat.number, "cpu")
        if group.make():
            self._group = group
            group.limit_cpu(share)
            group.add(pid)
            return f"CPU quota of {share:.1%} of a core for process {pid}, a third of what it used"
        return self._burn(pid)

    def undo(self, cluster: Cluster, number: int) -> None:
        if self._group is not None:
            self._group.remove()
        for burner in self._burners:
            burner.send_signal(signal.SIGKILL)
            burner.wait()
        self._burners.clear()

    def _burn(self, pid: int) -> str:
        core = max(os.sched_getaffinity(0))
        os.sched_setaffinity(pid, {core})
        command = ["-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"]
        self._burners = [subprocess.Popen(tethered([sys.executable, *command])) for _ in range(5)]
        return f"process {pid} shares core {core} with five busy processes (no permission for a cgroup quota)"


def cores_used(pid: int) -> float:
    """Cores that a process keeps busy, over a second."""
    before = _cpu_seconds(pid)
    time.sleep(MEASURE_S)
    return (_cpu_seconds(pid) - before) / MEASURE_S


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
