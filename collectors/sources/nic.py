"""Network interfaces (/proc/net/dev, /sys/class/net): traffic, link state, lost carriers, and what each is for."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from collectors.base import NAN, Context, Family, Rates, Row, Sample, Source, family
from collectors.devices import Devices
from collectors.files import Files
from collectors.network.carrier import CarrierNews, Carriers
from collectors.network.roles import ROLES, Neighbours, checked_roles, compiled, default_routes
from trainwarden.clock import NS_PER_S
from trainwarden.records import Gap, LogEvent
from trainwarden.settings import option

SIOCGIFFLAGS, SIOCGIFADDR = 0x8913, 0x8915
IFF_UP, IFF_RUNNING = 0x1, 0x40

NIC = family(
    "nic", "nic",
    ("up", "bool", "state", "1 while switched on (interfaces) or physically linked (RDMA ports)"),
    ("carrier", "bool", "state", "1 while the link has a partner; RDMA ports: 1 while active"),
    ("rx_bytes_per_s", "bytes/s", "counter", "received"),
    ("tx_bytes_per_s", "bytes/s", "counter", "sent"),
    ("rx_packets_per_s", "1/s", "counter", "packets received"),
    ("tx_packets_per_s", "1/s", "counter", "packets sent"),
    ("rx_errors_per_s", "1/s", "counter", "receive errors"),
    ("tx_errors_per_s", "1/s", "counter", "send errors"),
    ("rx_dropped_per_s", "1/s", "counter", "received and thrown away"),
    ("tx_dropped_per_s", "1/s", "counter", "thrown away before sending"),
    ("carrier_changes_per_s", "1/s", "counter", "link lost or won"),
    ("speed_mbps", "Mbit/s", "gauge", "agreed speed"),
    ("role", "enum", "state", "0 unknown, 1 rail, 2 management, 3 storage"),
    ("symbol_errors_per_s", "1/s", "counter", "RDMA: symbol errors on the line"),
    ("link_downed_per_s", "1/s", "counter", "RDMA: times the link went down"),
    ("link_recovery_per_s", "1/s", "counter", "RDMA: link error recoveries"),
    ("rx_wait_per_s", "1/s", "counter", "RDMA: ticks in which data waited to be sent (no credits)"),
    ("out_of_sequence_per_s", "1/s", "counter", "RDMA: packets out of order"),
    ("retransmit_timeouts_per_s", "1/s", "counter", "RDMA: acknowledgements that did not come in time"),
    ("cnp_sent_per_s", "1/s", "counter", "RDMA: congestion notifications sent"),
    ("ecn_marked_per_s", "1/s", "counter", "RDMA: packets received with a congestion mark"),
    ("saturated_count", "counters", "state", "RDMA: counters stuck at their maximum, hence blind"),
)  # fmt: skip

DEV_COLUMNS = {
    "rx_bytes_per_s": 0, "rx_packets_per_s": 1, "rx_errors_per_s": 2, "rx_dropped_per_s": 3,
    "tx_bytes_per_s": 8, "tx_packets_per_s": 9, "tx_errors_per_s": 10, "tx_dropped_per_s": 11,
}  # fmt: skip
ROLES_EVERY_NS = 60 * NS_PER_S
SPEED_EVERY_NS = 10 * NS_PER_S
OWN_EVERY_NS = 30 * NS_PER_S
REMEMBERED_NAMES = 10_000


class NicSource(Source):
    """Interfaces of this network namespace. RDMA ports are rows of the same family, read by the source `rdma`.

    Which interfaces exist, and their traffic, comes from one file (/proc/net/dev), so virtual interfaces cost nothing more; state comes
    from /sys, or from the kernel directly where /sys shows another namespace. A carrier that stays away is the event `link_drop`, one
    that comes back `link_flap`; the kernel's own count of losses shows those between two ticks.
    """

    name: ClassVar[str] = "nic"
    families: ClassVar[tuple[Family, ...]] = (NIC,)

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.nic]``."""

        roles: dict[str, str] = option(
            {}, 'interface = "rail", "management" or "storage"; the rail address finds its own'
        )
        ignore: str = option(
            r"lo|docker.*|br-.*|cali.*|cilium.*|veth[0-9a-f]{7,}|ifb.*|tunl.*|sit.*", "interfaces left out (regex)"
        )
        drop_after_s: float = option(240.0, "down for so long is a drop; what comes back earlier was a flap")
        flap_window_s: float = option(12 * 3600.0, "time over which the flaps of a link are counted")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._ignored = compiled("collector.sources.nic.ignore", settings.ignore)
        self._interfaces: Devices[Link] = Devices(
            lambda name: Interface(context, name).read, together=context.facts.together
        )
        self._links: dict[str, Link] = {}
        self._roles = Roles(context, checked_roles("collector.sources.nic.roles", settings.roles))
        self._traffic = Traffic(context)
        self._rates = Rates(context.clock)
        self._carriers = Carriers(settings.drop_after_s, settings.flap_window_s)
        self._changes: dict[str, float] = {}
        self._names: list[str] = []
        self._wanted: dict[str, bool] = {}

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        found = parse_dev(self.context.files.text("/proc/net/dev"), self._is_wanted)
        names = list(found)
        self._links = self._interfaces.read(names)
        roles = self._roles.of(names, self._links)
        traffic = self._traffic.rates(found)
        rows: dict[str, Row] = {}
        for name in names:
            link = self._links.get(name, UNKNOWN)
            rows[name] = {**link.row, **traffic[name], "role": ROLES[roles[name]],
                          "carrier_changes_per_s": self._changed(name, link.changes)}  # fmt: skip
            self._follow(name, link.row.get("carrier", NAN), roles[name])
        self._forget_others(names)
        gaps = self._interfaces.gaps(self.name) if rows else (Gap(self.name, "no_interfaces"),)
        return Sample(NIC.block(rows), gaps)

    def close(self) -> None:
        self._interfaces.close()

    def explain(self) -> str:
        roles = self._roles.of(sorted(self._names), self._links)
        return ", ".join(
            f"{name} ({role or 'role unknown: set collector.sources.nic.roles'})" for name, role in roles.items()
        )

    def _is_wanted(self, name: str) -> bool:
        """Whether an interface is not left out; a node with containers has hundreds that are."""
        wanted = self._wanted.get(name)
        if wanted is None:
            if len(self._wanted) > REMEMBERED_NAMES:
                self._wanted.clear()
            wanted = self._wanted[name] = not self._ignored.fullmatch(name)
        return wanted

    def _changed(self, name: str, changes: float | None) -> float:
        if changes is not None:
            self._changes[name] = changes
        return self._rates.per_second((name,), changes)

    def _follow(self, name: str, carrier: float, role: str) -> None:
        """Tell of a carrier that was lost. Half of all changes are losses where the kernel does not count them apart."""
        changes = self._changes.get(name)
        losses = None if changes is None else changes // 2
        news = self._carriers.follow(name, carrier, losses, self.context.clock.monotonic_ns())
        if news is not None:
            self.context.outlet.log(self._event(name, role, news), urgent=news.kind == "drop")

    def _event(self, name: str, role: str, news: CarrierNews) -> LogEvent:
        downs = self.context.files.text(f"/sys/class/net/{name}/carrier_down_count")
        ups = self.context.files.text(f"/sys/class/net/{name}/carrier_up_count")
        told = {"interface": name, "role": role, "count": str(news.count), "down_s": f"{news.down_s:.0f}",
                "flaps": str(news.flaps_in_window), "carrier_down_count": downs, "carrier_up_count": ups}  # fmt: skip
        line = {
            "drop": f"{name}: no carrier for {news.down_s:.0f} s",
            "flap": f"{name}: carrier lost and won {news.count} times, {news.flaps_in_window} within the window",
            "back": f"{name}: carrier is back after {news.down_s:.0f} s",
        }[news.kind]
        return LogEvent(source=self.name, severity="info" if news.kind == "back" else "warning", code=f"link_{news.kind}",
                        line=line, attributes={key: value for key, value in told.items() if value})  # fmt: skip

    def _forget_others(self, names: list[str]) -> None:
        if names == self._names:
            return
        for gone in set(self._names) - set(names):
            self.context.files.forget(f"/sys/class/net/{gone}")
            self._changes.pop(gone, None)
        self._names = names
        self._carriers.keep(set(names))
        self._rates.keep(lambda key: key[0] in names)


class Traffic:
    """Rates of the counters in /proc/net/dev: all of an interface are read at one moment."""

    def __init__(self, context: Context) -> None:
        self._clock = context.clock
        self._at_ns = 0
        self._last: dict[str, list[float]] = {}

    def rates(self, found: dict[str, list[float]]) -> dict[str, Row]:
        """Columns by interface; NaN at first, and for a counter that fell."""
        now_ns = self._clock.monotonic_ns()
        elapsed_s = (now_ns - self._at_ns) / NS_PER_S
        before, self._last, self._at_ns = self._last, found, now_ns
        return {
            name: _rates(before.get(name) if elapsed_s > 0 else None, now, elapsed_s) for name, now in found.items()
        }


def _rates(before: list[float] | None, now: list[float], elapsed_s: float) -> Row:
    if before is None:
        return {}
    return {m: (now[i] - before[i]) / elapsed_s if now[i] >= before[i] else NAN for m, i in DEV_COLUMNS.items()}


class Roles:
    """What each interface is for: as set, else the rail address, a neighbour of an accelerator, the name; the one with the default
    route manages the machine, but only where another one is a rail: a machine with one interface trains over it.
    """

    def __init__(self, context: Context, given: Mapping[str, str]) -> None:
        self._context = context
        self._given = given
        self._neighbours = Neighbours(context.files)
        self._known: dict[str, str] = {}
        self._key: tuple[list[str], str, str] = ([], "", "")
        self._at_ns: int | None = None

    def of(self, names: list[str], links: Mapping[str, Link]) -> dict[str, str]:
        """Role by interface, empty where nothing tells; looked up again once a minute and when something changed."""
        now_ns = self._context.clock.monotonic_ns()
        address = self._context.facts.rail_address
        owner = next((name for name, link in links.items() if address and link.address == address), "")
        key = (names, address, owner)
        if self._at_ns is None or key != self._key or now_ns - self._at_ns >= ROLES_EVERY_NS:
            self._known, self._key, self._at_ns = self._infer(names, owner), key, now_ns
        return self._known

    def _infer(self, names: list[str], owner: str) -> dict[str, str]:
        text = self._context.files.text
        roles = {name: self._given.get(name) or self._own(name, owner) for name in names}
        default = default_routes(text("/proc/net/route"), text("/proc/net/ipv6_route"))
        for name in default & set(names):
            others = (role for other, role in roles.items() if other != name)
            if name not in self._given and name != owner and "rail" in others:
                roles[name] = "management"
        return roles

    def _own(self, name: str, owner: str) -> str:
        return "rail" if name == owner else self._neighbours.role(f"/sys/class/net/{name}/device", name)


class Link(NamedTuple):
    """State of one interface: up, carrier, speed_mbps; how often its carrier changed; its IPv4 address, where the kernel told it."""

    row: Row
    changes: float | None = None
    address: str = ""


UNKNOWN = Link({})


class Interface:
    """Asks the kernel about one interface, in a thread that a sick adapter may keep: its files take the lock of all interfaces.

    /sys may be mounted from another network namespace: an interface is its own only if the index fits.
    """

    def __init__(self, context: Context, name: str) -> None:
        self._name = name
        self._base = f"/sys/class/net/{name}"
        self._files = Files(Path(context.files.root or "/"), context.clock)
        self._clock = context.clock
        self._speed: tuple[int, float] | None = None
        self._looked_ns: int | None = None
        self._own, self._address = True, ""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM) if context.files.live else None

    def read(self) -> Link:
        """State now; the address and whose interface it is, every half minute."""
        now_ns = self._clock.monotonic_ns()
        if self._socket is not None and (self._looked_ns is None or now_ns - self._looked_ns > OWN_EVERY_NS):
            self._looked_ns = now_ns
            self._own, self._address = self._is_own(), self.address()
        if not self._own:
            return Link(self._by_flags(), None, self._address)
        carrier = self._files.number(f"{self._base}/carrier")
        # the file can only be read while the interface is switched on
        up = 1.0 if carrier is not None else up_by_flags(self._files.text(f"{self._base}/flags"))
        row = {
            "up": up,
            "carrier": carrier if carrier is not None else (0.0 if up == 0.0 else NAN),
            "speed_mbps": self._speed_mbps(bool(carrier), now_ns),
        }
        return Link(row, self._files.number(f"{self._base}/carrier_changes"), self._address)

    def _speed_mbps(self, carrier: bool, now_ns: int) -> float:
        """Agreed speed. Asking takes the lock of all interfaces and a word from the adapter's firmware: now and then, and when the
        carrier comes back.
        """
        if not carrier:
            self._speed = None
            return NAN
        if self._speed is None or now_ns - self._speed[0] >= SPEED_EVERY_NS:
            speed = self._files.number(f"{self._base}/speed")
            self._speed = (now_ns, speed if speed is not None and speed > 0 else NAN)
        return self._speed[1]

    def _is_own(self) -> bool:
        try:
            index = float(socket.if_nametoindex(self._name))
        except OSError:
            return False
        return self._files.number(f"{self._base}/ifindex") == index

    def _by_flags(self) -> Row:
        flags = self.flags()
        return {"up": float(bool(flags & IFF_UP)), "carrier": float(bool(flags & IFF_RUNNING))} if flags >= 0 else {}

    def flags(self) -> int:
        """The kernel's flags, -1 when it knows no such interface."""
        answer = self._ask(SIOCGIFFLAGS)
        return struct.unpack_from("<H", answer, 16)[0] if answer else -1

    def address(self) -> str:
        """The IPv4 address; empty without one."""
        answer = self._ask(SIOCGIFADDR)
        return socket.inet_ntoa(answer[20:24]) if answer else ""

    def _ask(self, request: int) -> bytes:
        if self._socket is None:
            return b""
        try:
            return fcntl.ioctl(self._socket, request, struct.pack("256s", self._name.encode()[:15]))
        except OSError:
            return b""


def _everything(name: str) -> bool:
    return bool(name)


def parse_dev(text: str, wanted: Callable[[str], bool] = _everything) -> dict[str, list[float]]:
    """Interfaces and their sixteen counters in /proc/net/dev; lines of another shape are left out, and those not `wanted`."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, colon, rest = line.rpartition(":")
        name, words = name.strip(), rest.split()
        if (
            colon
            and len(words) >= 16
            and "".join(words).isdecimal()
            and len(max(words, key=len)) <= 20
            and wanted(name)
        ):
            found[name] = [float(word) for word in words]
    return found


def up_by_flags(text: str) -> float:
    """1 while an interface is switched on, by its flags in hexadecimal; NaN without them."""
    try:
        return float(bool(int(text, 16) & IFF_UP))
    except ValueError:
        return NAN
