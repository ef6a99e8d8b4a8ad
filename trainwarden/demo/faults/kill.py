"""A training process dies."""

from __future__ import annotations

import os
import random
import signal
from typing import ClassVar

from trainwarden.demo.cluster import Cluster
from trainwarden.demo.faults.base import Expectation, Fault


class Kill(Fault):
    """SIGKILL, as by the out-of-memory killer or a crashed driver."""

    name: ClassVar[str] = "kill"
    help: ClassVar[str] = "SIGKILL to one rank"
    expectation: ClassVar[Expectation] = Expectation(kinds=("rank_killed",), executed=("restart",), within_s=2.0)

    def inject(self, cluster: Cluster, number: int, rng: random.Random) -> str:
        del rng
        pid = cluster.trainer_pid(number)
        os.kill(pid, signal.SIGKILL)
        return f"SIGKILL to process {pid}"
