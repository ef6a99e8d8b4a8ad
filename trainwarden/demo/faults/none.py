"""Nothing happens, and nothing may be done."""

from __future__ import annotations

import random
from typing import ClassVar

from trainwarden.demo.cluster import Cluster
from trainwarden.demo.faults.base import Expectation, Fault


class Nothing(Fault):
    """A healthy run with evaluations and checkpoints: any incident is a false alarm."""

    name: ClassVar[str] = "none"
    help: ClassVar[str] = "no fault: nothing may be done"
    expectation: ClassVar[Expectation] = Expectation()

    def inject(self, cluster: Cluster, number: int, rng: random.Random) -> str:
        del cluster, number, rng
        return "nothing at all"
