"""Network interfaces (/proc/net/dev, /sys/class/net) and RDMA ports (/sys/class/infiniband)."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.base import NAN, Context, Family, Rates, Row, Sample, Source, family
from collectors.files import Files, to_number
from trainwarden.clock import NS_PER_S
from trainwarden.errors import ConfigError
from trainwarden.records import Gap
from trainwarden.settings import option

ROLES = {"": 0.0, "rail": 1.0, "management": 2.0, "storage": 3.0}
OCTETS_PER_WORD = 4
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

PORT_COUNTERS = {
    # metric: (file, width in bits, factor). The data counters count words of four octets, whatever the lane width; the narrow ones
    # stop at their maximum instead of wrapping.
    "rx_bytes_per_s": ("counters/port_rcv_data", 64, OCTETS_PER_WORD),
    "tx_bytes_per_s": ("counters/port_xmit_data", 64, OCTETS_PER_WORD),
    "rx_packets_per_s": ("counters/port_rcv_packets", 64, 1),
    "tx_packets_per_s": ("counters/port_xmit_packets", 64, 1),
    "rx_errors_per_s": ("counters/port_rcv_errors", 16, 1),
    "tx_dropped_per_s": ("counters/port_xmit_discards", 16, 1),
    "symbol_errors_per_s": ("counters/symbol_error", 16, 1),
    "link_downed_per_s": ("counters/link_downed", 8, 1),
    "link_recovery_per_s": ("counters/link_error_recovery", 8, 1),
    "rx_wait_per_s": ("counters/port_xmit_wait", 32, 1),
}
SATURATING_ONLY = {"counters/local_link_integrity_errors": 4, "counters/excessive_buffer_overrun_errors": 4}
WRAPPING_COUNTERS = {
    # 32-bit counters of the driver; these do wrap
    "out_of_sequence_per_s": "hw_counters/out_of_sequence",
    "retransmit_timeouts_per_s": "hw_counters/local_ack_timeout_err",
    "cnp_sent_per_s": "hw_counters/np_cnp_sent",
    "ecn_marked_per_s": "hw_counters/np_ecn_marked_roce_packets",
}
RATE = re.compile(r"([0-9.]+)\s*Gb/sec")


class NicSource(Source):
    """Interfaces of this network namespace, and RDMA ports.

    Which interfaces exist, and their traffic, comes from one file (/proc/net/dev), so virtual interfaces cost nothing more; state comes
    from /sys, or from the kernel directly where /sys shows another namespace. RDMA counters are read every `rdma_every_s`, because
    each file is a request to the adapter's firmware.
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
        rdma_every_s: float = option(5.0, "cadence of RDMA counters; link states are read every tick")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._rates = Rates(context.clock)
        self._ignored = _compiled(settings.ignore)
        self._links = Links(context)
        self._ports = RdmaPorts(context.files, self._rates)
        self._rdma_at_ns: int | None = None

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        rows: dict[str, Row] = {}
        for name, counters in parse_dev(self.context.files.text("/proc/net/dev")).items():
            if not self._ignored.fullmatch(name):
                rows[name] = {**self._links.state(name), **self._traffic(name, counters), "role": self._role(name)}
        rows.update(self._ports.rows(self._rdma_due()))
        devices = {name for name in rows}
        self._rates.keep(lambda key: key[0] in devices)
        gaps = () if rows else (Gap(self.name, "no_interfaces"),)
        return Sample(NIC.block(rows), gaps)

    def _traffic(self, name: str, counters: list[float]) -> Row:
        rates = {m: self._rates.per_second((name, m), counters[i]) for m, i in DEV_COLUMNS.items()}
        changes = self.context.files.number(f"/sys/class/net/{name}/carrier_changes") if self._links.own(name) else None
        return {**rates, "carrier_changes_per_s": self._rates.per_second((name, "carrier"), changes)}

    def _role(self, name: str) -> float:
        given = self.settings.roles.get(name, "")
        if not given and self._links.is_rail(name, self.context.facts.rail_address):
            given = "rail"
        return ROLES.get(given, 0.0)

    def _rdma_due(self) -> bool:
        now_ns = self.context.clock.monotonic_ns()
        due = self._rdma_at_ns is None or now_ns - self._rdma_at_ns >= self.settings.rdma_every_s * NS_PER_S
        if due:
            self._rdma_at_ns = now_ns
        return due


class Links:
    """State of interfaces. /sys may be mounted from another network namespace: an interface is its own only if the index fits."""

    def __init__(self, context: Context) -> None:
        self._files = context.files
        self._clock = context.clock
        self._own: dict[str, tuple[int, bool]] = {}
        self._rail: dict[str, str] = {}
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
        up = float(bool(int(flags_text, 16) & IFF_UP)) if flags_text else NAN
        carrier = self._files.number(f"{base}/carrier")
        speed = self._files.number(f"{base}/speed") if carrier else None
        return {
            "up": up,
            # the file cannot be read while the interface is switched off
            "carrier": carrier if carrier is not None else (0.0 if up == 0.0 else NAN),
            "speed_mbps": speed if speed is not None and speed > 0 else NAN,
        }

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


class RdmaPorts:
    """Ports under /sys/class/infiniband, as devices ``mlx5_0/1``."""

    ROOT = "/sys/class/infiniband"

    def __init__(self, files: Files, rates: Rates) -> None:
        self._files = files
        self._rates = rates
        self._counted: dict[str, Row] = {}

    def rows(self, counters_due: bool) -> dict[str, Row]:
        """One row per port. Between two readings of the counters their columns are absent, not repeated."""
        rows: dict[str, Row] = {}
        for device in self._files.names(self.ROOT):
            for port in self._files.names(f"{self.ROOT}/{device}/ports"):
                base = f"{self.ROOT}/{device}/ports/{port}"
                name = f"{device}/{port}"
                rows[name] = {**self._state(base), **(self._counters(name, base) if counters_due else {})}
        return rows

    def _state(self, base: str) -> Row:
        state, physical = (
            number_of_state(self._files.text(f"{base}/state")),
            number_of_state(self._files.text(f"{base}/phys_state")),
        )
        rate = RATE.match(self._files.text(f"{base}/rate"))
        return {
            "up": NAN if physical is None else float(physical == 5),
            "carrier": NAN if state is None else float(state == 4),
            "speed_mbps": float(rate.group(1)) * 1000 if rate else NAN,
        }

    def _counters(self, name: str, base: str) -> Row:
        row: dict[str, float] = {}
        saturated = 0
        for metric, (file, bits, factor) in PORT_COUNTERS.items():
            value = self._files.number(f"{base}/{file}")
            saturated += value is not None and value >= 2**bits - 1
            row[metric] = self._rates.per_second((name, metric), value, factor)
        for file, bits in SATURATING_ONLY.items():
            value = self._files.number(f"{base}/{file}")
            saturated += value is not None and value >= 2**bits - 1
        for metric, file in WRAPPING_COUNTERS.items():
            row[metric] = self._rates.per_second((name, metric), self._files.number(f"{base}/{file}"))
        return {**row, "saturated_count": float(saturated)}


def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"collector.sources.nic.ignore: {text!r} is no regular expression: {error}") from None


def parse_dev(text: str) -> dict[str, list[float]]:
    """Interfaces and their sixteen counters in /proc/net/dev; lines of another shape are left out."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, colon, rest = line.rpartition(":")
        words = rest.split()
        if colon and len(words) >= 16 and all(word.isdigit() for word in words):
            found[name.strip()] = [float(word) for word in words]
    return found


def number_of_state(text: str) -> int | None:
    """The number in ``4: ACTIVE``; None when there is none."""
    number = to_number(text.partition(":")[0])
    return int(number) if number is not None else None
