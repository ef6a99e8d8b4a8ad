"""The hardware of the machine: temperatures, fans, memory and PCIe errors, disks' health; and what its kernel is short of."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from collectors.asking import Question
from collectors.base import NAN, Context, Family, Row, Sample, Source, family, highest
from collectors.files import Files
from collectors.machine import kernel, sensors, smart, timekeeping
from collectors.machine.kernel import present
from collectors.network.counters import Deltas
from trainwarden.clock import NS_PER_S
from trainwarden.records import Block, Gap, LogEvent
from trainwarden.settings import option

CLOCKED_CPUS = 16
FIND_EVERY_NS = 600 * NS_PER_S

BOARD = family(
    "board", "machine",
    ("inlet_temp_c", "C", "gauge", "air (or water) entering the machine"),
    ("server_power_w", "W", "gauge", "power drawn by the whole machine"),
    ("fan_ratio", "ratio", "gauge", "fastest fan of its maximum"),
    ("power_supplies_ok", "units", "state", "power supplies that deliver"),
    ("cpu_clock_mhz", "MHz", "gauge", "mean clock of sixteen processors"),
    ("dimm_correctable_per_s", "1/s", "counter", "memory errors corrected"),
    ("dimm_uncorrectable_count", "errors", "state", "uncorrectable memory errors since boot"),
    ("nvme_media_errors_per_s", "1/s", "counter", "media errors of all local disks"),
    ("nvme_spare_ratio", "ratio", "gauge", "spare blocks left of the worst local disk"),
    ("nvme_used_ratio", "ratio", "gauge", "rated life used by the most worn local disk"),
    ("disk_used_ratio", "ratio", "gauge", "fullest of the local file systems: root, and where this agent writes"),
    ("cpu_temp_c", "C", "gauge", "hottest processor"),
    ("dimm_temp_c", "C", "gauge", "hottest memory module"),
    ("nvme_temp_c", "C", "gauge", "hottest local disk"),
    ("other_temp_c", "C", "gauge", "hottest of the other sensors"),
    ("cpu_throttled_per_s", "1/s", "counter", "times a processor was slowed down for its heat"),
    ("machine_checks_count", "errors", "state", "machine check exceptions since boot"),
    ("threshold_interrupts_count", "interrupts", "state", "corrected errors above a threshold since boot"),
    ("thermal_interrupts_count", "interrupts", "state", "thermal events of processors since boot"),
)  # fmt: skip

MACHINE = family(
    "machine", "machine",
    ("oom_kills_per_s", "1/s", "counter", "processes killed for want of memory"),
    ("major_faults_per_s", "1/s", "counter", "pages that had to be read from a disk"),
    ("allocation_stalls_per_s", "1/s", "counter", "allocations that had to free memory first"),
    ("compaction_stalls_per_s", "1/s", "counter", "allocations that had to make room for large pages first"),
    ("swap_in_pages_per_s", "1/s", "counter", "pages read from swap"),
    ("swap_out_pages_per_s", "1/s", "counter", "pages written to swap"),
    ("interrupts_per_s", "1/s", "counter", "interrupts"),
    ("soft_interrupts_per_s", "1/s", "counter", "deferred interrupt work"),
    ("blocked_tasks", "tasks", "gauge", "tasks that wait for a disk or a file server"),
    ("softnet_dropped_per_s", "1/s", "counter", "packets dropped because a processor's queue was full"),
    ("softnet_squeezed_per_s", "1/s", "counter", "times packet processing ran out of its budget"),
    ("conntrack_used_ratio", "ratio", "gauge", "connection table in use"),
    ("file_handles_count", "files", "gauge", "open file handles"),
    ("file_handles_ratio", "ratio", "gauge", "open file handles of their limit"),
    ("hung_tasks_count", "tasks", "state", "tasks found hanging for minutes since boot"),
    ("clock_source", "enum", "state", "0 other, 1 tsc, 2 kvm, 3 arm, 4 hyper-v, 5 xen, 6 acpi_pm, 7 hpet, 8 jiffies"),
    ("clock_synced", "bool", "state", "1 while a daemon keeps the clock"),
    ("clock_correction_ms", "ms", "gauge", "correction of the clock under way"),
    ("clock_error_ms", "ms", "gauge", "largest error that the kernel admits to"),
    ("clock_frequency_ppm", "ppm", "gauge", "how much the clock is sped up"),
)  # fmt: skip

PCIE = family(
    "pcie", "machine",
    ("aer_corrected_per_s", "1/s", "counter", "errors corrected by the link"),
    ("aer_nonfatal_per_s", "1/s", "counter", "errors that cost a transaction"),
    ("aer_fatal_count", "errors", "state", "errors that broke the link, since boot"),
    ("link_speed_gts", "GT/s", "state", "agreed speed; idle devices lower it to save power"),
    ("link_width", "lanes", "state", "agreed lanes"),
    ("link_narrow", "bool", "state", "1 while the link has fewer lanes than the device could use"),
)  # fmt: skip

NVME = family(
    "nvme", "machine",
    ("live", "bool", "state", "1 while the controller is live"),
    ("critical_warning", "bits", "state", "1 spare low, 2 too hot, 4 unreliable, 8 read only, 16 backup failed"),
    ("spare_ratio", "ratio", "gauge", "spare blocks left"),
    ("spare_threshold_ratio", "ratio", "state", "spare blocks below which the disk warns"),
    ("used_ratio", "ratio", "gauge", "rated life used; may pass 1"),
    ("media_errors_count", "errors", "state", "errors of the medium since it was made"),
    ("temp_c", "C", "gauge", "temperature"),
)  # fmt: skip


class MachineSource(Source):
    """Four kinds of questions, each in a thread of its own, so that a sensor that hangs costs the sensors only: the kernel's numbers and
    the sensors every `every_s`, what is dear every `slow_every_s`, the disks' own word every `disks_every_s`.
    """

    name: ClassVar[str] = "machine"
    families: ClassVar[tuple[Family, ...]] = (BOARD, MACHINE, PCIE, NVME)

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.machine]``."""

        every_s: float = option(10.0, "cadence of the kernel's numbers, sensors and error counters")
        slow_every_s: float = option(60.0, "cadence of /proc/interrupts and free space")
        disks_every_s: float = option(600.0, "cadence of the health logs of NVMe disks; 0 leaves disks alone")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self.ask_disk: smart.AskDisk = smart.health_log
        self.ask_clock: timekeeping.AskClock | None = timekeeping.kernel_clock if context.files.live else None
        readers = [Files(Path(context.files.root or "/"), context.clock) for _ in range(4)]
        self._kernel = KernelReader(readers[0], context)
        self._sensors = SensorReader(readers[1], context)
        self._slow = SlowReader(readers[2], context)
        self._disks = DiskReader(readers[3], context)
        clock = context.clock
        self._questions = {
            "kernel": Question("kernel", clock, settings.every_s, lambda: self._kernel.read(self.ask_clock)),
            "sensors": Question("sensors", clock, settings.every_s, self._sensors.read),
            "slow": Question("slow", clock, settings.slow_every_s, self._slow.read),
        }
        if settings.disks_every_s > 0:
            self._questions["disks"] = Question(
                "disks", clock, settings.disks_every_s, lambda: self._disks.read(self.ask_disk)
            )
        self._packed: tuple[tuple[int, ...], tuple[Block, ...]] = ((), ())

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        answers = {name: question.newest() for name, question in self._questions.items()}
        key = tuple(id(answer) for answer in answers.values())
        if key != self._packed[0]:
            self._packed = (key, _blocks([answer.value for answer in answers.values() if answer is not None]))
        return Sample(self._packed[1], self._gaps())

    def explain(self) -> str:
        found = self._sensors.found()
        disks = (
            "disks refuse: this needs CAP_SYS_ADMIN and /dev/nvme*"
            if self._disks.refused
            else "disks answer or there are none"
        )
        return f"{found or 'no sensor, no PCIe device, no memory controller'}; {disks}"

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything asked is answered."""
        return all([question.settle(timeout_s) for question in self._questions.values()])

    def _gaps(self) -> tuple[Gap, ...]:
        limit_s = 2 * self.settings.every_s
        reasons = [f"{name}_hung" for name, question in self._questions.items() if question.waiting_s > limit_s]
        reasons += [f"{name}_error" for name, question in self._questions.items() if question.error is not None]
        reasons += ["disks_refused"] if self._disks.refused else []
        return tuple(Gap(self.name, reason) for reason in reasons)


Rows = dict[str, dict[str, Row]]
"""Family → device → row."""


def _blocks(parts: list[Rows]) -> tuple[Block, ...]:
    """One block of each family; the parts of a row come from different questions."""
    merged: dict[str, dict[str, dict[str, float]]] = {}
    for part in parts:
        for name, rows in part.items():
            for device, row in rows.items():
                merged.setdefault(name, {}).setdefault(device, {}).update(row)
    blocks: tuple[Block, ...] = ()
    for column_set in (BOARD, MACHINE, PCIE, NVME):
        blocks += column_set.block({d: row for d, row in merged.get(column_set.name, {}).items() if row})
    return blocks


class KernelReader:
    """What the kernel is short of."""

    def __init__(self, files: Files, context: Context) -> None:
        self._files = files
        self._clock = context.clock
        self._deltas = Deltas()

    def read(self, ask_clock: timekeeping.AskClock | None) -> Rows:
        """The row of the machine."""
        text, number = self._files.text, self._files.number
        memory, stat = kernel.vmstat(text("/proc/vmstat")), kernel.stat_numbers(text("/proc/stat"))
        softnet = kernel.softnet(text("/proc/net/softnet_stat"))
        handles = kernel.file_handles(text("/proc/sys/fs/file-nr"))
        netfilter = "/proc/sys/net/netfilter/nf_conntrack_"
        counted = {
            "oom_kills_per_s": memory.get("oom_kill"), "major_faults_per_s": memory.get("pgmajfault"),
            "allocation_stalls_per_s": memory.get("allocstall"), "compaction_stalls_per_s": memory.get("compact_stall"),
            "swap_in_pages_per_s": memory.get("pswpin"), "swap_out_pages_per_s": memory.get("pswpout"),
            "interrupts_per_s": stat.get("interrupts"), "soft_interrupts_per_s": stat.get("soft_interrupts"),
            "softnet_dropped_per_s": softnet[0] if softnet else None, "softnet_squeezed_per_s": softnet[1] if softnet else None,
        }  # fmt: skip
        now_ns = self._clock.monotonic_ns()
        rates = {name: self._deltas.per_second(name, _whole(value), now_ns) for name, value in counted.items()}
        gauges = present({
            "blocked_tasks": stat.get("blocked_tasks"),
            "conntrack_used_ratio": kernel.ratio(number(f"{netfilter}count"), number(f"{netfilter}max")),
            "file_handles_count": handles[0] if handles else None,
            "file_handles_ratio": kernel.ratio(*handles) if handles else None,
            "hung_tasks_count": number("/proc/sys/kernel/hung_task_detect_count"),
            "clock_source": kernel.clock_source_number(text("/sys/devices/system/clocksource/clocksource0/current_clocksource")),
        })  # fmt: skip
        return {"machine": {"machine": {**rates, **gauges, **_clock_row(ask_clock)}}}


class SensorReader:
    """Sensors and error counters; uncorrectable memory errors are told at once, with the module's label."""

    def __init__(self, files: Files, context: Context) -> None:
        self._files = files
        self._context = context
        # a large machine has a hundred such devices with five files each: these are not kept open
        self._device_files = Files(Path(files.root or "/"), context.clock)
        self._deltas = Deltas()
        self._found_ns: int | None = None
        self._sensors: list[sensors.Sensor] = []
        self._devices: list[sensors.PciDevice] = []
        self._cpus: list[str] = []
        self._uncorrected: dict[str, float] = {}

    def read(self) -> Rows:
        """Rows of the board and of the PCIe devices."""
        now_ns = self._context.clock.monotonic_ns()
        if self._found_ns is None or now_ns - self._found_ns >= FIND_EVERY_NS:
            self._found_ns = now_ns
            self._sensors, self._devices = sensors.find_sensors(self._files), sensors.find_pci(self._files)
            self._cpus = sensors.some_processors(self._files, CLOCKED_CPUS)
        return {
            "board": {
                "board": {
                    **sensors.sensor_row(self._files, self._sensors),
                    **self._memory(now_ns),
                    **self._others(now_ns),
                }
            },
            "pcie": {device.address: self._device(device, now_ns) for device in self._devices},
        }

    def found(self) -> str:
        """What there is to read, for a person."""
        counts = {
            "sensors": len(self._sensors),
            "PCIe devices": len(self._devices),
            "memory controllers": len(self._uncorrected),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def _memory(self, now_ns: int) -> dict[str, float]:
        counts = sensors.memory_errors(self._files)
        for controller, (_, uncorrected) in counts.items():
            before = self._uncorrected.get(controller)
            if uncorrected is not None:
                self._uncorrected[controller] = uncorrected
                if before is not None and uncorrected > before:
                    self._tell(controller, uncorrected)
        corrected = kernel.sum_of(ce for ce, _ in counts.values())
        total = kernel.sum_of(ue for _, ue in counts.values())
        rate = self._deltas.per_second("corrected", _whole(corrected), now_ns)
        return {"dimm_correctable_per_s": rate, **present({"dimm_uncorrectable_count": total})}

    def _tell(self, controller: str, count: float) -> None:
        module = sensors.worst_dimm(self._files, controller, "ue")
        line = f"memory controller {controller}: {count:.0f} uncorrectable errors, most of them in {module or 'an unknown module'}"
        event = LogEvent(source="machine", severity="critical", code="edac_uncorrected", line=line,
                         attributes={"controller": controller, "count": f"{count:.0f}", "module": module})  # fmt: skip
        self._context.outlet.log(event, urgent=True)

    def _others(self, now_ns: int) -> dict[str, float]:
        throttled = self._files.number("/sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count")
        values = {
            "cpu_clock_mhz": sensors.clocks_mhz(self._files, self._cpus),
            "power_supplies_ok": sensors.power_supplies(self._files),
        }
        return {
            **present(values),
            "cpu_throttled_per_s": self._deltas.per_second("throttled", _whole(throttled), now_ns),
        }

    def _device(self, device: sensors.PciDevice, now_ns: int) -> Row:
        counts, link = sensors.pci_counts(self._device_files, device), sensors.pci_link(self._device_files, device)
        self._device_files.close()
        row = {
            f"aer_{name}_per_s": self._deltas.per_second((device, name), _whole(counts.get(file)), now_ns)
            for name, file in (("corrected", "aer_dev_correctable"), ("nonfatal", "aer_dev_nonfatal"))
        }
        return {
            **row,
            **present({"aer_fatal_count": counts.get("aer_dev_fatal")}),
            **link,
        }


class SlowReader:
    """What is dear to read: the table of interrupts (megabytes on large machines) and file systems, which may hang."""

    def __init__(self, files: Files, context: Context) -> None:
        self._files = files
        self._directories = [files.path("/"), str(context.run_directory), str(context.state_directory)]

    def read(self) -> Rows:
        """More of the board's row."""
        counts = kernel.error_interrupts(self._files.text("/proc/interrupts"))
        self._files.forget("/proc/interrupts")
        row = {f"{name}_count": count for name, count in counts.items()}
        return {"board": {"board": {**row, "disk_used_ratio": highest(map(_used_ratio, self._directories))}}}


class DiskReader:
    """NVMe disks, by their own health log."""

    ROOT = "/sys/class/nvme"

    def __init__(self, files: Files, context: Context) -> None:
        self._files = files
        self._clock = context.clock
        self._deltas = Deltas()
        self.refused = False

    def read(self, ask: smart.AskDisk) -> Rows:
        """A row per disk, and the worst of all for the board."""
        rows: dict[str, Row] = {}
        self.refused = False
        for name in self._files.names(self.ROOT):
            state = self._files.text(f"{self.ROOT}/{name}/state")
            live = {"live": float(state == "live")} if state else {}
            rows[name] = {**live, **self._health(ask, name)}
        now_ns = self._clock.monotonic_ns()
        errors = [
            self._deltas.per_second(name, _whole(row.get("media_errors_count")), now_ns) for name, row in rows.items()
        ]
        known = [rate for rate in errors if not math.isnan(rate)]
        board = {
            "nvme_media_errors_per_s": sum(known) if known else NAN,
            "nvme_spare_ratio": min((row["spare_ratio"] for row in rows.values() if "spare_ratio" in row), default=NAN),
            "nvme_used_ratio": highest(row.get("used_ratio", NAN) for row in rows.values()),
        }
        return {"nvme": rows, "board": {"board": board}} if rows else {}

    def _health(self, ask: smart.AskDisk, name: str) -> Row:
        try:
            return smart.decode_health(ask(self._files.path(f"/dev/{name}")))
        except OSError:
            self.refused = True
            return {}


def _clock_row(ask: timekeeping.AskClock | None) -> dict[str, float]:
    if ask is None:
        return {}
    try:
        state = ask()
    except OSError:
        return {}
    return {"clock_synced": float(state.synced), "clock_correction_ms": state.offset_ms, "clock_error_ms": state.error_ms,
            "clock_frequency_ppm": state.frequency_ppm}  # fmt: skip


def _used_ratio(directory: str) -> float:
    try:
        found = os.statvfs(directory)
    except OSError:
        return NAN
    usable = found.f_blocks - found.f_bfree + found.f_bavail
    return (found.f_blocks - found.f_bfree) / usable if usable else NAN


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else int(value)
