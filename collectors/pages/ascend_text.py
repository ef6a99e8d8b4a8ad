"""What Huawei's tools print: the table of `npu-smi info`, health words, and `hccn_tool` on the chips' own network ports."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from collectors.pages.ascend_faults import codes_in
from collectors.pages.text import PageError

MIB = 1024 * 1024
DARK_DBM = -40.0
HEALTH = {"OK": 0.0, "Warning": 1.0, "Alarm": 2.0, "Critical": 2.0}
FIRST = re.compile(r"\|\s*([0-9]+)\s+(\S+)\s*\|\s*([A-Za-z]+)\s*\|\s*(\S+)\s+(\S+)\s.*\|")
SECOND = re.compile(r"\|\s*([0-9]+)(?:\s+(\S+))?\s*\|\s*([0-9A-Fa-f:.]{7,}|NA)\s*\|\s*(\S+)\s+(.*)\|")
PAIR = re.compile(r"([0-9]+)\s*/\s*([0-9]+)")
LANE = re.compile(r"([RT]x) Power([0-9]+)")
NUMBER = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(?:\s|$)")


@dataclass
class NpuChip:
    """One line pair of `npu-smi info`."""

    card: int
    chip: int
    number: int
    address: str
    row: dict[str, float] = field(default_factory=dict)


def parse_info(text: str) -> list[NpuChip]:
    """Chips in the table of `npu-smi info`, all its shapes: with and without HBM, devices and physical numbers.

    Raises
    ------
    PageError
        ``no_chips``: there is no such table, or it is empty.
    """
    found: list[NpuChip] = []
    has_hbm = "HBM-Usage" in text
    first: re.Match[str] | None = None
    for line in text.splitlines():
        if line.count("|") != 4:  # rows of processes have one more
            continue
        second = SECOND.fullmatch(line.strip()) if first is not None else None
        if first is not None and second is not None:
            found.append(_chip(first, second, has_hbm))
            first = None
        else:
            first = FIRST.fullmatch(line.strip())
    if not found:
        raise PageError("no_chips", "npu-smi printed no table of chips")
    return found


def _chip(first: re.Match[str], second: re.Match[str], has_hbm: bool) -> NpuChip:
    card, _, health, power, temperature = first.groups()
    chip, other, address, busy, memory = second.groups()
    number = int(other) if other and other.isdecimal() else int(card)
    row: dict[str, float] = {}
    if health in HEALTH:
        row["health_state"] = HEALTH[health]
    for column, text, factor in (("power_w", power, 1.0), ("temp_c", temperature, 1.0), ("gpu_util_ratio", busy, 0.01)):
        value = to_float(text)
        if not math.isnan(value):
            row[column] = value * factor
    pairs = [(int(used), int(total)) for used, total in PAIR.findall(memory)]
    if pairs:
        used, total = pairs[1] if has_hbm and len(pairs) > 1 else pairs[0]
        if total:
            row |= {
                "fb_used_bytes": float(used * MIB),
                "fb_total_bytes": float(total * MIB),
                "fb_used_ratio": used / total,
            }
    return NpuChip(int(card), int(chip), number, "" if address == "NA" else address.lower(), row)


def parse_health(text: str) -> tuple[str, ...]:
    """Fault codes in `npu-smi info -t health`; none while it says ``NA``."""
    return codes_in(_fields(text).get("Error Code", ""))


def parse_optical(text: str) -> dict[str, float]:
    """Columns of the port from `hccn_tool -optical -g`: mW become dBm, mV become V; empty without a module."""
    fields = _fields(text)
    if fields.get("present", "") != "present":
        return {}
    lanes: dict[str, list[float]] = {"Rx": [], "Tx": []}
    for name, value in fields.items():
        match = LANE.fullmatch(name)
        if match and not math.isnan(to_float(value)):
            lanes[match.group(1)].append(to_float(value))
    row = optics(lanes["Rx"], lanes["Tx"])
    for column, name, factor in (("module_temp_c", "temperature", 1.0), ("module_voltage_v", "Vcc", 1e-3)):
        number = to_float(fields.get(name, ""))
        if not math.isnan(number):
            row[column] = number * factor
    bias = [to_float(value) for name, value in fields.items() if name.startswith("Tx Bias")]
    if bias and not any(math.isnan(value) for value in bias):
        row["bias_ma"] = min(bias)
    return row


def parse_counts(text: str) -> dict[str, float]:
    """Counts in `hccn_tool -stat -g` (``roce_rx_err_pkt_num:11``)."""
    numbers = {name: to_float(value) for name, value in _fields(text).items()}
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def parse_link(text: str) -> tuple[float, float]:
    """(times up, state 1 or 0) in `hccn_tool -link_stat -g`, NaN for what it does not say; its records begin with the newest."""
    count, state = math.nan, math.nan
    for line in text.splitlines():
        words = line.partition("]")[2] if line.startswith("[devid") else line
        if words.strip().startswith("link up count"):
            count = to_float(words.partition(":")[2])
        elif math.isnan(state) and words.rstrip().endswith(("LINK UP", "LINK DOWN")):
            state = float(words.rstrip().endswith("LINK UP"))
    return count, state


def optics(rx_mw: list[float], tx_mw: list[float]) -> dict[str, float]:
    """Darkest lanes in dBm, and how far the received ones lie apart."""
    row: dict[str, float] = {}
    if rx_mw:
        levels = [to_dbm(value) for value in rx_mw]
        row |= {"rx_power_dbm": min(levels), "rx_power_spread_db": max(levels) - min(levels)}
    if tx_mw:
        row["tx_power_dbm"] = min(to_dbm(value) for value in tx_mw)
    return row


def to_dbm(milliwatt: float) -> float:
    """Milliwatts on the logarithmic scale; no light is -40.

    Examples
    --------
    >>> to_dbm(1.0), to_dbm(0.0)
    (0.0, -40.0)
    """
    return max(DARK_DBM, 10 * math.log10(milliwatt)) if milliwatt > 0 else DARK_DBM


def to_float(text: str) -> float:
    """The number that a text begins with (``47 C``, ``1.0189 mW``); NaN for ``-``, ``NA``, ``not supported``."""
    match = NUMBER.match(text.strip())
    return float(match.group(1)) if match else math.nan


def _fields(text: str) -> dict[str, str]:
    parts = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in parts if colon}
