"""AMD accelerators by the files of their driver: cheap enough for every tick."""

from __future__ import annotations

import re
from dataclasses import dataclass

from collectors.base import Context, Rates
from collectors.files import Files, to_number
from collectors.pages.amd_tools import link_of
from trainwarden.clock import NS_PER_S

DRM = "/sys/class/drm"
CARD = re.compile(r"card[0-9]+")
COUNT = re.compile(r"^(ue|ce):\s*([0-9]+)\s*$", re.MULTILINE)
SLOW_NS = 10 * NS_PER_S
LOOK_NS = 60 * NS_PER_S
OPEN_CHIPS = 16  # more than that many chips do not keep their files open: descriptors are limited

TEMPERATURES = {"junction": "temp_c", "mem": "memory_temp_c"}
CLOCKS = {"sclk": "sm_clock_mhz", "mclk": "memory_clock_mhz"}


@dataclass
class Card:
    """One chip: where its files are, and what its sensors are called."""

    path: str
    address: str
    sensors: dict[str, tuple[str, float]]
    slow: dict[str, float]


class Sysfs:
    """All chips with the driver bound.

    `pcie_bw` is left alone: the driver sleeps for a second in each read of it.
    """

    def __init__(self, context: Context) -> None:
        self._files: Files = context.files
        self._clock = context.clock
        self._rates = Rates(context.clock)
        self._cards: dict[str, Card] = {}
        self._looked_ns: int | None = None
        self._slow_ns: int | None = None

    def rows(self) -> dict[str, dict[str, float]]:
        """Rows by PCI address."""
        now_ns = self._clock.monotonic_ns()
        if self._looked_ns is None or now_ns - self._looked_ns >= LOOK_NS:
            self._looked_ns = now_ns
            self._look()
        slow = self._slow_ns is None or now_ns - self._slow_ns >= SLOW_NS
        if slow:
            self._slow_ns = now_ns
        return {address: self._row(card, slow) for address, card in self._cards.items()}

    def _look(self) -> None:
        found = {}
        for name in self._files.names(DRM):
            path = f"{DRM}/{name}/device"
            address = self._address(path) if CARD.fullmatch(name) else ""
            if address and address not in found:
                found[address] = self._card(path, address)
        for address in self._cards.keys() - found.keys():
            self._files.forget(self._cards[address].path)
        if found.keys() != self._cards.keys():
            self._slow_ns = None
        self._cards = dict(sorted(found.items()))
        self._rates.keep(lambda key: key[0] in found)

    def _card(self, path: str, address: str) -> Card:
        """The chip as it is now: a driver that was loaded again numbers its sensors, and the chips themselves, anew."""
        before = self._cards.get(address)
        card = Card(path, address, self._sensors(path), {})
        if before is not None and (before.path, before.sensors) == (path, card.sensors):
            return before
        if before is not None:
            self._files.forget(before.path)
            self._slow_ns = None
        return card

    def _address(self, path: str) -> str:
        """PCI address of one of AMD's chips; empty for another's, and for one that is gone."""
        vendor, event = self._files.text(f"{path}/vendor"), self._files.text(f"{path}/uevent")
        for name in ("vendor", "uevent"):
            self._files.forget(f"{path}/{name}")  # what is opened anew tells that the device is gone
        lines = [line.partition("=") for line in event.splitlines()]
        return next(
            (value.strip().lower() for key, _, value in lines if key == "PCI_SLOT_NAME" and vendor == "0x1002"), ""
        )

    def _sensors(self, path: str) -> dict[str, tuple[str, float]]:
        """Column → (file, factor). Which number a sensor has differs by chip; its label does not."""
        found: dict[str, tuple[str, float]] = {}
        for name in self._files.names(f"{path}/hwmon"):
            base = f"{path}/hwmon/{name}"
            for file in self._files.names(base):
                sensor, _, ending = file.partition("_")
                if ending != "label":
                    continue
                label = self._files.text(f"{base}/{file}")
                if label in TEMPERATURES:
                    found[TEMPERATURES[label]] = (f"{base}/{sensor}_input", 1e-3)
                elif label == "edge":
                    found.setdefault("temp_edge_c", (f"{base}/{sensor}_input", 1e-3))
                elif label in CLOCKS:
                    found[CLOCKS[label]] = (f"{base}/{sensor}_input", 1e-6)
            found["power_w"] = (f"{base}/power1_input", 1e-6)
            found["power_average_w"] = (f"{base}/power1_average", 1e-6)
            found["power_limit_w"] = (f"{base}/power1_cap", 1e-6)
        return found

    def _row(self, card: Card, slow: bool) -> dict[str, float]:
        number = self._files.number
        row: dict[str, float] = {}
        _put(row, "gpu_util_ratio", number(f"{card.path}/gpu_busy_percent"), 0.01)
        _put(row, "memory_util_ratio", number(f"{card.path}/mem_busy_percent"), 0.01)
        _put(row, "fb_used_bytes", number(f"{card.path}/mem_info_vram_used"))
        _put(row, "fb_total_bytes", number(f"{card.path}/mem_info_vram_total"))
        for column, (file, factor) in card.sensors.items():
            _put(row, column, number(file), factor)
        edge = row.pop("temp_edge_c", None)
        if edge is not None:
            row.setdefault("temp_c", edge)
        if "power_average_w" in row:
            row.setdefault("power_w", row["power_average_w"])
        if slow:
            card.slow = self._slow(card)
        if len(self._cards) > OPEN_CHIPS:
            self._files.forget(card.path)
        return {**row, **card.slow}

    def _slow(self, card: Card) -> dict[str, float]:
        """The link, replays and errors: each of the latter is a question to the chip's firmware."""
        text, path = self._files.text, card.path
        row = link_of(text(f"{path}/current_link_speed"))
        _put(row, "pcie_link_width", self._files.number(f"{path}/current_link_width"))
        highest = link_of(text(f"{path}/max_link_speed")).get("pcie_link_gen")
        _put(row, "pcie_link_gen_max", highest)
        _put(row, "pcie_link_width_max", self._files.number(f"{path}/max_link_width"))
        replays = self._files.number(f"{path}/pcie_replay_count")
        row["pcie_replay_per_s"] = self._rates.per_second((card.address, "replays"), replays)
        corrected, uncorrected = self._errors(f"{path}/ras")
        _put(row, "ecc_uncorrectable_count", uncorrected)
        row["ecc_correctable_per_s"] = self._rates.per_second((card.address, "ce"), corrected)
        return row

    def _errors(self, directory: str) -> tuple[float | None, float | None]:
        """Corrected and uncorrected errors, all blocks of the chip; None when no block tells."""
        sums: dict[str, float] = {}
        for name in self._files.names(directory):
            if name.endswith("_err_count"):
                for kind, count in COUNT.findall(self._files.text(f"{directory}/{name}")):
                    sums[kind] = sums.get(kind, 0.0) + (to_number(count) or 0.0)
        return sums.get("ce"), sums.get("ue")


def _put(row: dict[str, float], column: str, value: float | None, factor: float = 1.0) -> None:
    if value is not None:
        row[column] = value * factor
