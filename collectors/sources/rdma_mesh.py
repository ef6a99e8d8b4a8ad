"""Pings between collectors over RDMA: round trips and losses per peer and port, through the adapters' queues that training uses.

Each active port has one unreliable-datagram queue pair, asks the same peers as the source `mesh` and answers their pings, in a child
process: calls of libibverbs go into the kernel and may hang. Nodes learn each other's addresses from the topology topic.

No adapter was at hand: all of it has only met a stand-in library at libibverbs' C interface.
"""

from __future__ import annotations

import fnmatch
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from collectors.base import Context, Family, Row, Sample, Source, family
from collectors.nvidia.parent import Keeper
from collectors.topology.rotation import RDMA_SHARE_PER_S
from collectors.verbs import wire
from collectors.verbs.addresses import (
    ETHERNET,
    INFINIBAND,
    PORTS_MAX,
    Address,
    GidEntry,
    announced,
    announcement,
    gid_index,
    opposite,
)
from collectors.verbs.doubt import Doubt
from collectors.verbs.doubt import Row as PathRow
from collectors.verbs.silence import Silence
from collectors.verbs.window import Window
from trainwarden.clock import NS_PER_S
from trainwarden.records import Gap, LogEvent
from trainwarden.settings import option

logger = logging.getLogger(__name__)

RDMA_MESH = family(
    "rdma_mesh", "rdma_mesh",
    ("rtt_ms", "ms", "gauge", "median round trip over RDMA of the pings answered in this port's last turn, less the peers' own delay"),
    ("rtt_max_ms", "ms", "gauge", "longest of them"),
    ("lost_ratio", "ratio", "gauge", "share of the pings of that turn that were not answered in time"),
    ("asked_peers_count", "peers", "gauge", "peers asked in that turn"),
    ("silent_peers_count", "peers", "gauge", "of these, peers that answered none of its pings"),
)  # fmt: skip

CHILD = Path(__file__).parents[1] / "verbs" / "child.py"
CLASS, DEVICES = "/sys/class/infiniband", "/dev/infiniband"
LOOK_NS = 60 * NS_PER_S
REST_NS = 600 * NS_PER_S
"""A node whose library is missing is looked at again after so long: somebody may have installed it."""
SILENT_S = 6.0
LATE_S = 3.0
"""A turn is over so long before the next one of the same port that its last answers and losses have been told."""
KNOWN_MAX = 4096
GIDS_MAX = 256


@dataclass(frozen=True)
class Found:
    """An active port in /sys."""

    name: str
    layer: str
    gid_index: int


class RdmaMeshSource(Source):
    """Pings over every active RDMA port.

    Without a device node ``/dev/infiniband/uverbs*`` nothing is started and nothing said. A row is one port of this node and says of all
    peers that it asked in its last turn; ports take turns, and in between a row stands. The peer's port of the same name answers, or that
    of the same place. Losses of a peer that is silent on all ports are told when it answers again or after 90 s: an agent that was started
    anew listens elsewhere, and its peers do not know at once. A port over which none of several peers answers any more is the event
    `rdma_silent`, which names them, and `rdma_answers` when one does again.

    Self-metrics: ``tw_process_cpu_seconds`` with ``helper`` is the child's, ``tw_probe_refused_total`` counts what was not answered.
    """

    name: ClassVar[str] = "rdma_mesh"
    families: ClassVar[tuple[Family, ...]] = (RDMA_MESH,)

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.rdma_mesh]``; whom to ask is chosen by the source `mesh`."""

        library: str = option("libibverbs.so.1", "the library: a name that the loader finds, or a path")
        devices: str = option("*", "devices to ask over, patterns with blanks between: mlx5_[0-7]")
        gid_index: int = option(-1, "which GID to speak from; -1: on Ethernet RoCE v2 with an IPv4 address, else 0")
        service_level: int = option(0, "InfiniBand service level, or priority")
        traffic_class: int = option(0, "traffic class of RoCE (DSCP times 4): that of training sees its queue")
        pkey_index: int = option(0, "place of the partition key in the port's table")
        probes_per_s: float = option(1.0, "pings per peer and second, over all ports together")
        timeout_ms: float = option(200.0, "an answer later than this is a loss")
        answers_per_s: float = option(50.0, "answers per second and source address")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._started = False
        self._looked_ns: int | None = None
        self._rest_ns = 0
        self._ports: dict[str, Found] = {}
        self._keeper: Keeper | None = None
        self._report: wire.Report | None = None
        self._known: dict[str, dict[str, Address]] = {}
        self._news = 0
        self._orders = b""
        self._ordered: tuple[Any, ...] = ()
        self._restarts = 0
        self._doubt = Doubt()
        self._silence = Silence()
        self._window = Window()
        self._bad = 0

    def start(self) -> None:
        self._started = True

    def hear(self, node: str, text: str) -> None:
        """What a node announces as ``rdma_address``; empty: nothing. Called by another thread."""
        ports = announced(text) if self._ports and node != self.context.node else {}
        if ports == self._known.get(node, {}):
            return
        self._news += 1
        if not ports:
            del self._known[node]
        elif node in self._known or len(self._known) < KNOWN_MAX:
            self._known[node] = ports

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        self._look()
        if not self._ports:
            return Sample()
        if not self._started:
            return Sample(gaps=(Gap(self.name, "not_started"),))
        if self._rest_ns > self.context.clock.monotonic_ns():
            return Sample(gaps=(Gap(self.name, "no_library"),))
        rows = self._hear_child()
        if self._keeper is None:
            return Sample(gaps=(Gap(self.name, "no_library"),))
        self._announce()
        self._order(self._keeper)
        return Sample(RDMA_MESH.block(self._weighed(rows)), self._gaps(self._keeper))

    def explain(self) -> str:
        if self._ports:
            kinds = ", ".join(f"{name} ({port.layer}, GID {port.gid_index})" for name, port in self._ports.items())
            return f"would ping over {kinds}"
        seen = self.context.files.names(CLASS)
        return f"{', '.join(seen)}: no device node in {DEVICES}, or no active port that `devices` names" if seen else ""

    def close(self) -> None:
        self._end_child()

    # --- what is here -----------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look for ports once a minute; when others are there than before, the child begins anew with them."""
        now_ns = self.context.clock.monotonic_ns()
        if self._looked_ns is not None and now_ns - self._looked_ns < LOOK_NS:
            return
        self._looked_ns = now_ns
        found = active_ports(self) if self._has_device_nodes() else {}
        if found != self._ports:
            self._ports = found
            self._end_child()

    def _has_device_nodes(self) -> bool:
        return any(name.startswith("uverbs") for name in self.context.files.names(DEVICES))

    # --- the child ----------------------------------------------------------------------------------------------------------------

    def _hear_child(self) -> dict[str, PathRow]:
        if self._keeper is None:
            self._keeper = Keeper(self.context.clock, self._options(), SILENT_S, (CHILD, "RDMA"))
        rows: dict[str, PathRow] = {}
        for message in self._keeper.poll():
            try:
                report = wire.report_of(message)
            except wire.WireError as error:
                self._bad += 1
                log = logger.warning if self._bad == 1 else logger.debug
                log("source %s: the RDMA helper sent %s (%d such so far)", self.name, error, self._bad)
                continue
            self._take(report)
            rows.update(report.rows)
        if self._keeper is not None and self._keeper.restarts != self._restarts:
            self._restarts, self._report, self._ordered = self._keeper.restarts, None, ()
        return rows

    def _take(self, report: wire.Report) -> None:
        if report.problem == wire.NO_LIBRARY:
            self._rest_ns = self.context.clock.monotonic_ns() + REST_NS
            self._end_child()
            return
        self._report = report
        self.context.metrics.set("tw_process_cpu_seconds", report.cpu_ms / 1000, helper=self.name)
        for reason, count in report.refused.items():
            self.context.metrics.count("tw_probe_refused_total", count, reason=f"rdma_{reason}")

    def _end_child(self) -> None:
        keeper, self._keeper = self._keeper, None
        self._report, self._ordered, self._restarts = None, (), 0
        self._announce()
        if keeper is not None:
            keeper.close()

    def _options(self) -> dict[str, Any]:
        wanted, chance = self.settings, random.SystemRandom()
        ports = [
            {"device": port.name.rpartition("/")[0], "number": int(port.name.rpartition("/")[2]), "gid_index": port.gid_index,
             "qkey": chance.randrange(1, 1 << 31), "service_level": wanted.service_level, "traffic_class": wanted.traffic_class,
             "pkey_index": wanted.pkey_index}
            for port in self._ports.values()
        ]  # fmt: skip
        return {
            "library": wanted.library,
            "ports": ports,
            "timeout_s": wanted.timeout_ms / 1000,
            "answers_per_s": wanted.answers_per_s,
        }

    # --- whom to ask ----------------------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        rails = self._report.rails if self._report is not None else {}
        text = announcement({name: address for name, (_, address) in rails.items() if address is not None})
        facts = self.context.facts
        if text != facts.rdma_address:
            facts.rdma_address = text
            self.context.outlet.topology_changed()
        facts.rdma_pings = bool(text)

    def _order(self, keeper: Keeper) -> None:
        """Tell the child whom to ask, when that is news. Who is asked elsewhere than before begins without losses."""
        peers = self.context.facts.probed
        if (what := (peers, self._news, self._ports)) == self._ordered:
            return
        self._doubt.keep(peers)
        targets: dict[str, list[tuple[str, Address]]] = {}
        own = {name: port.layer for name, port in self._ports.items()}
        for peer in peers:
            ports = self._known.get(peer, {})
            for name, other in opposite(own, ports).items():
                targets.setdefault(name, []).append((f"{peer}/{name}", ports[other]))
        orders = wire.orders(self._period_s(len(peers)), targets)
        if keeper.send(orders):
            for peer in changed_peers(self._orders, targets):
                self._doubt.forget(peer)
            self._orders, self._ordered = orders, what

    def _period_s(self, peers: int) -> float:
        return float(max(1.0 / self.settings.probes_per_s, peers / RDMA_SHARE_PER_S))

    # --- what it says -------------------------------------------------------------------------------------------------------------

    def _weighed(self, rows: Mapping[str, PathRow]) -> dict[str, Row]:
        now_ns, facts = self.context.clock.monotonic_ns(), self.context.facts
        told = self._doubt.weigh(rows, facts.agents_gone, now_ns)
        for port, silent in self._silence.note(told, facts.probed):
            self.context.outlet.log(silence_event(port, silent), urgent=False)
        self._window.add(told, now_ns)
        cycle_s = self._period_s(len(facts.probed)) * len(self._ports)
        return self._window.rows(now_ns - int((cycle_s + LATE_S) * NS_PER_S))

    def _gaps(self, keeper: Keeper) -> tuple[Gap, ...]:
        if keeper.silent:
            return (Gap(self.name, "helper_silent"),)
        if self._report is None:
            return (Gap(self.name, "starting" if not keeper.restarts else "helper_restarting"),)
        return tuple(Gap(self.name, f"{state}:{name}") for name, (state, _) in self._report.rails.items() if state)


def silence_event(port: str, silent: Sequence[str]) -> LogEvent:
    """That a port speaks to nobody any more (`silent` peers answered over it before), or that it is answered again."""
    code = "rdma_silent" if silent else "rdma_answers"
    what = f"{len(silent)} peers answered over it before and none does now" if silent else "peers answer again"
    attributes = {"port": port, **({"peers": " ".join(silent)[:500]} if silent else {})}
    severity = "warning" if silent else "info"
    return LogEvent(source="rdma_mesh", severity=severity, code=code, line=f"{port}: pings over RDMA: {what}", template_id=code,
                    attributes=attributes)  # fmt: skip


def active_ports(source: RdmaMeshSource) -> dict[str, Found]:
    """Ports of the node whose link is up and that the settings name, by name; `PORTS_MAX` at most."""
    files, found = source.context.files, dict[str, Found]()
    for device in files.names(CLASS):
        if not any(fnmatch.fnmatchcase(device, pattern) for pattern in source.settings.devices.split()):
            continue
        for number in files.names(f"{CLASS}/{device}/ports"):
            port = f"{CLASS}/{device}/ports/{number}"
            layer = ETHERNET if files.text(f"{port}/link_layer") == "Ethernet" else INFINIBAND
            if number.isdecimal() and files.text(f"{port}/state").startswith("4") and len(found) < PORTS_MAX:
                found[f"{device}/{number}"] = Found(f"{device}/{number}", layer, gid_of(source, port, layer))
            files.forget(port)
    return found


def gid_of(source: RdmaMeshSource, port: str, layer: str) -> int:
    """Place of the GID that the port is to speak from."""
    chosen = int(source.settings.gid_index)
    return chosen if chosen >= 0 else gid_index(layer, gid_table(source, port) if layer == ETHERNET else ())


def gid_table(source: RdmaMeshSource, port: str) -> list[GidEntry]:
    """The port's GIDs with their kinds; most places of the table are empty, and reading those is an error."""
    files, table = source.context.files, list[GidEntry]()
    for index in sorted(int(name) for name in files.names(f"{port}/gid_attrs/types") if name.isdecimal())[:GIDS_MAX]:
        if kind := files.text(f"{port}/gid_attrs/types/{index}"):
            table.append(GidEntry(index, files.text(f"{port}/gids/{index}"), kind))
    return table


def changed_peers(before: bytes, after: Mapping[str, list[tuple[str, Address]]]) -> set[str]:
    """Nodes that are asked at another address than by the orders `before`."""
    old = wire.orders_of(before)[1] if before else {}
    known = {path: address for paths in old.values() for path, address in paths}
    return {
        path.rsplit("/", 2)[0]
        for paths in after.values()
        for path, address in paths
        if known.get(path, address) != address
    }
