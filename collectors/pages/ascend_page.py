"""What stands on a page of Huawei's npu-exporter."""

from __future__ import annotations

from collectors.pages.ascend_text import MIB, optics
from collectors.pages.rows import RATE, Rule, number_label
from collectors.pages.text import Labels, Page

INFO, CHIP = "npu_chip_info_", "npu_chip_"
CODES = (INFO + "error_code", *(f"{INFO}error_code_{i}" for i in range(1, 10)))
HEALTH = INFO + "health_status"
PRESENT = CHIP + "optical_state"
LANES = {way: tuple(f"{CHIP}optical_{way}_power_{i}" for i in range(4)) for way in ("rx", "tx")}
SPEED = CHIP + "link_speed"
BITS_PER_MBIT = 1024 * 1024

GPU_RULES = (
    Rule(INFO + "utilization", "gpu_util_ratio", 0.01),
    Rule(INFO + "hbm_bandwidth_utilization", "dram_active_ratio", 0.01),
    Rule(INFO + "aicore_current_freq", "sm_clock_mhz"),
    Rule(INFO + "power", "power_w"),
    Rule(INFO + "temperature", "temp_c"),
    Rule(INFO + "hbm_temperature", "memory_temp_c"),
    Rule(INFO + "hbm_total_memory", "fb_total_bytes", float(MIB)),
    Rule(INFO + "hbm_used_memory", "fb_used_bytes", float(MIB)),
    Rule(INFO + "total_memory", "ddr_total_bytes", float(MIB)),
    Rule(INFO + "used_memory", "ddr_used_bytes", float(MIB)),
    Rule(INFO + "hbm_ecc_single_bit_error_cnt", "ecc_correctable_per_s", how=RATE),
    Rule(INFO + "hbm_ecc_double_bit_error_cnt", "ecc_uncorrectable_count"),
    Rule(INFO + "hbm_ecc_total_single_bit_error_cnt", "ecc_correctable_aggregate_count"),
    Rule(INFO + "hbm_ecc_total_double_bit_error_cnt", "ecc_uncorrectable_aggregate_count"),
    Rule(INFO + "hbm_ecc_single_bit_isolated_pages_cnt", "retired_pages_count", adds=True),
    Rule(INFO + "hbm_ecc_double_bit_isolated_pages_cnt", "retired_pages_count", adds=True),
    Rule(INFO + "process_info_num", "compute_processes_count"),
    Rule(INFO + "hccs_bandwidth_info_total_rx", "nvlink_rx_bytes_per_s", 1e9),
    Rule(INFO + "hccs_bandwidth_info_total_tx", "nvlink_tx_bytes_per_s", 1e9),
)
NIC_RULES = (
    Rule(INFO + "link_status", "up"),
    Rule(INFO + "link_status", "carrier"),
    Rule(INFO + "bandwidth_rx", "rx_bytes_per_s", 1e6),
    Rule(INFO + "bandwidth_tx", "tx_bytes_per_s", 1e6),
    Rule(CHIP + "roce_rx_all_pkt_num", "rx_packets_per_s", how=RATE),
    Rule(CHIP + "roce_tx_all_pkt_num", "tx_packets_per_s", how=RATE),
    Rule(CHIP + "roce_rx_err_pkt_num", "rx_errors_per_s", how=RATE),
    Rule(CHIP + "roce_tx_err_pkt_num", "tx_errors_per_s", how=RATE),
    Rule(CHIP + "link_up_num", "link_recovery_per_s", how=RATE),
    Rule(CHIP + "roce_new_pkt_rty_num", "retransmit_timeouts_per_s", how=RATE),
    Rule(CHIP + "roce_tx_cnp_pkt_num", "cnp_sent_per_s", how=RATE),
    Rule(INFO + "rx_ecn_num", "ecn_marked_per_s", how=RATE),
)
PORT_RULES = (
    Rule(CHIP + "mac_rx_pfc_pkt_num", "pause_rx_per_s", how=RATE),
    Rule(CHIP + "mac_tx_pfc_pkt_num", "pause_tx_per_s", how=RATE),
    *(Rule(f"{CHIP}mac_{way}_{kind}_num", f"pause_{way}_all_per_s", how=RATE, adds=True)
      for way in ("rx", "tx") for kind in ("pfc_pkt", "pause")),
    Rule(INFO + "rx_fcs_num", "rx_crc_errors_per_s", how=RATE),
    Rule(CHIP + "optical_temp", "module_temp_c"),
    Rule(CHIP + "optical_vcc", "module_voltage_v", 1e-3),
)  # fmt: skip
OTHERS = frozenset({*CODES, HEALTH, PRESENT, SPEED, *LANES["rx"], *LANES["tx"]})


def chip_of(labels: Labels) -> str:
    """``gpu0``: the chip, in the words of the catalogue."""
    number = number_label(labels, "id")
    return f"gpu{number}" if number else ""


def port_of(labels: Labels) -> str:
    """``npu0``: the chip's own network port."""
    number = number_label(labels, "id")
    return f"npu{number}" if number else ""


def unknown(value: float) -> bool:
    """The exporter writes -1 for what it could not read; nothing that is read here is negative."""
    return value < 0


def fill(row: dict[str, float]) -> None:
    """Memory: HBM where the chip has it, else DDR; a total of 0 means that there is none."""
    ddr_total, ddr_used = row.pop("ddr_total_bytes", 0.0), row.pop("ddr_used_bytes", None)
    if not row.get("fb_total_bytes"):
        row.pop("fb_total_bytes", None)
        row.pop("fb_used_bytes", None)
        if ddr_total and ddr_used is not None:
            row |= {"fb_total_bytes": ddr_total, "fb_used_bytes": ddr_used}
    if "fb_total_bytes" in row and "fb_used_bytes" in row:
        row["fb_used_ratio"] = row["fb_used_bytes"] / row["fb_total_bytes"]


def health(page: Page, fresh_after_ms: float) -> dict[str, float]:
    """0 well, 2 failed, by chip; a chip whose health could not be read is left out."""
    states = {1.0: 0.0, 0.0: 2.0}
    points = [
        p for p in page.points.get(HEALTH, ()) if p.value in states and (p.at_ms is None or p.at_ms >= fresh_after_ms)
    ]
    return {chip_of(point.labels): states[point.value] for point in points if chip_of(point.labels)}


def light(page: Page, fresh_after_ms: float) -> dict[str, dict[str, float]]:
    """Columns of the optics by port; none where the exporter says that there is no module."""
    absent = {port_of(point.labels) for point in page.points.get(PRESENT, ()) if point.value == 0}
    lanes: dict[str, dict[str, list[float]]] = {}
    for way, names in LANES.items():
        for name in names:
            for point in page.points.get(name, ()):
                port = port_of(point.labels)
                fresh = point.at_ms is None or point.at_ms >= fresh_after_ms
                if port and port not in absent and point.value >= 0 and fresh:
                    lanes.setdefault(port, {"rx": [], "tx": []})[way].append(point.value)
    return {port: optics(found["rx"], found["tx"]) for port, found in lanes.items()}


def speeds(page: Page) -> dict[str, float]:
    """Mbit/s by port: newer exporters print that, older ones that times 2^20."""
    found = {port_of(p.labels): p.value for p in page.points.get(SPEED, ()) if p.value > 0 and port_of(p.labels)}
    return {port: value / BITS_PER_MBIT if value >= 1e7 else value for port, value in found.items()}
