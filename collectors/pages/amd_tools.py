"""What AMD's tools print as JSON: `rocm-smi`, whose keys move with every release, and `amd-smi`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from collectors.base import NAN
from collectors.pages.text import PageError

MIB = 1024 * 1024
GENERATIONS = {2.5: 1.0, 5.0: 2.0, 8.0: 3.0, 16.0: 4.0, 32.0: 5.0, 64.0: 6.0}
UNITS = {
    "": 1.0, "W": 1.0, "mW": 1e-3, "uW": 1e-6, "C": 1.0, "mC": 1e-3, "%": 0.01, "B": 1.0, "KB": 1024.0, "MB": float(MIB),
    "GB": 1024.0 * MIB, "MHz": 1.0, "GHz": 1000.0, "J": 1.0, "mJ": 1e-3, "uJ": 1e-6, "GT/s": 1.0,
}  # fmt: skip
NUMBER = re.compile(r"\(?\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/%]*)\)?")
LINE_OPENING = re.compile(r"^[\[{]", re.MULTILINE)
MOST_OPENINGS = 100
LINK = re.compile(r"([0-9.]+)\s*GT/s(?:\s*PCIe)?(?:\s*x([0-9]+))?")

# our column: (keys of the releases, newest first; factor). A key that says "N/A" is passed over for the next one.
ROCM_KEYS: dict[str, tuple[tuple[str, ...], float]] = {
    "gpu_util_ratio": (("GPU use (%)",), 0.01),
    # "GPU Memory Allocated (VRAM%)" looks alike and is another thing: how full it is
    "memory_util_ratio": (("GPU Memory Read/Write Activity (%)", "GPU memory use (%)"), 0.01),
    "power_w": (("Current Socket Graphics Package Power (W)", "Average Graphics Package Power (W)"), 1.0),
    "power_average_w": (("Average Graphics Package Power (W)",), 1.0),
    "power_limit_w": (("Max Graphics Package Power (W)",), 1.0),
    "temp_c": (("Temperature (Sensor junction) (C)", "Temperature (Sensor edge) (C)"), 1.0),
    "memory_temp_c": (("Temperature (Sensor memory) (C)", "Temperature (Sensor HBM 0) (C)"), 1.0),
    "sm_clock_mhz": (("sclk clock speed:", "sclk clock speed"), 1.0),
    "memory_clock_mhz": (("mclk clock speed:", "mclk clock speed"), 1.0),
    "fb_total_bytes": (("VRAM Total Memory (B)",), 1.0),
    "fb_used_bytes": (("VRAM Total Used Memory (B)",), 1.0),
}
ROCM_COUNTS = {
    "pcie_replay_per_s": (("PCIe Replay Count",), 1.0),
    "energy_j_per_s": (("Accumulated Energy (uJ)",), 1e-6),
}
# our column: paths in `amd-smi metric`, the first that has a number counts
SMI_PATHS: dict[str, tuple[str, ...]] = {
    "gpu_util_ratio": ("usage.gfx_activity",),
    "memory_util_ratio": ("usage.umc_activity",),
    "power_w": ("power.current_socket_power", "power.socket_power", "power.average_socket_power"),
    "power_average_w": ("power.average_socket_power",),
    "temp_c": ("temperature.hotspot", "temperature.edge"),
    "memory_temp_c": ("temperature.mem",),
    "sm_clock_mhz": ("clock.gfx_0.clk", "clock.gfx.clk"),
    "memory_clock_mhz": ("clock.mem_0.clk", "clock.mem.clk"),
    "fb_total_bytes": ("mem_usage.total_vram",),
    "fb_used_bytes": ("mem_usage.used_vram",),
    "pcie_link_width": ("pcie.width", "pcie.current_lanes"),
    "ecc_uncorrectable_count": ("ecc.total_uncorrectable_count", "ecc.total_uncorrect"),
}
SMI_COUNTS = {
    "pcie_replay_per_s": ("pcie.replay_count", "pcie.pcie_replay_count"),
    "energy_j_per_s": ("energy.total_energy_consumption",),
    "ecc_correctable_per_s": ("ecc.total_correctable_count", "ecc.total_correct"),
}
PHYSICAL = frozenset({
    "power_w", "power_average_w", "power_limit_w", "temp_c", "memory_temp_c", "pcie_link_gen", "pcie_link_width", "pcie_replay_per_s",
    "energy_j_per_s", "ecc_correctable_per_s", "ecc_uncorrectable_count",
})  # fmt: skip


@dataclass
class Chip:
    """What a tool says of one chip, or of one partition of it.

    Attributes
    ----------
    number
        The tool's own number.
    address
        PCI address in lower case; empty when the tool does not say.
    partition
        0 for a whole chip and for the first part.
    part_only
        The row speaks of this part alone, also where it is the first.
    counts
        Running counts, from which rates are still to be made.
    """

    number: int
    address: str = ""
    partition: int = 0
    part_only: bool = False
    row: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)


def parse_tool(output: bytes) -> list[Chip]:
    """Chips in the output of `rocm-smi --json` or `amd-smi metric --json`, whichever it is.

    Raises
    ------
    PageError
        ``not_json``: what the tool printed has no JSON; ``no_chips``: it has no chip.
    """
    document = parse_json(output)
    if isinstance(document, dict) and any(key.startswith("card") for key in document):
        chips = list(_rocm(document))
    else:
        chips = [chip for entry in _entries(document) for chip in (_smi(entry), *_parts(entry))]
    if not chips:
        raise PageError("no_chips", "the tool's answer names no chip")
    return chips


def parse_list(output: bytes) -> dict[int, tuple[str, int]]:
    """Number → (PCI address, partition) in `amd-smi list --json`."""
    found: dict[int, tuple[str, int]] = {}
    for entry in _entries(parse_json(output)):
        partition = entry.get("partition_id")
        address = str(entry.get("bdf", "")).lower()
        found[_number(entry)] = (address, partition if isinstance(partition, int) else 0)
    return found


def chip_address(address: str) -> str:
    """An address without its function: partitions of a chip are functions of one device."""
    return address.rpartition(".")[0] or address


def told_apart(chips: list[Chip]) -> None:
    """Number the parts of a chip in the tool's order where the tool gives several the same address and no number.

    Without it the last part would be taken for the chip, and where they differ in their function each would be a chip with the power of
    all of them.
    """
    groups: dict[str, list[Chip]] = {}
    for chip in chips:
        if chip.address and not chip.part_only:
            groups.setdefault(chip_address(chip.address), []).append(chip)
    for group in groups.values():
        if len({chip.partition for chip in group}) < len(group):
            for number, chip in enumerate(sorted(group, key=lambda chip: (chip.address, chip.number))):
                chip.partition = number


def parse_json(output: bytes) -> Any:
    """The JSON in a tool's answer; lines of warnings, bracketed ones too, may stand before it. Raises `PageError`.

    Only what begins a line is tried: the inside of an answer that was cut off is no answer.
    """
    text = output.decode("utf-8", "replace")
    first = [at for at in (text.find("{"), text.find("[")) if at >= 0][:2]
    starts = [match.start() for match in LINE_OPENING.finditer(text)][:MOST_OPENINGS] or sorted(first)[:1]
    decoder, others = json.JSONDecoder(), []
    for start in starts:
        try:
            found = decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) or all(isinstance(part, dict) for part in found):
            return found
        others.append(found)  # "[1] a warning" begins with JSON as well
    if others:
        return others[0]
    raise PageError("not_json", f"the tool's answer is no JSON but {text.strip()[:60]!r}")


def number_of(value: object, percent_is: float = 0.01) -> float:
    """A value in our unit: a number, ``{"value": 5, "unit": "W"}``, ``"(300Mhz)"``, ``"142 W"``; NaN for ``N/A`` and unknown units.

    Examples
    --------
    >>> number_of({"value": 2, "unit": "GB"}), number_of("(300Mhz)"), number_of("N/A (Secondary die)")
    (2147483648.0, 300.0, nan)
    """
    unit = ""
    if isinstance(value, Mapping):
        unit, value = str(value.get("unit", "")), value.get("value")
    if isinstance(value, str):
        match = NUMBER.fullmatch(value.strip())
        if match is None:
            return NAN
        value, unit = float(match.group(1)), unit or match.group(2)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return NAN
    factor = percent_is if unit == "%" else UNITS.get(unit, UNITS.get(unit.replace("Mhz", "MHz"), NAN))
    return float(value) * factor


def link_of(text: str) -> dict[str, float]:
    """Generation and lanes in ``0 (16.0GT/s x16)`` or ``16.0 GT/s PCIe``."""
    match = LINK.search(text)
    if match is None:
        return {}
    found = {"pcie_link_gen": GENERATIONS.get(float(match.group(1)) if match.group(1).count(".") < 2 else 0.0, NAN)}
    if match.group(2):
        found["pcie_link_width"] = float(match.group(2))
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _rocm(document: Mapping[str, Any]) -> Iterator[Chip]:
    for key, card in document.items():
        number = key.removeprefix("card")
        if (
            key == number
            or not (number.isascii() and number.isdecimal())
            or len(number) > 4
            or not isinstance(card, dict)
        ):
            continue
        chip = Chip(int(number), str(card.get("PCI Bus", "")).lower())
        for target, table in ((chip.row, ROCM_KEYS), (chip.counts, ROCM_COUNTS)):
            for column, (keys, factor) in table.items():
                _put(target, column, (number_of(card.get(each), 1.0) * factor for each in keys))
        chip.row |= link_of(str(card.get("pcie clock level", "")))
        yield chip


def _entries(document: object) -> list[dict[str, Any]]:
    if isinstance(document, dict):
        document = document.get("gpu_data", [])
    found = [entry for entry in document if isinstance(entry, dict)] if isinstance(document, list) else []
    return [entry for entry in found if 0 <= _number(entry) < 10_000]


def _number(entry: Mapping[str, Any]) -> int:
    number = entry.get("gpu")
    return number if isinstance(number, int) and not isinstance(number, bool) else -1


def _smi(entry: Mapping[str, Any]) -> Chip:
    chip = Chip(_number(entry))
    for target, table in ((chip.row, SMI_PATHS), (chip.counts, SMI_COUNTS)):
        for column, paths in table.items():
            _put(target, column, (number_of(_at(entry, path)) for path in paths))
    speed = number_of(_at(entry, "pcie.speed"))
    if speed in GENERATIONS:
        chip.row["pcie_link_gen"] = GENERATIONS[speed]
    return chip


def _parts(entry: Mapping[str, Any]) -> Iterator[Chip]:
    """How busy each part is, which is told of the whole chip: ``gfx_busy_inst`` has a list for each of more parts than one."""
    busy = _at(entry, "usage.gfx_busy_inst")
    if not isinstance(busy, Mapping) or len(busy) < 2:
        return
    for key, values in busy.items():
        number = str(key).removeprefix("xcp_")
        known = [number_of(value) for value in values] if isinstance(values, list) else []
        present = [value for value in known if not math.isnan(value)]
        if number.isascii() and number.isdecimal() and len(number) <= 4 and present:
            part = Chip(_number(entry), partition=int(number), part_only=True)
            part.row["gpu_util_ratio"] = sum(present) / len(present)
            yield part


def _at(entry: Mapping[str, Any], path: str) -> object:
    found: object = entry
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _put(target: dict[str, float], column: str, values: Iterator[float]) -> None:
    value = next((value for value in values if not math.isnan(value)), NAN)
    if not math.isnan(value):
        target[column] = value
