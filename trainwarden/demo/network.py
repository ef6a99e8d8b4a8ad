"""Two networks for the nodes of the demonstration: management and training, as on real machines.

Without root every node lives on loopback with an address of its own (127.77.x.y). With namespaces each node has `mgmt0` (telemetry,
commands) and `rail0` (gradients, probes) on two bridges, so that a fault of the training link leaves the telemetry standing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trainwarden.demo.seat import Seat, take_seat
from trainwarden.errors import UnavailableError

SERVICE_PORTS = 5


class Network(Protocol):
    """Where nodes live."""

    seat: Seat
    host_address: str
    """Address of the services (broker, store, actions) as seen from nodes."""
    rail_interface: str

    def rail_address(self, number: int) -> str:
        """Training-network address of node `number`."""
        ...

    def management_address(self, number: int) -> str:
        """Management address of node `number`."""
        ...

    def enter(self, number: int, command: Sequence[str]) -> list[str]:
        """`command` as it must be started to run on node `number`."""
        ...

    def up(self, nodes: int) -> None:
        """Create it."""
        ...

    def down(self) -> None:
        """Remove every trace of it."""
        ...


@dataclass
class Loopback:
    """All nodes on this host's loopback, told apart by address."""

    host_address: str = "127.0.0.1"
    rail_interface: str = "lo"
    seat: Seat = field(default_factory=lambda: take_seat(SERVICE_PORTS))

    def rail_address(self, number: int) -> str:
        return f"127.77.{self.seat.number}.{10 + number}"

    def management_address(self, number: int) -> str:
        return f"127.78.{self.seat.number}.{10 + number}"

    def enter(self, number: int, command: Sequence[str]) -> list[str]:
        del number
        return list(command)

    def up(self, nodes: int) -> None:
        del nodes

    def down(self) -> None:
        self.seat.leave()


@dataclass
class Namespaces:
    """One network namespace a node, two bridges on the host. Names carry `tag`, so that two demonstrations do not meet."""

    rail_interface: str = "rail0"
    seat: Seat = field(default_factory=lambda: take_seat(SERVICE_PORTS))
    _made: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tag = tag_of(self.seat.number)
        self.subnet = self.seat.number + 20
        self.host_address = f"10.78.{self.subnet}.1"

    def rail_address(self, number: int) -> str:
        return f"10.77.{self.subnet}.{10 + number}"

    def management_address(self, number: int) -> str:
        return f"10.78.{self.subnet}.{10 + number}"

    def namespace(self, number: int) -> str:
        """Name of a node's namespace."""
        return f"{self.tag}-n{number}"

    def switch_port(self, number: int) -> str:
        """Host end of a node's training link."""
        return f"{self.tag}r{number}"

    def enter(self, number: int, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(number), *command]

    def up(self, nodes: int) -> None:
        require_namespaces()
        self._bridge(f"{self.tag}-m", f"{self.host_address}/24")
        self._bridge(f"{self.tag}-r", None)
        for number in range(nodes):
            self._node(number)

    def down(self) -> None:
        for undo in reversed(self._made):
            subprocess.run(undo, check=False, capture_output=True)
        self._made.clear()
        self.seat.leave()

    def _bridge(self, name: str, address: str | None) -> None:
        self._do(["ip", "link", "add", name, "type", "bridge"], undo=["ip", "link", "del", name])
        if address is not None:
            self._do(["ip", "addr", "add", address, "dev", name])
        self._do(["ip", "link", "set", name, "up"])

    def _node(self, number: int) -> None:
        space = self.namespace(number)
        self._do(["ip", "netns", "add", space], undo=["ip", "netns", "del", space])
        self._do(["ip", "-n", space, "link", "set", "lo", "up"])
        links = (
            (f"{self.tag}m{number}", "mgmt0", f"{self.tag}-m", self.management_address(number)),
            (self.switch_port(number), "rail0", f"{self.tag}-r", self.rail_address(number)),
        )
        for port, interface, bridge, address in links:
            self._do(
                ["ip", "link", "add", port, "type", "veth", "peer", "name", interface, "netns", space],
                undo=["ip", "link", "del", port],
            )
            self._do(["ip", "link", "set", port, "master", bridge, "up"])
            self._do(["ip", "-n", space, "addr", "add", f"{address}/24", "dev", interface])
            self._do(["ip", "-n", space, "link", "set", interface, "up"])

    def _do(self, command: list[str], undo: list[str] | None = None) -> None:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            self.down()
            raise UnavailableError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        if undo is not None:
            self._made.append(undo)


def tag_of(seat: int) -> str:
    """What names of namespaces and links of the demonstration in this seat begin with."""
    return f"tw{seat}"


def remove_namespaces(seat: int) -> None:
    """Remove what a demonstration left that was killed in this seat."""
    tag = tag_of(seat)
    spaces = [path.name for path in Path("/run/netns").glob(f"{tag}-n*")]
    links = [path.name for path in Path("/sys/class/net").glob(f"{tag}[-mr]*")]
    for undo in (
        *(["ip", "netns", "del", space] for space in spaces),
        *(["ip", "link", "del", link] for link in links),
    ):
        subprocess.run(undo, check=False, capture_output=True)


def require_namespaces() -> None:
    """Raise with the reason when network namespaces cannot be made here."""
    if os.geteuid() != 0:
        raise UnavailableError(
            "the fault `link` needs root: it puts each node into a network namespace; run it with sudo"
        )
    if shutil.which("ip") is None or not Path("/proc/self/ns/net").exists():
        raise UnavailableError(
            "the fault `link` needs the `ip` command (package iproute2) and network namespaces in the kernel"
        )
