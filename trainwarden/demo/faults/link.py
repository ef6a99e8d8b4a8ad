"""A node's link on the training network fails."""

from __future__ import annotations

import random
import subprocess
from typing import ClassVar

from trainwarden.demo.cluster import Cluster
from trainwarden.demo.faults.base import Expectation, Fault
from trainwarden.demo.network import Namespaces
from trainwarden.errors import UnavailableError

SLOW = "rate 40mbit burst 32kbit latency 400ms"


class Link(Fault):
    """By seed: the switch port goes down, or the link carries a fraction of its rate both ways."""

    name: ClassVar[str] = "link"
    help: ClassVar[str] = "one node's training link slow or down (needs root)"
    needs_namespaces: ClassVar[bool] = True
    expectation: ClassVar[Expectation] = Expectation(
        kinds=("link_slow", "link_down"),
        executed=("checkpoint", "isolate", "restart"),
        optional=("checkpoint",),
        leaves=True,
    )

    def inject(self, cluster: Cluster, number: int, rng: random.Random) -> str:
        network = _namespaces(cluster)
        port = network.switch_port(number)
        if rng.random() < 0.5:
            _do("ip", "link", "set", port, "down")
            return f"switch port {port} of node {cluster.node(number)} set down"
        _do("tc", "qdisc", "add", "dev", port, "root", "tbf", *SLOW.split())
        _do(
            "ip",
            "netns",
            "exec",
            network.namespace(number),
            "tc",
            "qdisc",
            "add",
            "dev",
            "rail0",
            "root",
            "tbf",
            *SLOW.split(),
        )
        return f"training link of node {cluster.node(number)} limited to 40 Mbit/s both ways"


def _namespaces(cluster: Cluster) -> Namespaces:
    if not isinstance(cluster.network, Namespaces):
        raise UnavailableError("the fault `link` needs nodes in network namespaces")
    return cluster.network


def _do(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise UnavailableError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
