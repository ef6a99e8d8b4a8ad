"""MetaX: the page of mx-exporter, and the table that mx-smi prints."""

from __future__ import annotations

import re
from dataclasses import replace

from collectors.pages.rows import RATE, Rows, Rule, number_label
from collectors.pages.text import Labels, Page, PageError, Point

KIB = 1024
MIB = 1024 * 1024
HOTTEST_C = 200.0
TEMPERATURES = ("mx_chip_hotspot_temp", "mx_chip_hbm_temp")
STATE = "mx_gpu_state"

RULES = (
    Rule("mx_gpu_usage", "gpu_util_ratio", 0.01),
    Rule("mx_gpu_util", "gpu_util_ratio", 0.01),
    Rule("mx_gpu_clock", "sm_clock_mhz"),
    Rule("mx_mem_clock", "memory_clock_mhz"),
    Rule("mx_board_power", "power_w", 1e-3),
    Rule("mx_power_limit", "power_limit_w", 1e-3),
    Rule("mx_chip_hotspot_temp", "temp_c"),
    Rule("mx_chip_hbm_temp", "memory_temp_c"),
    *(Rule(f"mx_memory_{name}", column, KIB, where=where)
      for name, column in (("used", "fb_used_bytes"), ("total", "fb_total_bytes")) for where in (("type", "vram"), ("type", ""))),
    *(Rule("mx_mxlk_traffic_total_bytes", f"nvlink_{way}_bytes_per_s", how=RATE, where=("type", way), adds=True) for way in ("rx", "tx")),
    Rule("mx_mxlk_aer_count", "nvlink_crc_errors_per_s", how=RATE, where=("type", "ce"), adds=True),
    Rule("mx_pci_event", "pcie_correctable_per_s", how=RATE, where=("type", "aer_ce"), adds=True),
    Rule("mx_pci_event", "pcie_uncorrectable_count", where=("type", "aer_ue"), adds=True),
)  # fmt: skip

FIRST = re.compile(r"\|\s*([0-9]+)\s+(\S.*?)\s*\|\s*([0-9A-Fa-f:.]{7,})\s*\|\s*([0-9]+)\s*%\s*\|")
SECOND = re.compile(
    r"\|\s*([0-9.]+)\s*C\s+([0-9.]+)\s*W(?:\s*/\s*([0-9.]+)\s*W)?\s*\|\s*([0-9]+)\s*/\s*([0-9]+)\s*MiB\s*\|\s*(.*?)\s*\|"
)


def chip_of(labels: Labels) -> str:
    """``gpu0``."""
    number = number_label(labels, "deviceId")
    return f"gpu{number}" if number else ""


def unknown(value: float) -> bool:
    """Nothing that is read here is negative."""
    return value < 0


def in_degrees(page: Page) -> Page:
    """The page with all temperatures in C. The documented page has C (``35.75``), the library hundredths: no chip is over 200 C."""
    points = dict(page.points)
    for name in TEMPERATURES:
        if name in points:
            points[name] = tuple(_cooled(point) for point in points[name])
    return replace(page, points=points)


def _cooled(point: Point) -> Point:
    return point._replace(value=point.value / 100) if point.value > HOTTEST_C else point


def failed(page: Page) -> set[str]:
    """Chips that the exporter calls unavailable, by the reason it gives."""
    return {chip_of(p.labels) for p in page.points.get(STATE, ()) if p.labels.get("unavailable_reason")} - {""}


def parse_smi(text: str) -> Rows:
    """Rows in the table of `mx-smi`.

    Raises
    ------
    PageError
        ``no_chips``: there is no such table.
    """
    rows: Rows = {}
    first: re.Match[str] | None = None
    for line in text.splitlines():
        second = SECOND.fullmatch(line.strip()) if first is not None else None
        if first is not None and second is not None:
            rows[f"gpu{int(first.group(1))}"] = _row(first, second)
            first = None
        else:
            first = FIRST.fullmatch(line.strip())
    if not rows:
        raise PageError("no_chips", "mx-smi printed no table of chips")
    return rows


def _row(first: re.Match[str], second: re.Match[str]) -> dict[str, float]:
    temperature, power, limit, used, total, state = second.groups()
    row = {"gpu_util_ratio": float(first.group(4)) * 0.01, "temp_c": float(temperature), "power_w": float(power),
           "fb_used_bytes": float(int(used) * MIB), "fb_total_bytes": float(int(total) * MIB)}  # fmt: skip
    if limit:
        row["power_limit_w"] = float(limit)
    if state:
        row["health_state"] = 0.0 if state == "Available" else 2.0
    return row
