"""The kernel says that a GPU is gone."""

from __future__ import annotations

import random
from typing import ClassVar

from trainwarden.demo.cluster import Cluster
from trainwarden.demo.faults.base import Expectation, Fault

LINE = "[{uptime:12.6f}] NVRM: Xid (PCI:0000:{bus:02x}:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


class XidLog(Fault):
    """The line that the NVIDIA driver writes for Xid 79 reaches the node's kernel log."""

    name: ClassVar[str] = "xid-log"
    help: ClassVar[str] = "Xid 79 in one node's kernel log"
    expectation: ClassVar[Expectation] = Expectation(
        kinds=("fatal_code",), executed=("checkpoint", "isolate", "restart"), leaves=True
    )

    def inject(self, cluster: Cluster, number: int, rng: random.Random) -> str:
        line = LINE.format(uptime=rng.uniform(1e4, 1e6), bus=rng.choice((0x19, 0x3B, 0x4E, 0x9B, 0xCB)))
        with cluster.kernel_log(number).open("a") as log:
            log.write(line)
        return f"kernel log of {cluster.node(number)}: {line.strip()}"
