"""What network drivers count beyond the common interface counters: error correction, PFC pauses, congestion marks, light of the optics."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from collectors.asking import Question
from collectors.base import Context, Family, Row, Sample, Source, family
from collectors.devices import Devices
from collectors.files import Files
from collectors.network import ethtool, modules, optics
from collectors.network.counters import Deltas
from collectors.network.roles import compiled
from collectors.network.statistics import PRIORITIES, Place, plan, row_of
from trainwarden.clock import NS_PER_S
from trainwarden.records import Block, Gap
from trainwarden.settings import option

NET = "/sys/class/net"
LOOK_EVERY_NS = 60 * NS_PER_S
UNSUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.EPERM}
RETRY_NS = 3600 * NS_PER_S
STATISTICS_WAIT_S, OPTICS_WAIT_S = 5.0, 30.0
MODULE_LABEL = re.compile(r"module|front panel", re.IGNORECASE)

PORT = family(
    "port", "ethtool",
    ("fec_corrected_per_s", "1/s", "counter", "bits (mlx5, bnxt) or words (ionic) that forward error correction repaired"),
    ("rx_power_dbm", "dBm", "gauge", "light received, the darkest lane; -40 is dark"),
    ("module_temp_c", "C", "gauge", "temperature of the optical module"),
    ("pause_rx_per_s", "1/s", "counter", "PFC pause frames received on the training priority (the busiest unless set): told to stop"),
    ("pause_tx_per_s", "1/s", "counter", "PFC pause frames sent on the training priority: this machine is the slow one"),
    ("fec_corrected_blocks_per_s", "1/s", "counter", "blocks that forward error correction repaired"),
    ("fec_uncorrectable_per_s", "1/s", "counter", "blocks that it could not repair"),
    ("bit_error_ratio", "ratio", "gauge", "repaired bits of all bits received: the error ratio before correction"),
    ("symbol_errors_per_s", "1/s", "counter", "symbol errors on the line"),
    ("pcs_symbol_errors_per_s", "1/s", "counter", "symbol errors left after correction"),
    ("lane_errors_max_per_s", "1/s", "counter", "bit errors of the worst lane"),
    ("rx_crc_errors_per_s", "1/s", "counter", "frames with a wrong checksum"),
    ("rx_discards_per_s", "1/s", "counter", "frames dropped on arrival for want of buffers"),
    ("tx_discards_per_s", "1/s", "counter", "frames dropped before sending"),
    ("rx_out_of_buffer_per_s", "1/s", "counter", "frames dropped because the host gave no buffer"),
    ("buffer_discards_per_s", "1/s", "counter", "frames dropped by the buffers of the priorities"),
    ("link_downed_per_s", "1/s", "counter", "times the link went down, by the adapter's own count"),
    ("ecn_marked_per_s", "1/s", "counter", "packets received with a congestion mark, all priorities"),
    ("pause_rx_all_per_s", "1/s", "counter", "pause frames received, all priorities and plain ones"),
    ("pause_tx_all_per_s", "1/s", "counter", "pause frames sent, all priorities and plain ones"),
    ("pause_rx_time_ratio", "ratio", "counter", "share of time in which the training priority was told to stop"),
    ("pause_tx_time_ratio", "ratio", "counter", "share of time in which the training priority told the switch to stop"),
    ("pause_storms_per_s", "1/s", "counter", "pauses so long that the adapter warns or gives up"),
    *((f"pause_rx_prio{i}_per_s", "1/s", "counter", f"PFC pause frames received, priority {i}") for i in range(PRIORITIES)),
    *((f"pause_tx_prio{i}_per_s", "1/s", "counter", f"PFC pause frames sent, priority {i}") for i in range(PRIORITIES)),
    ("pcie_stalled_read_ratio", "ratio", "gauge", "share of the last second in which the adapter's reads waited for the host"),
    ("pcie_stalled_write_ratio", "ratio", "gauge", "share of the last second in which the adapter's writes waited for the host"),
    ("pcie_overflows_per_s", "1/s", "counter", "frames dropped because the host took them too slowly"),
    ("pcie_signal_errors_per_s", "1/s", "counter", "PCIe errors, by the adapter's count"),
    ("module_errors_per_s", "1/s", "counter", "complaints of the plugged module: bus stuck, too hot, shorted, unplugged"),
    ("allowance_exceeded_per_s", "1/s", "counter", "packets queued or dropped because a cloud machine's allowance was used up (ena)"),
    ("link_speed_mbps", "Mbit/s", "gauge", "agreed speed, by the driver"),
    ("full_duplex", "bool", "state", "1 for full duplex"),
    ("fec_active", "bits", "state", "1 none, 2 auto, 4 off, 8 Reed-Solomon, 16 Base-R, 32 low latency Reed-Solomon"),
    ("tx_power_dbm", "dBm", "gauge", "light sent, the darkest lane"),
    ("rx_power_spread_db", "dB", "gauge", "darkest lane below the brightest: above 2 means dirt on the fibre"),
    ("bias_ma", "mA", "gauge", "laser current, the smallest of the lanes"),
    ("module_voltage_v", "V", "gauge", "supply of the module"),
)  # fmt: skip


class EthtoolSource(Source):
    """One row per interface with a device behind it. Drivers are asked by ioctl beside the agent, each port by itself: one that hangs
    keeps a thread, and has a gap ``statistics_hung:ens1`` and no row; the others are read. Optics are asked once a minute, for each
    answer is a slow bus transaction. (Where a driver hangs with the kernel's lock of all interfaces in hand, every port hangs.)
    """

    name: ClassVar[str] = "ethtool"
    families: ClassVar[tuple[Family, ...]] = (PORT,)

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.ethtool]``."""

        every_s: float = option(10.0, "cadence of the driver's statistics")
        optics_every_s: float = option(60.0, "cadence of the module's sensors; 0 leaves modules alone")
        priority: int = option(-1, "PFC priority of the training traffic; -1 takes the busiest")
        also: str = option("", "interfaces without a device behind them that are read as well (regex)")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._also = compiled("collector.sources.ethtool.also", settings.also)
        self.ask: ethtool.Ask | None = ethtool.Kernel() if context.files.live else None
        self.read_page: modules.ReadPage | None = modules.Netlink() if context.files.live else None
        self._files = Files(Path(context.files.root or "/"), context.clock)
        optics_every_s = settings.optics_every_s or 60.0
        self._ports: Devices[Row] = Devices(
            lambda name: partial(self._answer, self._counted, name), min(STATISTICS_WAIT_S, settings.every_s / 2)
        )
        self._modules: Devices[Row] = Devices(
            lambda name: partial(self._answer, self._seen, name), min(OPTICS_WAIT_S, optics_every_s / 2)
        )
        self._statistics = Question("ethtool", context.clock, settings.every_s, lambda: self._each(self._ports))
        self._optics = Question("optics", context.clock, optics_every_s, lambda: self._each(self._modules))
        self._deltas = Deltas()
        self._plans: dict[tuple[str, int], list[Place]] = {}
        self._refused_ns: dict[tuple[str, str], int] = {}
        self._interfaces: list[str] = []
        self._looked_ns: int | None = None
        self._packed: tuple[tuple[object, ...], tuple[Block, ...]] = ((), ())

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        if self.ask is None or not self._present():
            return Sample()
        counted = self._statistics.newest()
        seen = self._optics.newest() if self.settings.optics_every_s > 0 else None
        key = (id(counted), id(seen), tuple(self._interfaces))
        if key != self._packed[0]:
            parts = [answer.value for answer in (counted, seen) if answer is not None]
            rows = {name: {k: v for part in parts for k, v in part.get(name, {}).items()} for name in self._interfaces}
            self._packed = (
                key,
                PORT.block({name: row for name, row in rows.items() if not all(map(math.isnan, row.values()))}),
            )
        return Sample(self._packed[1], self._gaps())

    def explain(self) -> str:
        if self.ask is None:
            return "drivers can only be asked on the machine itself, not in another root"
        if not self._interfaces:
            return "no interface has a device behind it; name virtual ones in collector.sources.ethtool.also"
        taken = [
            f"{name} ({count} statistics, {len(places)} of them taken)" for (name, count), places in self._plans.items()
        ]
        return f"interfaces {', '.join(self._interfaces)}; drivers {', '.join(taken) or 'that do not answer'}"

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything asked is answered."""
        return self._statistics.settle(timeout_s) and self._optics.settle(timeout_s)

    def close(self) -> None:
        for devices in (self._ports, self._modules):
            devices.close()
        if isinstance(self.ask, ethtool.Kernel):
            self.ask.close()
        if isinstance(self.read_page, modules.Netlink):
            self.read_page.close()

    def _present(self) -> list[str]:
        now_ns = self.context.clock.monotonic_ns()
        if self._looked_ns is None or now_ns - self._looked_ns >= LOOK_EVERY_NS:
            self._looked_ns = now_ns
            names = self.context.files.names(NET)
            self._interfaces = [name for name in names if self._wanted(name)]
        return self._interfaces

    def _wanted(self, name: str) -> bool:
        return bool(self.context.files.names(f"{NET}/{name}/device") or self._also.fullmatch(name))

    def _each(self, devices: Devices[Row]) -> dict[str, Row]:
        """In the thread of a question: a row of each port that answers in time."""
        return devices.read(list(self._interfaces))

    def _answer(self, read: Callable[[ethtool.Ask, str], Row], name: str) -> Row:
        """In a thread that the port may keep."""
        assert self.ask is not None
        try:
            return read(self.ask, name)
        except OSError:
            return {}  # gone, or in another network namespace: the row stays empty

    def _counted(self, ask: ethtool.Ask, name: str) -> dict[str, float]:
        now_ns = self.context.clock.monotonic_ns()
        driver = ethtool.driver(ask, name)
        places = self._plan(ask, name, driver)
        values = ethtool.statistics(ask, name, driver.statistics) if places else ()
        row = dict(row_of(name, places, values, now_ns, self._deltas, self.settings.priority))
        if (link := self._try(name, "link", lambda: ethtool.link_settings(ask, name))) is not None:
            row |= {} if link.speed_mbps is None else {"link_speed_mbps": float(link.speed_mbps)}
            row |= {} if link.full_duplex is None else {"full_duplex": float(link.full_duplex)}
        fec = self._try(name, "fec", lambda: ethtool.active_fec(ask, name))
        return row if fec is None else {**row, "fec_active": float(fec)}

    def _plan(self, ask: ethtool.Ask, name: str, driver: ethtool.Driver) -> list[Place]:
        """What to take of a driver's statistics. The names of one driver with as many statistics are the same on every interface."""
        key = (driver.name, driver.statistics)
        if key not in self._plans:
            self._plans[key] = plan(ethtool.names(ask, name, driver.statistics)) if driver.statistics else []
        return self._plans[key]

    def _seen(self, ask: ethtool.Ask, name: str) -> dict[str, float]:
        """Sensors of the module: by ioctl, by netlink where the ioctl does not know its kind, else its temperature from /sys."""
        memory = self._try(name, "module", lambda: ethtool.module_memory(ask, name))
        read_page = self.read_page
        if not memory and read_page is not None:
            memory = self._try(name, "pages", lambda: modules.memory_by_pages(read_page, name))
        row = dict(optics.decode(memory)) if memory else {}
        return row or self._monitored(name)

    def _monitored(self, name: str) -> dict[str, float]:
        root = f"{NET}/{name}/device/hwmon"
        for monitor in self._files.names(root):
            for entry in self._files.names(f"{root}/{monitor}"):
                if entry.endswith("_label") and MODULE_LABEL.match(self._files.text(f"{root}/{monitor}/{entry}")):
                    millidegrees = self._files.number(f"{root}/{monitor}/{entry.removesuffix('_label')}_input")
                    return {} if millidegrees is None else {"module_temp_c": millidegrees / 1000}
        return {}

    def _try(self, name: str, what: str, ask: Callable[[], Any]) -> Any:
        """An answer that drivers need not have: what is not supported is not asked for again within the hour."""
        now_ns = self.context.clock.monotonic_ns()
        if now_ns - self._refused_ns.get((name, what), -RETRY_NS) < RETRY_NS:
            return None
        try:
            return ask()
        except OSError as error:
            if error.errno in UNSUPPORTED:
                self._refused_ns[name, what] = now_ns
            return None

    def _gaps(self) -> tuple[Gap, ...]:
        parts = (
            ("statistics", self._statistics, self._ports, self.settings.every_s),
            ("optics", self._optics, self._modules, self.settings.optics_every_s),
        )
        found: list[Gap] = []
        for what, question, devices, every_s in parts:
            if question.waiting_s > 2 * every_s:
                found.append(Gap(self.name, f"{what}_hung"))
            elif not question.open:
                found += [Gap(self.name, f"{what}_{gap.reason}") for gap in devices.gaps(self.name)]
            if question.error is not None:
                found.append(Gap(self.name, f"{what}_error"))
        return tuple(found)
