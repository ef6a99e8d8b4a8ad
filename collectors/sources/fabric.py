"""The node's own wiring: which adapter each accelerator is near to, and the switch at the other end of each cable."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from collectors.base import Context, Sample, Source
from collectors.files import Files
from collectors.topology import ibnet, lldp, pci
from collectors.topology.background import Answer, output_of, read_text
from trainwarden.records import Gap
from trainwarden.settings import option

SIOCGIFADDR = 0x8915
LLDP_SOCKETS = ("/run/lldpd.socket", "/run/lldpd/lldpd.socket")


@dataclass(frozen=True)
class Wiring:
    """What was found: `affinity` attributes, `uplinks` interface → (switch, port), number of accelerators."""

    affinity: dict[str, str]
    uplinks: dict[str, tuple[str, str]]
    gpus: int
    netdevs: dict[str, str]


class FabricSource(Source):
    """PCI and NUMA from sysfs; LLDP neighbours from a file or from lldpd; InfiniBand uplinks from a file that somebody else writes.

    ``leaf`` is the switch above the interface that carries the rail address, or the one switch that all cables lead to; where each adapter
    has a leaf of its own, all of them stand in ``uplinks``. The collector itself sends no management datagrams.
    """

    name: ClassVar[str] = "fabric"
    every_ticks: ClassVar[int] = 5
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.fabric]``."""

        lldp_file: str = option(
            "", "output of `lldpctl -f json`, kept fresh by somebody else; empty: lldpd is asked where it runs"
        )
        lldpctl: str = option("lldpctl", "command that asks lldpd; empty: never")
        ib_file: str = option("", "output of `ibnetdiscover` or `iblinkinfo`, kept fresh by somebody else")
        rail_interface: str = option(
            "", "interface or RDMA device on the training network; default: the one with the rail address"
        )
        timeout_s: float = option(5.0, "lldpctl is killed after so long")
        every_s: float = option(300.0, "how often the wiring is read")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._problems: dict[str, str] = {}
        self._answer: Answer[Wiring] = Answer("fabric", context.clock, settings.every_s, self._read)
        self._told = 0

    def sample(self, now_ns: int) -> Sample:
        found = self._answer.refresh()
        if self._answer.count != self._told:
            self._told = self._answer.count
            if found is not None:
                self._tell(found, now_ns)
        reasons = ["hung"] if self._answer.overdue else [self._answer.reason, *self._problems.values()]
        return Sample(gaps=tuple(Gap(self.name, reason) for reason in dict.fromkeys(reasons) if reason))

    def explain(self) -> str:
        found = self._answer.last
        if found is None:
            return self._answer.problem or "sysfs has not answered yet"
        cables = (
            f"{len(found.uplinks)} cables known"
            if found.uplinks
            else "no cable known: run lldpd, or set lldp_file or ib_file"
        )
        wrong = "".join(f"; {problem}" for problem in self._problems)
        return f"{found.gpus} accelerators, {found.affinity.get('gpu_nic') or 'no adapter near one'}; {cables}{wrong}"

    def _read(self) -> Wiring:
        files = Files(Path(self.context.files.root or "/"), self.context.clock)
        gpus, nics = pci.accelerators(files), pci.adapters(files)
        netdevs = {
            nic.name: name for nic in nics for name in files.names(f"/sys/class/infiniband/{nic.name}/device/net")[:1]
        }
        self._problems = {}
        uplinks = {**self._cables_of_lldp(), **self._cables_of_ib(files, [nic.name for nic in nics])}
        files.close()
        return Wiring(pci.affinity(gpus, nics), uplinks, len(gpus), netdevs)

    def _cables_of_lldp(self) -> dict[str, tuple[str, str]]:
        command = self._lldp_command()
        if not self.settings.lldp_file and not command:
            return {}
        try:
            if self.settings.lldp_file:
                text = read_text(self.settings.lldp_file)
            else:
                text = output_of((command, "-f", "json"), self.settings.timeout_s)
            return {near.interface: (near.switch, near.port) for near in lldp.parse_lldp(text)}
        except (OSError, ValueError) as error:
            self._note("LLDP", error)
            return {}

    def _cables_of_ib(self, files: Files, adapters: list[str]) -> dict[str, tuple[str, str]]:
        if not self.settings.ib_file:
            return {}
        guids = {name: files.text(f"/sys/class/infiniband/{name}/node_guid") for name in adapters}
        try:
            uplinks = ibnet.parse_fabric(read_text(self.settings.ib_file))
        except (OSError, ValueError) as error:
            self._note("InfiniBand", error)
            return {}
        node = self.context.node.partition(".")[0]
        found = ibnet.uplinks_of(uplinks, guids, node)
        return {name: (uplink.switch, str(uplink.switch_port)) for name, uplink in found.items()}

    def _note(self, what: str, error: Exception) -> None:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        code = (
            "malformed"
            if isinstance(error, ValueError)
            else "permission"
            if isinstance(error, PermissionError)
            else "unreadable"
        )
        self._problems = {**self._problems, f"{what}: {text}": f"{what.lower()}_{code}"}

    def _lldp_command(self) -> str:
        """Only where lldpd runs, and on the machine's own tree: in a container, give `lldp_file`."""
        present = self.context.files.live and any(os.path.exists(path) for path in LLDP_SOCKETS)
        return (shutil.which(self.settings.lldpctl) or "") if present and self.settings.lldpctl else ""

    def _tell(self, found: Wiring, now_ns: int) -> None:
        facts = self.context.facts
        changed = facts.gpus != found.gpus
        facts.gpus = found.gpus
        before = facts.board.merged("node")
        cables = {name: f"{switch}:{port}" if port else switch for name, (switch, port) in found.uplinks.items()}
        said = {**found.affinity, "leaf": leaf_of(found, self._rail()), "uplinks": _table(cables)}
        facts.board.tell("node", self.name, "discovered", said, now_ns)
        if changed or facts.board.merged("node") != before:
            self.context.outlet.topology_changed()

    def _rail(self) -> str:
        return self.settings.rail_interface or interface_of(
            self.context.facts.rail_address if self.context.files.live else ""
        )


def leaf_of(found: Wiring, rail: str) -> str:
    """The switch above the rail interface (or its RDMA device, or the one above all); empty when it is not clear."""
    names = [
        rail,
        *(adapter for adapter, netdev in found.netdevs.items() if netdev == rail),
        found.netdevs.get(rail, ""),
    ]
    above = next((found.uplinks[name][0] for name in names if name in found.uplinks), "")
    switches = {switch for switch, _ in found.uplinks.values()}
    return above or (next(iter(switches)) if len(switches) == 1 and not rail else "")


def interface_of(address: str) -> str:
    """The interface that has an IPv4 address; empty when none has."""
    if not address:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # this one has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _table(values: dict[str, str]) -> str:
    """Names of switches may hold blanks, which part the entries of an attribute."""
    return pci.words({key.replace(" ", "_"): value.replace(" ", "_") for key, value in values.items()})
