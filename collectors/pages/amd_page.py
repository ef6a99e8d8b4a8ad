"""What stands on a page of AMD's device-metrics-exporter: names with or without ``amd_`` before them."""

from __future__ import annotations

from collectors.pages.amd_tools import GENERATIONS, MIB
from collectors.pages.rows import RATE, Rule, number_label
from collectors.pages.text import Labels, Page

PREFIXES = ("amd_", "")
SPEEDS = ("pcie_speed", "pcie_max_speed")
HEALTH = "gpu_health"
CLOCKS = (
    ("sm_clock_mhz", ("system", "GPU_CLOCK_TYPE_SYSTEM")),
    ("memory_clock_mhz", ("memory", "GPU_CLOCK_TYPE_MEMORY")),
)

_RULES = (
    Rule("gpu_gfx_activity", "gpu_util_ratio", 0.01),
    Rule("gpu_umc_activity", "memory_util_ratio", 0.01),
    Rule("gpu_package_power", "power_w"),
    Rule("gpu_power_usage", "power_w"),
    Rule("gpu_average_package_power", "power_w"),
    Rule("gpu_average_package_power", "power_average_w"),
    Rule("gpu_energy_consumed", "energy_j_per_s", 1e-6, RATE),
    Rule("gpu_junction_temperature", "temp_c"),
    Rule("gpu_edge_temperature", "temp_c"),
    Rule("gpu_memory_temperature", "memory_temp_c"),
    *(Rule("gpu_clock", column, where=("clock_type", kind))
      for column, kinds in (CLOCKS)
      for kind in kinds),
    Rule("gpu_total_vram", "fb_total_bytes", float(MIB)),
    Rule("gpu_used_vram", "fb_used_bytes", float(MIB)),
    Rule("gpu_ecc_correct_total", "ecc_correctable_per_s", how=RATE),
    Rule("gpu_ecc_uncorrect_total", "ecc_uncorrectable_count"),
    Rule("pcie_replay_count", "pcie_replay_per_s", how=RATE),
    Rule("gpu_xgmi_link_rx", "nvlink_rx_bytes_per_s", 1024.0, RATE, adds=True),
    Rule("gpu_xgmi_link_tx", "nvlink_tx_bytes_per_s", 1024.0, RATE, adds=True),
    Rule("gpu_violation_ppt_residency_percentage", "power_violation_ratio", 0.01),
    Rule("gpu_violation_socket_thermal_residency_percentage", "thermal_violation_ratio", 0.01),
    Rule("gpu_violation_processor_hot_residency_percentage", "hw_thermal_ratio", 0.01),
)  # fmt: skip


def rules() -> tuple[Rule, ...]:
    """All of them, under both spellings."""
    return tuple(
        Rule(prefix + rule.metric, rule.column, rule.factor, rule.how, rule.where, rule.adds)
        for prefix in PREFIXES for rule in _RULES
    )  # fmt: skip


def extra_metrics() -> frozenset[str]:
    """Names that are read besides those of the rules."""
    return frozenset(prefix + name for prefix in PREFIXES for name in (*SPEEDS, HEALTH))


def key_of(labels: Labels) -> str:
    """``<address or number>#<partition>`` of a series; empty for one without a GPU.

    Examples
    --------
    >>> key_of({"gpu_id": "3", "partition_id": "1", "pcie_bus_id": "0000:0C:00.1"})
    '0000:0c:00.1#1'
    """
    number = number_label(labels, "gpu_id")
    partition = number_label(labels, "gpu_partition_id") or number_label(labels, "partition_id") or "0"
    address = labels.get("pcie_bus_id") or labels.get("pci_bus_id") or ""
    return f"{address.lower() or number}#{partition}" if number else ""


def blank(value: float) -> bool:
    """The library's "not supported": all bits set, in any of its widths."""
    return value in (65535.0, 4294967295.0) or value >= 1.8446744073709550e19


def extras(page: Page) -> dict[str, dict[str, float]]:
    """Columns that are no plain multiple: generations from GT/s, the exporter's own health verdict."""
    found: dict[str, dict[str, float]] = {}
    for prefix in PREFIXES:
        for name, column in zip(SPEEDS, ("pcie_link_gen", "pcie_link_gen_max"), strict=True):
            for point in page.points.get(prefix + name, ()):
                if point.value in GENERATIONS and key_of(point.labels):
                    found.setdefault(key_of(point.labels), {})[column] = GENERATIONS[point.value]
        for point in page.points.get(prefix + HEALTH, ()):
            if point.value in (0.0, 1.0) and key_of(point.labels):
                found.setdefault(key_of(point.labels), {})["health_state"] = 0.0 if point.value else 2.0
    return found
