"""Network interfaces (/proc/net/dev, /sys/class/net): traffic, link state, lost carriers, and what each is for."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.base import NAN, Context, Family, Rates, Row, Sample, Source, family
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
        self._rates = Rates(context.clock)
        self._ignored = compiled("collector.sources.nic.ignore", settings.ignore)
        self._links = Links(context)
        self._roles = Roles(context, checked_roles("collector.sources.nic.roles", settings.roles), self._links)
        self._carriers = Carriers(settings.drop_after_s, settings.flap_window_s)
        self._changes: dict[str, float] = {}
        self._names: set[str] = set()

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        found = parse_dev(self.context.files.text("/proc/net/dev"))
        names = [name for name in found if not self._ignored.fullmatch(name)]
        roles = self._roles.of(names)
        rows: dict[str, Row] = {}
        for name in names:
            rows[name] = {**self._links.state(name), **self._traffic(name, found[name]), "role": ROLES[roles[name]]}
            self._follow(name, rows[name].get("carrier", NAN), roles[name])
        self._forget_others(set(names))
        return Sample(NIC.block(rows), () if rows else (Gap(self.name, "no_interfaces"),))

    def explain(self) -> str:
        roles = self._roles.of(sorted(self._names))
        return ", ".join(
            f"{name} ({role or 'role unknown: set collector.sources.nic.roles'})" for name, role in roles.items()
        )

    def _traffic(self, name: str, counters: list[float]) -> Row:
        rates = {m: self._rates.per_second((name, m), counters[i]) for m, i in DEV_COLUMNS.items()}
        changes = self.context.files.number(f"/sys/class/net/{name}/carrier_changes") if self._links.own(name) else None
        if changes is not None:
            self._changes[name] = changes
        return {**rates, "carrier_changes_per_s": self._rates.per_second((name, "carrier"), changes)}

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

    def _forget_others(self, names: set[str]) -> None:
        if names == self._names:
            return
        for gone in self._names - names:
            self.context.files.forget(f"/sys/class/net/{gone}")
            self._changes.pop(gone, None)
        self._names = names
        self._carriers.keep(names)
        self._rates.keep(lambda key: key[0] in names)


class Roles:
    """What each interface is for: as set, else the rail address, a neighbour of an accelerator, the name; the one with the default
    route manages the machine, but only where another one is a rail: a machine with one interface trains over it.
    """

    def __init__(self, context: Context, given: Mapping[str, str], links: Links) -> None:
        self._context = context
        self._given = given
        self._links = links
        self._neighbours = Neighbours(context.files)
        self._known: dict[str, str] = {}
        self._key: tuple[list[str], str] = ([], "")
        self._at_ns: int | None = None

    def of(self, names: list[str]) -> dict[str, str]:
        """Role by interface, empty where nothing tells; looked up again once a minute and when something changed."""
        now_ns = self._context.clock.monotonic_ns()
        key = (names, self._context.facts.rail_address)
        if self._at_ns is None or key != self._key or now_ns - self._at_ns >= ROLES_EVERY_NS:
            self._known, self._key, self._at_ns = self._infer(names), key, now_ns
        return self._known

    def _infer(self, names: list[str]) -> dict[str, str]:
        text = self._context.files.text
        roles = {name: self._given.get(name) or self._own(name) for name in names}
        default = default_routes(text("/proc/net/route"), text("/proc/net/ipv6_route"))
        for name in default & set(names):
            others = (role for other, role in roles.items() if other != name)
            if name not in self._given and not self._has_rail_address(name) and "rail" in others:
                roles[name] = "management"
        return roles

    def _own(self, name: str) -> str:
        if self._has_rail_address(name):
            return "rail"
        return self._neighbours.role(f"/sys/class/net/{name}/device", name)

    def _has_rail_address(self, name: str) -> bool:
        return self._links.is_rail(name, self._context.facts.rail_address)


class Links:
    """State of interfaces. /sys may be mounted from another network namespace: an interface is its own only if the index fits."""

    def __init__(self, context: Context) -> None:
        self._files = context.files
        self._clock = context.clock
        self._own: dict[str, tuple[int, bool]] = {}
        self._rail: dict[str, str] = {}
        self._speeds: dict[str, tuple[int, float]] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM) if context.files.live else None

    def state(self, name: str) -> Row:
        """up, carrier, speed_mbps."""
        if not self.own(name):
            flags = self._flags(name)
            return (
                {"up": float(bool(flags & IFF_UP)), "carrier": float(bool(flags & IFF_RUNNING))} if flags >= 0 else {}
            )
        base = f"/sys/class/net/{name}"
        flags_text = self._files.text(f"{base}/flags")
        up = up_by_flags(flags_text)
        carrier = self._files.number(f"{base}/carrier")
        return {
            "up": up,
            # the file cannot be read while the interface is switched off
            "carrier": carrier if carrier is not None else (0.0 if up == 0.0 else NAN),
            "speed_mbps": self._speed(name, bool(carrier)),
        }

    def _speed(self, name: str, carrier: bool) -> float:
        """Agreed speed. Asking takes the lock of all interfaces and a word from the adapter's firmware: now and then, and when the
        carrier comes back.
        """
        now_ns = self._clock.monotonic_ns()
        known = self._speeds.get(name)
        if not carrier:
            self._speeds.pop(name, None)
            return NAN
        if known is None or now_ns - known[0] >= SPEED_EVERY_NS:
            speed = self._files.number(f"/sys/class/net/{name}/speed")
            self._speeds[name] = known = (now_ns, speed if speed is not None and speed > 0 else NAN)
        return known[1]

    def own(self, name: str) -> bool:
        """Whether /sys speaks of this namespace's interface of that name."""
        if self._socket is None:
            return True
        now_ns = self._clock.monotonic_ns()
        known = self._own.get(name)
        if known is None or now_ns - known[0] > 30 * NS_PER_S:
            try:
                index = float(socket.if_nametoindex(name))
            except OSError:
                return False
            self._rail.pop(name, None)
            self._own[name] = known = (now_ns, self._files.number(f"/sys/class/net/{name}/ifindex") == index)
        return known[1]

    def is_rail(self, name: str, rail_address: str) -> bool:
        """Whether the interface carries the rail address."""
        if not rail_address or self._socket is None:
            return False
        if not self._rail.get(name):
            self._rail[name] = self._address(name)
        return self._rail[name] == rail_address

    def _flags(self, name: str) -> int:
        answer = self._ask(SIOCGIFFLAGS, name)
        return struct.unpack_from("<H", answer, 16)[0] if answer else -1

    def _address(self, name: str) -> str:
        answer = self._ask(SIOCGIFADDR, name)
        return socket.inet_ntoa(answer[20:24]) if answer else ""

    def _ask(self, request: int, name: str) -> bytes:
        if self._socket is None:
            return b""
        try:
            return fcntl.ioctl(self._socket, request, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return b""


def parse_dev(text: str) -> dict[str, list[float]]:
    """Interfaces and their sixteen counters in /proc/net/dev; lines of another shape are left out."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, colon, rest = line.rpartition(":")
        words = rest.split()
        if colon and len(words) >= 16 and all(word.isdecimal() and len(word) <= 20 for word in words):
            found[name.strip()] = [float(word) for word in words]
    return found


def up_by_flags(text: str) -> float:
    """1 while an interface is switched on, by its flags in hexadecimal; NaN without them."""
    try:
        return float(bool(int(text, 16) & IFF_UP))
    except ValueError:
        return NAN
