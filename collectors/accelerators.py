"""The catalogue of accelerator metrics: one layout for every make, so that a detector finds a column whoever built the chip.

A source that reads accelerators (NVIDIA, AMD, Ascend, a dcgm-exporter page...) returns rows of `GPU`, and of `GPU_INSTANCE` where a chip
is split. It leaves out what its hardware does not say: absent is NaN, never 0. Units are SI here, whatever the vendor counts in.

A chip is called ``gpu<i>``, with the number the vendor's own tool gives it; a part of a chip ``gpu<i>/<part>`` (NVIDIA MIG:
``gpu0/gi1.ci0``, by GPU instance and compute instance). A chip that fell off the bus has no row; one that does not answer has a row of NaN.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from collectors.base import NAN, Family, Row
from trainwarden.records import Metric

SOURCE = "accelerator"
MIB = 1024 * 1024
HEALTH = {"well": 0.0, "degraded": 1.0, "failed": 2.0}


@dataclass(frozen=True)
class Signal:
    """One column, and where it is on a dcgm-exporter page.

    Parameters
    ----------
    kind
        ``gauge``; ``counter`` (a rate of a counter, by its name per second or a share of time); ``state`` (an enum, a total, a limit).
    dcgm
        Name of the field; empty when DCGM has none. The names before the renaming of 2026: dashboards use them.
    dcgm_factor
        Our value = DCGM's × this: a page in MiB, per cent, mJ or ns becomes SI. For ``counter`` kinds of ``DCGM_FI_DEV_`` the page
        has the running count: the rate has to be taken first (``DCGM_FI_PROF_`` ones are rates already).
    """

    name: str
    unit: str
    kind: str
    meaning: str
    dcgm: str = ""
    dcgm_factor: float = 1.0


_DEV, _PROF = "DCGM_FI_DEV_", "DCGM_FI_PROF_"

SIGNALS: tuple[Signal, ...] = (
    Signal("gpu_util_ratio", "ratio", "gauge", "share of time with any kernel running, waiting ones of NCCL included",
           _DEV + "GPU_UTIL", 0.01),
    Signal("sm_active_ratio", "ratio", "gauge", "share of multiprocessors with work", _PROF + "SM_ACTIVE"),
    Signal("tensor_active_ratio", "ratio", "gauge", "share of cycles in which the tensor cores worked", _PROF + "PIPE_TENSOR_ACTIVE"),
    Signal("dram_active_ratio", "ratio", "gauge", "share of cycles in which the memory moved data", _PROF + "DRAM_ACTIVE"),
    Signal("sm_clock_mhz", "MHz", "gauge", "clock of the multiprocessors", _DEV + "SM_CLOCK"),
    Signal("power_w", "W", "gauge", "power drawn by the board, now where the chip says it, else over the last second",
           _DEV + "POWER_USAGE"),
    Signal("temp_c", "C", "gauge", "temperature of the chip", _DEV + "GPU_TEMP"),
    Signal("memory_temp_c", "C", "gauge", "temperature of the HBM", _DEV + "MEMORY_TEMP"),
    Signal("fb_used_ratio", "ratio", "gauge", "frame buffer in use, what the driver keeps for itself left out",
           _DEV + "FB_USED_PERCENT"),
    Signal("pcie_rx_bytes_per_s", "bytes/s", "counter", "received over PCIe", _PROF + "PCIE_RX_BYTES"),
    Signal("pcie_tx_bytes_per_s", "bytes/s", "counter", "sent over PCIe", _PROF + "PCIE_TX_BYTES"),
    Signal("pcie_link_gen", "generation", "state", "agreed PCIe generation; falls by design while idle", _DEV + "PCIE_LINK_GEN"),
    Signal("pcie_link_width", "lanes", "state", "agreed PCIe lanes", _DEV + "PCIE_LINK_WIDTH"),
    Signal("pcie_replay_per_s", "1/s", "counter", "PCIe replays", _DEV + "PCIE_REPLAY_COUNTER"),
    Signal("nvlink_rx_bytes_per_s", "bytes/s", "counter", "received over NVLink, all links", _PROF + "NVLINK_RX_BYTES"),
    Signal("nvlink_tx_bytes_per_s", "bytes/s", "counter", "sent over NVLink, all links", _PROF + "NVLINK_TX_BYTES"),
    Signal("nvlink_crc_errors_per_s", "1/s", "counter", "NVLink flit and data CRC errors", _DEV + "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),
    Signal("nvlink_replays_per_s", "1/s", "counter", "NVLink replays", _DEV + "NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
    Signal("nvlink_recoveries_per_s", "1/s", "counter", "NVLink recoveries", _DEV + "NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
    Signal("ecc_correctable_per_s", "1/s", "counter", "single-bit errors corrected", _DEV + "ECC_SBE_VOL_TOTAL"),
    Signal("ecc_uncorrectable_count", "errors", "state", "double-bit errors since the driver was loaded", _DEV + "ECC_DBE_VOL_TOTAL"),
    Signal("remapped_rows_correctable", "rows", "state", "rows remapped for correctable errors", _DEV + "CORRECTABLE_REMAPPED_ROWS"),
    Signal("remapped_rows_uncorrectable", "rows", "state", "rows remapped for uncorrectable errors", _DEV + "UNCORRECTABLE_REMAPPED_ROWS"),
    Signal("row_remap_pending", "bool", "state", "1 while a remap waits for a reset", _DEV + "ROW_REMAP_PENDING"),
    Signal("row_remap_failure", "bool", "state", "1 when a remap failed: no spare rows", _DEV + "ROW_REMAP_FAILURE"),
    Signal("clocks_event_reasons", "bits", "state",
           "0x4 power cap, 0x20 thermal (software), 0x40 thermal (hardware), 0x80 power brake", _DEV + "CLOCKS_EVENT_REASONS"),
    Signal("thermal_violation_ratio", "ratio", "counter", "seconds per second held back by heat", _DEV + "THERMAL_VIOLATION", 1e-9),
    Signal("power_violation_ratio", "ratio", "counter", "seconds per second held back by power", _DEV + "POWER_VIOLATION", 1e-9),
    Signal("xid_last", "code", "state", "newest Xid since boot, 0 when none; times and repeats are log events", _DEV + "XID_ERRORS"),
    # --- the columns above are those of the simulator, in its order ---
    Signal("memory_clock_mhz", "MHz", "gauge", "clock of the memory", _DEV + "MEM_CLOCK"),
    Signal("memory_util_ratio", "ratio", "gauge", "share of time in which memory was read or written", _DEV + "MEM_COPY_UTIL", 0.01),
    Signal("power_average_w", "W", "gauge", "power drawn by the board, mean of the last second"),
    Signal("energy_j_per_s", "J/s", "counter", "energy drawn: the true mean power between two readings",
           _DEV + "TOTAL_ENERGY_CONSUMPTION", 1e-3),
    Signal("power_limit_w", "W", "state", "power the board is held to", _DEV + "POWER_MGMT_LIMIT"),
    Signal("temp_margin_c", "C", "gauge", "degrees left to the highest operating temperature, negative above it", _DEV + "GPU_TEMP_LIMIT"),
    Signal("temp_slowdown_margin_c", "C", "state", "the margin at which the clock is halved (H100 -2)"),
    Signal("temp_shutdown_margin_c", "C", "state", "the margin at which the chip switches off (H100 -8)"),
    Signal("fb_total_bytes", "bytes", "state", "frame buffer", _DEV + "FB_TOTAL", MIB),
    Signal("fb_used_bytes", "bytes", "gauge", "frame buffer in use", _DEV + "FB_USED", MIB),
    Signal("fb_reserved_bytes", "bytes", "gauge", "frame buffer that driver and firmware keep for themselves", _DEV + "FB_RESERVED", MIB),
    Signal("ecc_correctable_aggregate_count", "errors", "state", "single-bit errors in the life of the board",
           _DEV + "ECC_SBE_AGG_TOTAL"),
    Signal("ecc_uncorrectable_aggregate_count", "errors", "state", "double-bit errors in the life of the board",
           _DEV + "ECC_DBE_AGG_TOTAL"),
    Signal("sram_threshold_exceeded", "bool", "state", "1 when on-chip memory had more errors than the maker allows",
           _DEV + "THRESHOLD_SRM"),
    Signal("retired_pages_count", "pages", "state", "pages taken out of use (chips before row remapping)"),
    Signal("pcie_link_gen_max", "generation", "state", "highest PCIe generation of chip and slot", _DEV + "PCIE_MAX_LINK_GEN"),
    Signal("pcie_link_width_max", "lanes", "state", "most PCIe lanes of chip and slot", _DEV + "PCIE_MAX_LINK_WIDTH"),
    Signal("pcie_correctable_per_s", "1/s", "counter", "PCIe errors corrected"),
    Signal("pcie_uncorrectable_count", "errors", "state", "PCIe errors not corrected, fatal or not"),
    Signal("nvlink_active_count", "links", "state", "links to other chips that are up"),
    Signal("nvlink_inactive_count", "links", "state", "links to other chips that should be up and are not"),
    Signal("fabric_state", "enum", "state", "NVLink fabric: 0 not supported, 1 not started, 2 under way, 3 completed",
           _DEV + "FABRIC_MANAGER_STATUS"),
    Signal("fabric_status", "code", "state", "how the fabric's registration ended, 0 well"),
    Signal("fabric_health", "bits", "state",
           "two bits each, 1 bad, 2 good: 0 bandwidth, 2 route recovery, 4 route, 6 access timeout, 8 configuration (4 bits)",
           _DEV + "FABRIC_HEALTH_MASK"),
    Signal("recovery_action", "enum", "state",
           "what the driver asks for: 0 nothing, 1 GPU reset, 2 restart of the machine, 3 drain, 4 drain and reset, more: fatal",
           "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION"),
    Signal("sw_thermal_ratio", "ratio", "counter", "seconds per second slowed by software for heat",
           _DEV + "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS", 1e-9),
    Signal("hw_thermal_ratio", "ratio", "counter", "seconds per second slowed by hardware for heat",
           _DEV + "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS", 1e-9),
    Signal("hw_power_brake_ratio", "ratio", "counter", "seconds per second slowed by the power supply",
           _DEV + "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS", 1e-9),
    Signal("sync_boost_ratio", "ratio", "counter", "seconds per second slowed to keep step with other chips",
           _DEV + "SYNC_BOOST_VIOLATION", 1e-9),
    Signal("compute_processes_count", "processes", "gauge", "processes that hold a context"),
    Signal("xid_count", "events", "state", "Xids since the agent started"),
    Signal("mig_enabled", "bool", "state", "1 while the chip is split", _DEV + "MIG_MODE"),
    Signal("health_state", "enum", "state", "the vendor's own word: 0 well, 1 degraded, 2 failed"),
)  # fmt: skip

INSTANCE_SIGNALS = (
    "gpu_util_ratio", "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio", "fb_used_ratio", "fb_used_bytes", "fb_total_bytes",
    "fb_reserved_bytes", "compute_processes_count",
)  # fmt: skip
BY_NAME: Mapping[str, Signal] = {signal.name: signal for signal in SIGNALS}
BY_DCGM: Mapping[str, Signal] = {signal.dcgm: signal for signal in SIGNALS if signal.dcgm}


def _metric(signal: Signal) -> Metric:
    return Metric(signal.name, signal.unit, signal.kind, signal.meaning)


GPU = Family("gpu", SOURCE, tuple(_metric(signal) for signal in SIGNALS))
GPU_INSTANCE = Family("gpu_instance", SOURCE, tuple(_metric(BY_NAME[name]) for name in INSTANCE_SIGNALS))

NAMES: tuple[str, ...] = tuple(signal.name for signal in SIGNALS)
STATES = frozenset(signal.name for signal in SIGNALS if signal.kind == "state")
_PACKED = struct.Struct(f"<{len(NAMES)}f")
ROW_BYTES = _PACKED.size


def packed(row: Row) -> bytes:
    """A row of `GPU` as it goes into a block: little-endian float32 in column order, absent values NaN."""
    return _PACKED.pack(*[row.get(name, NAN) for name in NAMES])


def column(name: str) -> int:
    """Number of a column of `GPU`; raises `ValueError` for a name that is none."""
    return NAMES.index(name)
