"""A rank loses its processor."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from typing import ClassVar

from trainwarden.demo.cluster import Cluster
from trainwarden.demo.faults.base import Expectation, Fault
from trainwarden.demo.groups import ControlGroup


class Slow(Fault):
    """CPU quota of a tenth of a core by cgroup where permitted, else three busy processes on the rank's own core."""

    name: ClassVar[str] = "slow"
    help: ClassVar[str] = "one rank loses CPU"
    expectation: ClassVar[Expectation] = Expectation(
        kinds=("compute_slow",), executed=("checkpoint", "isolate", "restart"), leaves=True
    )

    def __init__(self) -> None:
        self._group: ControlGroup | None = None
        self._burners: list[subprocess.Popen[bytes]] = []

    def inject(self, cluster: Cluster, number: int, rng: random.Random) -> str:
        pid, share = cluster.trainer_pid(number), rng.choice((0.08, 0.10, 0.12))
        group = ControlGroup("cpu", f"trainwarden-slow-{os.getpid()}")
        if group.make():
            self._group = group
            group.limit_cpu(share)
            group.add(pid)
            return f"CPU quota of {share:.0%} of a core for process {pid}"
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
        self._burners = [subprocess.Popen([sys.executable, *command]) for _ in range(5)]
        return f"process {pid} shares core {core} with five busy processes (no permission for a cgroup quota)"
