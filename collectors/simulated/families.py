"""Column layouts: the real collector's own for host, nic, process and mesh; GPU, port and board as their sources would name them."""

from __future__ import annotations

from functools import cache

from collectors.base import Family, family
from collectors.sources.host import HOST
from collectors.sources.mesh import MESH
from collectors.sources.nic import NIC
from collectors.sources.process import PROCESS

SOURCE = "simulated"

GPU = family(
    "gpu", SOURCE,
    ("gpu_util_ratio", "ratio", "gauge", "share of time with any kernel running, waiting ones of NCCL included"),
    ("sm_active_ratio", "ratio", "gauge", "share of multiprocessors with work"),
    ("tensor_active_ratio", "ratio", "gauge", "share of cycles in which the tensor cores worked"),
    ("dram_active_ratio", "ratio", "gauge", "share of cycles in which the memory moved data"),
    ("sm_clock_mhz", "MHz", "gauge", "clock of the multiprocessors"),
    ("power_w", "W", "gauge", "power drawn by the board"),
    ("temp_c", "C", "gauge", "temperature of the chip"),
    ("memory_temp_c", "C", "gauge", "temperature of the HBM"),
    ("fb_used_ratio", "ratio", "gauge", "frame buffer in use"),
    ("pcie_rx_bytes_per_s", "bytes/s", "counter", "received over PCIe"),
    ("pcie_tx_bytes_per_s", "bytes/s", "counter", "sent over PCIe"),
    ("pcie_link_gen", "generation", "state", "agreed PCIe generation"),
    ("pcie_link_width", "lanes", "state", "agreed PCIe lanes"),
    ("pcie_replay_per_s", "1/s", "counter", "PCIe replays"),
    ("nvlink_rx_bytes_per_s", "bytes/s", "counter", "received over NVLink, all links"),
    ("nvlink_tx_bytes_per_s", "bytes/s", "counter", "sent over NVLink, all links"),
    ("nvlink_crc_errors_per_s", "1/s", "counter", "NVLink flit and data CRC errors"),
    ("nvlink_replays_per_s", "1/s", "counter", "NVLink replays"),
    ("nvlink_recoveries_per_s", "1/s", "counter", "NVLink recoveries"),
    ("ecc_correctable_per_s", "1/s", "counter", "single-bit errors corrected"),
    ("ecc_uncorrectable_count", "errors", "state", "double-bit errors since boot"),
    ("remapped_rows_correctable", "rows", "state", "rows remapped for correctable errors"),
    ("remapped_rows_uncorrectable", "rows", "state", "rows remapped for uncorrectable errors"),
    ("row_remap_pending", "bool", "state", "1 while a remap waits for a reset"),
    ("row_remap_failure", "bool", "state", "1 when a remap failed: no spare rows"),
    ("clocks_event_reasons", "bits", "state", "0x4 power cap, 0x20 thermal (software), 0x40 thermal (hardware), 0x80 power brake"),
    ("thermal_violation_ratio", "ratio", "counter", "seconds per second held back by heat"),
    ("power_violation_ratio", "ratio", "counter", "seconds per second held back by power"),
    ("xid_last", "code", "state", "newest Xid since boot, 0 when none"),
)  # fmt: skip

PORT = family(
    "port", SOURCE,
    ("fec_corrected_per_s", "1/s", "counter", "symbols that forward error correction repaired"),
    ("rx_power_dbm", "dBm", "gauge", "light received"),
    ("module_temp_c", "C", "gauge", "temperature of the optical module"),
    ("pause_rx_per_s", "1/s", "counter", "PFC pause frames received on the training priority"),
    ("pause_tx_per_s", "1/s", "counter", "PFC pause frames sent on the training priority"),
)  # fmt: skip

BOARD = family(
    "board", SOURCE,
    ("inlet_temp_c", "C", "gauge", "air (or water) entering the machine"),
    ("server_power_w", "W", "gauge", "power drawn by the whole machine"),
    ("fan_ratio", "ratio", "gauge", "fan speed of its maximum"),
    ("power_supplies_ok", "units", "state", "power supplies that deliver"),
    ("cpu_clock_mhz", "MHz", "gauge", "mean clock of the busy processors"),
    ("dimm_correctable_per_s", "1/s", "counter", "memory errors corrected"),
    ("dimm_uncorrectable_count", "errors", "state", "uncorrectable memory errors since boot"),
    ("nvme_media_errors_per_s", "1/s", "counter", "media errors of the local disk"),
    ("nvme_spare_ratio", "ratio", "gauge", "spare blocks left of the local disk"),
    ("disk_used_ratio", "ratio", "gauge", "local file system in use"),
    ("kubelet_ready", "bool", "state", "1 while the node agent of the orchestrator answers"),
)  # fmt: skip

FAMILIES: dict[str, Family] = {f.name: f for f in (HOST, GPU, NIC, PORT, PROCESS, MESH, BOARD)}


@cache
def columns(name: str) -> dict[str, int]:
    """Column numbers of a family by metric name."""
    return {metric.name: i for i, metric in enumerate(FAMILIES[name].metrics)}
