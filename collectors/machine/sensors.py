"""Temperatures, fans, power, memory errors, PCIe errors: what /sys shows of a machine's hardware."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from collectors.files import Files, to_number
from collectors.machine.kernel import present, sum_of

HWMON, THERMAL, EDAC, PCI = (
    "/sys/class/hwmon",
    "/sys/class/thermal",
    "/sys/devices/system/edac/mc",
    "/sys/bus/pci/devices",
)
INLET = re.compile(r".*(inlet|ambient|intake|front).*", re.IGNORECASE)
CPU_CHIPS = {"coretemp", "k10temp", "zenpower", "cpu_thermal", "grace"}
DIMM_CHIPS = {"jc42", "spd5118"}
CPU_ZONES = re.compile(r"x86_pkg_temp|cpu.*", re.IGNORECASE)
PLAUSIBLE_C = (-40.0, 200.0)
# network, display, accelerator, NVMe, and the switches above them; anything else may stall when it is dead
PCI_CLASSES = ("0x02", "0x03", "0x12", "0x0108", "0x0604")
PART = re.compile(r"(temp|fan|power)(\d+)_(input|average)")
AER_TOTALS = {
    "aer_dev_correctable": "TOTAL_ERR_COR",
    "aer_dev_nonfatal": "TOTAL_ERR_NONFATAL",
    "aer_dev_fatal": "TOTAL_ERR_FATAL",
}


@dataclass(frozen=True)
class Sensor:
    """One value of a hardware monitor. `chip` and `label` say of what."""

    chip: str
    label: str
    kind: str
    path: str
    full_path: str


def find_sensors(files: Files) -> list[Sensor]:
    """Temperatures, fans and power meters of all chips."""
    found: list[Sensor] = []
    for monitor in files.names(HWMON):
        base = f"{HWMON}/{monitor}"
        entries = files.names(base)
        chip = files.text(f"{base}/name")
        for entry in entries:
            if (part := PART.fullmatch(entry)) is not None:
                stem = f"{base}/{part.group(1)}{part.group(2)}"
                label = files.text(f"{stem}_label") if f"{part.group(1)}{part.group(2)}_label" in entries else ""
                found.append(Sensor(chip, label, part.group(1), f"{base}/{entry}", f"{stem}_max"))
    return found


def sensor_row(files: Files, sensors: Iterable[Sensor]) -> dict[str, float]:
    """The hottest of each kind, the fastest fan of its maximum, the power of the machine."""
    by_column: dict[str, list[float]] = {}
    for sensor in sensors:
        column, value = _reading(files, sensor)
        if value is not None:
            by_column.setdefault(column, []).append(value)
    row = {column: max(values) for column, values in by_column.items()}
    return row if "cpu_temp_c" in row else {**row, **_zones(files)}


def _reading(files: Files, sensor: Sensor) -> tuple[str, float | None]:
    value = files.number(sensor.path)
    if sensor.kind == "temp":
        return _temperature_column(sensor), _celsius(value)
    if sensor.kind == "power":
        # only the meter of the whole machine: processors and cards have meters too
        whole = sensor.chip in ("power_meter", "acpi_power_meter", "ibmpowernv")
        return "server_power_w", value / 1e6 if whole and value is not None and value >= 0 else None
    maximum = files.number(sensor.full_path)
    return "fan_ratio", value / maximum if value is not None and maximum else None


def _temperature_column(sensor: Sensor) -> str:
    if INLET.fullmatch(sensor.label):
        return "inlet_temp_c"
    if sensor.chip in CPU_CHIPS:
        return "cpu_temp_c"
    if sensor.chip in DIMM_CHIPS:
        return "dimm_temp_c"
    return "nvme_temp_c" if sensor.chip == "nvme" else "other_temp_c"


def _zones(files: Files) -> dict[str, float]:
    """Processor temperature from the thermal zones, where no monitor tells it."""
    zones = [f"{THERMAL}/{name}" for name in files.names(THERMAL) if name.startswith("thermal_zone")]
    found = [
        _celsius(files.number(f"{zone}/temp")) for zone in zones if CPU_ZONES.fullmatch(files.text(f"{zone}/type"))
    ]
    hot = [value for value in found if value is not None]
    return {"cpu_temp_c": max(hot)} if hot else {}


def _celsius(millidegrees: float | None) -> float | None:
    if millidegrees is None or not PLAUSIBLE_C[0] < millidegrees / 1000 < PLAUSIBLE_C[1]:
        return None
    return millidegrees / 1000


def memory_errors(files: Files) -> dict[str, tuple[float | None, float | None]]:
    """Corrected and uncorrected errors by memory controller."""
    controllers = [name for name in files.names(EDAC) if re.fullmatch(r"mc\d+", name)]
    return {
        name: (files.number(f"{EDAC}/{name}/ce_count"), files.number(f"{EDAC}/{name}/ue_count")) for name in controllers
    }


def worst_dimm(files: Files, controller: str, what: str) -> str:
    """Label of the memory module with the most errors of a kind (``ce`` or ``ue``); empty when none has any."""
    base = f"{EDAC}/{controller}"
    best, label = 0.0, ""
    for module in files.names(base):
        count, name = None, f"{base}/{module}"
        if re.fullmatch(r"(dimm|rank)\d+", module):
            count, text = files.number(f"{name}/dimm_{what}_count"), files.text(f"{name}/dimm_label")
        elif re.fullmatch(r"csrow\d+", module):
            count, text = files.number(f"{name}/{what}_count"), files.text(f"{name}/ch0_dimm_label")
        if count is not None and count > best:
            best, label = count, text or f"{controller}/{module}"
    return label


@dataclass(frozen=True)
class PciDevice:
    """A device whose errors and link we watch."""

    address: str

    @property
    def base(self) -> str:
        """Directory."""
        return f"{PCI}/{self.address}"


def find_pci(files: Files) -> list[PciDevice]:
    """Adapters, accelerators, disks and switches that count errors or show their link; the class is read once."""
    found: list[PciDevice] = []
    for address in files.names(PCI):
        base = f"{PCI}/{address}"
        if files.text(f"{base}/class").startswith(PCI_CLASSES):
            entries = set(files.names(base))
            if entries & {"aer_dev_correctable", "current_link_width"}:
                found.append(PciDevice(address))
        files.forget(base)
    return found


def pci_counts(files: Files, device: PciDevice) -> dict[str, float]:
    """Corrected, non-fatal and fatal errors so far, by file name."""
    return present({name: aer_total(files.text(f"{device.base}/{name}"), total) for name, total in AER_TOTALS.items()})


def pci_link(files: Files, device: PciDevice) -> dict[str, float]:
    """Speed and width agreed on, and whether the link is narrower than both ends could."""
    speed = transfers(files.text(f"{device.base}/current_link_speed"))
    width, most = files.number(f"{device.base}/current_link_width"), files.number(f"{device.base}/max_link_width")
    narrow = None if not width or not most else float(width < most)
    return present({"link_speed_gts": speed, "link_width": width or None, "link_narrow": narrow})


def aer_total(text: str, total: str) -> float | None:
    """The total of an error file; the sum of its lines where it has none."""
    lines = {name: to_number(value) for name, _, value in (line.rpartition(" ") for line in text.splitlines())}
    return lines[total] if lines.get(total) is not None else sum_of(lines.values())


def transfers(text: str) -> float | None:
    """``16.0 GT/s PCIe`` as 16.0; None for ``Unknown``."""
    return to_number(text.partition(" ")[0]) if "GT/s" in text else None


def clocks_mhz(files: Files, processors: Iterable[str]) -> float | None:
    """Mean clock of some processors, from cpufreq."""
    values = [files.number(f"/sys/devices/system/cpu/{cpu}/cpufreq/scaling_cur_freq") for cpu in processors]
    known = [value / 1000 for value in values if value is not None]
    return sum(known) / len(known) if known else None


def some_processors(files: Files, at_most: int) -> list[str]:
    """Up to `at_most` processors with a clock of their own, evenly picked: two hundred files would cost more than they tell."""
    root = "/sys/devices/system/cpu"
    names = [name for name in files.names(root) if re.fullmatch(r"cpu\d+", name)]
    with_clock = [name for name in names if os.path.exists(files.path(f"{root}/{name}/cpufreq/scaling_cur_freq"))]
    return with_clock[:: max(1, -(-len(with_clock) // at_most))]


def power_supplies(files: Files) -> float | None:
    """Supplies that deliver, of those that the kernel knows."""
    root = "/sys/class/power_supply"
    states = [
        files.number(f"{root}/{name}/online")
        for name in files.names(root)
        if files.text(f"{root}/{name}/type") == "Mains"
    ]
    return sum_of(states)
