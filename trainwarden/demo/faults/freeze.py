"""A training process stops without dying."""

from __future__ import annotations

import os
import random
import signal
from typing import ClassVar

from trainwarden.demo.cluster import Cluster
from trainwarden.demo.faults.base import Expectation, Fault


class Freeze(Fault):
    """SIGSTOP: the process is there, holds its sockets and does nothing; all others wait for it in the collective."""

    name: ClassVar[str] = "freeze"
    help: ClassVar[str] = "SIGSTOP to one rank (default)"
    expectation: ClassVar[Expectation] = Expectation(kinds=("rank_frozen",), executed=("restart",), within_s=5.0)

    def inject(self, cluster: Cluster, number: int, rng: random.Random) -> str:
        del rng
        pid = cluster.trainer_pid(number)
        os.kill(pid, signal.SIGSTOP)
        return f"SIGSTOP to process {pid}"
