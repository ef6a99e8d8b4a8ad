"""Which counters of an RDMA port matter, under which names drivers hide them, how wide they are and what they count."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from collectors.files import Files, to_number
from collectors.network.counters import whole
from trainwarden.clock import NS_PER_S

OCTETS_PER_WORD = 4
LEFT_ALONE_NS = 3600 * NS_PER_S
REFUSALS = 3
PASSING = {errno.ENODEV, errno.ENOENT, errno.ESTALE, errno.ENXIO}
RATE = re.compile(r"([0-9.]+)\s*Gb/sec")
WIDTH_SUFFIX = re.compile(r",\s*(\d+)$")
ODD = re.compile(r"[^a-z0-9]+")


class Counter(NamedTuple):
    """One counter file.

    Attributes
    ----------
    column
        Metric that it feeds.
    bits
        Width; where the counter `sticks`, 2^bits - 1 means that it can count no further, else it wraps there.
    factor
        What one count is worth: the data counters of ports count words of four octets, whatever the lane width.
    """

    column: str
    bits: int = 64
    factor: int = 1
    sticks: bool = False


# the standard counters of a port: they stop at their maximum instead of wrapping
PORT_COUNTERS: Mapping[str, Counter] = {
    "port_rcv_data": Counter("rx_bytes_per_s", 64, OCTETS_PER_WORD, True),
    "port_xmit_data": Counter("tx_bytes_per_s", 64, OCTETS_PER_WORD, True),
    "port_rcv_packets": Counter("rx_packets_per_s", 64, 1, True),
    "port_xmit_packets": Counter("tx_packets_per_s", 64, 1, True),
    "port_rcv_errors": Counter("rx_errors_per_s", 16, 1, True),
    "port_xmit_discards": Counter("tx_dropped_per_s", 16, 1, True),
    "symbol_error": Counter("symbol_errors_per_s", 16, 1, True),
    "link_downed": Counter("link_downed_per_s", 8, 1, True),
    "link_error_recovery": Counter("link_recovery_per_s", 8, 1, True),
    "port_xmit_wait": Counter("rx_wait_per_s", 32, 1, True),
    "port_rcv_remote_physical_errors": Counter("remote_physical_errors_per_s", 16, 1, True),
    "port_rcv_switch_relay_errors": Counter("switch_relay_errors_per_s", 16, 1, True),
    "port_rcv_constraint_errors": Counter("rx_constraint_errors_per_s", 8, 1, True),
    "port_xmit_constraint_errors": Counter("tx_constraint_errors_per_s", 8, 1, True),
    "local_link_integrity_errors": Counter("local_link_integrity_errors_per_s", 4, 1, True),
    "excessive_buffer_overrun_errors": Counter("buffer_overruns_per_s", 4, 1, True),
    "vl15_dropped": Counter("management_dropped_per_s", 16, 1, True),
}

# names in hw_counters, in lower case with underscores; where a driver has two names for one thing the first one present counts
ALIASES: Mapping[str, tuple[str, ...]] = {
    "out_of_sequence_per_s": ("out_of_sequence", "oos_drop_count", "rcvd_out_of_order_packets", "resp_rx_outouf_seq", "resp_rx_outof_seq"),
    "retransmit_timeouts_per_s": ("local_ack_timeout_err", "to_retransmits", "rto", "retrans_timeout_events", "requester_timeout"),
    "cnp_sent_per_s": ("np_cnp_sent", "cnpsent", "tx_cnp_pkts", "tx_cnp", "cnp_tx_pkts", "tx_rdma_cnp_pkts", "cc_tx_cnp_pkts"),
    "ecn_marked_per_s": ("np_ecn_marked_roce_packets", "rxecnmrkd", "rx_ecn_marked_pkts", "rx_ecn_marked", "rx_rdma_ecn_pkts",
                         "cc_rx_ce_pkts"),
    "packet_seq_errors_per_s": ("packet_seq_err", "seq_err_naks_rcvd", "nak_sequence_error", "req_rx_pkt_seq_err", "requester_oos_nak"),
    "rnr_naks_per_s": ("rnr_nak_retry_err", "rnr_naks_rcvd", "rnr_received", "req_rx_rnr_retry_err", "responder_rnr_nak"),
    "implied_naks_per_s": ("implied_nak_seq_err", "req_rx_impl_nak_seq_err", "missing_resp"),
    "duplicate_requests_per_s": ("duplicate_request", "dup_req", "resp_rx_dup_request"),
    "out_of_buffer_per_s": ("out_of_buffer", "rx_out_of_buffer", "resp_rx_outof_buf"),
    "adaptive_retransmits_per_s": ("roce_adp_retrans",),
    "adaptive_retransmit_timeouts_per_s": ("roce_adp_retrans_to",),
    "slow_restarts_per_s": ("roce_slow_restart",),
    "slow_restart_cnps_per_s": ("roce_slow_restart_cnps",),
    "cnp_handled_per_s": ("rp_cnp_handled", "cnphandled", "rx_cnp_pkts", "rx_cnp", "cnp_rx_pkts", "rx_rdma_cnp_pkts", "cc_rx_cnp_pkts"),
    "cnp_ignored_per_s": ("rp_cnp_ignored", "cnpignored"),
    "retransmits_per_s": ("retrans_pkts", "retranssegs", "tcpretranssegs"),
    "retransmitted_bytes_per_s": ("retrans_bytes",),
    "request_errors_per_s": ("req_cqe_error", "req_rx_cqe_err"),
    "response_errors_per_s": ("resp_cqe_error", "resp_rx_cqe_err"),
    "flush_errors_per_s": ("req_cqe_flush_error", "req_rx_cqe_flush"),
    "retries_exceeded_per_s": ("req_transport_retries_exceeded", "max_retry_exceeded", "req_tx_retry_excd_err"),
    "rnr_retries_exceeded_per_s": ("req_rnr_retries_exceeded",),
    "rx_icrc_errors_per_s": ("rx_icrc_encapsulated",),
    "rx_drops_per_s": ("rx_drops", "rx_roce_discards", "ip4indiscards"),
    "protocol_errors_per_s": ("inprotoerrors", "tcpinprotoerrors", "iwinprotoerrors", "rx_roce_errors"),
    "unrecoverable_errors_per_s": ("unrecoverable_err",),
    "unresponsive_remotes_per_s": ("unresponsive_remote_events",),
    "impaired_remotes_per_s": ("impaired_remote_conn_events",),
    "read_errors_per_s": ("rdma_read_wr_err",),
    "write_errors_per_s": ("rdma_write_wr_err",),
    "command_errors_per_s": ("cmds_err",),
    "commands_unanswered_per_s": ("no_completion_cmds",),
    "keep_alives_per_s": ("keep_alive_rcvd",),
}  # fmt: skip

# true octets, never words; only where the port has no standard counters (EFA, irdma, ionic, bnxt)
TRUE_BYTES: Mapping[str, tuple[str, ...]] = {
    "rx_bytes_per_s": ("rx_bytes", "rx_rdma_ucast_bytes"),
    "tx_bytes_per_s": ("tx_bytes", "tx_rdma_ucast_bytes"),
    "rx_packets_per_s": ("rx_pkts", "rx_rdma_ucast_pkts"),
    "tx_packets_per_s": ("tx_pkts", "tx_rdma_ucast_pkts"),
}
NARROW_DRIVERS = ("mlx4", "mlx5", "roce", "bond")  # queue counters of 32 bits that wrap


def plain(name: str) -> str:
    """A counter's name as we compare it: ``RNR received`` and ``cnpSent`` become ``rnr_received`` and ``cnpsent``.

    Examples
    --------
    >>> plain("RNR received"), plain("SwLinkUp,32")
    ('rnr_received', 'swlinkup')
    """
    return ODD.sub("_", WIDTH_SUFFIX.sub("", name).lower()).strip("_")


def width_of(name: str, default: int) -> int:
    """Bits of a counter whose name says them (``SwLinkUp,32``)."""
    found = WIDTH_SUFFIX.search(name)
    return int(found.group(1)) if found and 0 < int(found.group(1)) <= 64 else default


def standard_plan(names: Iterable[str]) -> dict[str, Counter]:
    """Counter by file name in ``counters/``."""
    return {name: PORT_COUNTERS[plain(name)] for name in names if plain(name) in PORT_COUNTERS}


def hardware_plan(names: Iterable[str], taken: set[str], bits: int) -> dict[str, Counter]:
    """Counter by file name in ``hw_counters/``; columns in `taken` come from elsewhere already."""
    present: dict[str, str] = {}
    for name in names:
        present.setdefault(plain(name), name)
    plan: dict[str, Counter] = {}
    for column, aliases in {**ALIASES, **TRUE_BYTES}.items():
        file = next((present[alias] for alias in aliases if alias in present), None)
        if file is not None and column not in taken:
            plan[file] = Counter(column, width_of(file, bits if column in ALIASES else 64))
    return plan


def number_of_state(text: str) -> int | None:
    """The number in ``4: ACTIVE``; None when there is none."""
    number = to_number(text.partition(":")[0])
    return int(number) if number is not None and abs(number) < 1000 else None


def gigabits(text: str) -> float | None:
    """The number in ``400 Gb/sec (4X NDR)``, whatever stands behind it; None when there is none."""
    found = RATE.match(text)
    return to_number(found.group(1)) if found else None


@dataclass
class Reading:
    """Counters of one port: raw values by column, and where each came from.

    `hardware_ns` is when the driver was last asked: within the lifespan of its cache it says the same again.
    """

    at_ns: int
    hardware_ns: int
    values: dict[str, int] = field(default_factory=dict)
    counters: dict[str, Counter] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


class PortReader:
    """Reads the counters of one port in one burst. A counter that refuses is left alone for an hour, and so is the whole port after
    three refusals in a row: on some ports each attempt makes the driver write into the kernel log.
    """

    def __init__(self, files: Files, device: str, port: str) -> None:
        self._files = files
        self._base = f"/sys/class/infiniband/{device}/ports/{port}"
        self._device = f"/sys/class/infiniband/{device}"
        self._narrow = device.startswith(NARROW_DRIVERS)
        self._plan: dict[str, Counter] | None = None
        self._refused_ns: dict[str, int] = {}
        self._alone_until_ns = 0
        self._hardware: tuple[int, dict[str, int]] = (-LEFT_ALONE_NS, {})

    def read(self, now_ns: int) -> Reading | None:
        """Everything that answers; None while the port is left alone."""
        if now_ns < self._alone_until_ns:
            return None
        if self._plan is None:
            self._plan = self._discover()
        standard = {path: c for path, c in self._plan.items() if "/hw_counters/" not in path}
        hardware = {path: c for path, c in self._plan.items() if "/hw_counters/" in path}
        if now_ns - self._hardware[0] >= self._lifespan_ns():
            # in one go, so that all come from one snapshot of the driver
            self._hardware = (now_ns, self._burst(hardware, now_ns))
        found = {**self._burst(standard, now_ns), **self._hardware[1]}
        if not found:
            self._plan = None  # the device may have come back with other counters
        known = {c.column: (path, c) for path, c in self._plan.items()} if self._plan else {}
        return Reading(now_ns, self._hardware[0], found, {column: known[column][1] for column in found},
                       {column: known[column][0].rpartition("/")[2] for column in found})  # fmt: skip

    def _discover(self) -> dict[str, Counter]:
        plan = {
            f"{self._base}/counters/{n}": c
            for n, c in standard_plan(self._files.names(f"{self._base}/counters")).items()
        }
        for directory in (f"{self._base}/hw_counters", f"{self._device}/hw_counters"):
            taken = {counter.column for counter in plan.values()}
            found = hardware_plan(self._files.names(directory), taken, 32 if self._narrow else 64)
            plan.update({f"{directory}/{name}": counter for name, counter in found.items()})
        return plan

    def _lifespan_ns(self) -> int:
        lifespan_ms = whole(self._text(f"{self._base}/hw_counters/lifespan")) or 0
        return min(lifespan_ms, 10_000) * 1_000_000

    def _burst(self, plan: Mapping[str, Counter], now_ns: int) -> dict[str, int]:
        found: dict[str, int] = {}
        refusals = 0
        for path, counter in plan.items():
            if now_ns - self._refused_ns.get(path, -LEFT_ALONE_NS) < LEFT_ALONE_NS:
                continue
            try:
                value = whole(self._files.read(path))
            except OSError as error:
                if error.errno in PASSING:
                    continue
                value = None
                refusals += 1
            else:
                refusals = 0
            if value is None:
                self._refused_ns[path] = now_ns
            elif value >= 0:
                found[counter.column] = value
            if refusals >= REFUSALS:
                self._alone_until_ns = now_ns + LEFT_ALONE_NS
                break
        return found

    def _text(self, path: str) -> bytes:
        try:
            return self._files.read(path)
        except OSError:
            return b""
