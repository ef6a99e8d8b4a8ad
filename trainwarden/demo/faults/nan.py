"""A rank's data turns to garbage."""

from __future__ import annotations

import random
import struct
from typing import ClassVar

from trainwarden.demo.cluster import Cluster
from trainwarden.demo.data import BATCH, PIXELS, RECORD_BYTES
from trainwarden.demo.faults.base import Expectation, Fault

TRANSIENT_S = 2.5
"""The corruption goes away by itself, as a bad host buffer does; data that stays bad would come back after every restart."""


class NotANumber(Fault):
    """All images of one node's shard become NaN on its disk for a while: its gradients are NaN, and then everybody's weights."""

    name: ClassVar[str] = "nan"
    help: ClassVar[str] = "one rank reads NaN"
    expectation: ClassVar[Expectation] = Expectation(kinds=("non_finite",), executed=("restart",))

    def __init__(self) -> None:
        self._saved: bytes | None = None

    def inject(self, cluster: Cluster, number: int, rng: random.Random) -> str:
        del rng
        self._saved = cluster.shard(number).read_bytes()
        poison = struct.pack("<f", float("nan")) * (BATCH * PIXELS)
        with cluster.shard(number).open("r+b") as shard:
            for record in range(len(self._saved) // RECORD_BYTES):
                shard.seek(record * RECORD_BYTES)
                shard.write(poison)
        return f"every image in node {cluster.node(number)}'s shard overwritten with NaN for {TRANSIENT_S} s"

    def progressed(self, cluster: Cluster, number: int, seconds: float) -> None:
        if seconds > TRANSIENT_S:
            self.undo(cluster, number)

    def undo(self, cluster: Cluster, number: int) -> None:
        if self._saved is None:
            return
        with cluster.shard(number).open("r+b") as shard:
            shard.write(self._saved)
        self._saved = None
