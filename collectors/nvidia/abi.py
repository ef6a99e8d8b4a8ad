"""NVML's numbers: result codes, field ids, structures. As in nvidia-ml-py 13.615; tests compare them where it is installed."""

from __future__ import annotations

import struct

# --- result codes -----------------------------------------------------------------------------------------------------------
SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
VGPU_ECC_NOT_SUPPORTED = 22
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
UNKNOWN = 999

LASTING = {
    NOT_SUPPORTED: "not_supported",
    NO_PERMISSION: "permission",
    FUNCTION_NOT_FOUND: "old_library",
    ARGUMENT_VERSION_MISMATCH: "old_library",
    INVALID_ARGUMENT: "not_supported",
    VGPU_ECC_NOT_SUPPORTED: "vgpu",
    DEPRECATED: "not_supported",
}
"""Answers that stay the same until the driver, the MIG mode or the GPU's life changes: not asked again before."""
REOPEN = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH})
"""Answers after which the library has to be opened again."""

# --- field ids ----------------------------------------------------------------------------------------------------------------
FI_ECC_SBE_VOL, FI_ECC_DBE_VOL, FI_ECC_SBE_AGG, FI_ECC_DBE_AGG = 3, 4, 5, 6
FI_RETIRED_SBE, FI_RETIRED_DBE = 29, 30
FI_NVLINK_CRC_FLIT, FI_NVLINK_CRC_DATA, FI_NVLINK_REPLAY, FI_NVLINK_RECOVERY = 38, 45, 52, 59
FI_POLICY_POWER, FI_POLICY_THERMAL, FI_POLICY_SYNC_BOOST = 74, 75, 76
FI_MEMORY_TEMP, FI_ENERGY = 82, 83
FI_NVLINK_LINK_COUNT, FI_PCIE_REPLAY = 91, 94
FI_NVLINK_DATA_TX, FI_NVLINK_DATA_RX = 138, 139
FI_REMAPPED_COR, FI_REMAPPED_UNC, FI_REMAPPED_PENDING, FI_REMAPPED_FAILURE = 142, 143, 144, 145
FI_NVLINK_DL_REPLAY, FI_NVLINK_DL_RECOVERY, FI_NVLINK_DL_CRC = 161, 162, 163
FI_PCIE_CORRECTABLE, FI_PCIE_NON_FATAL, FI_PCIE_FATAL = 173, 179, 180
FI_POWER_AVERAGE, FI_POWER_INSTANT, FI_POWER_LIMIT = 185, 186, 190
FI_TLIMIT_SHUTDOWN, FI_TLIMIT_SLOWDOWN = 193, 194
FI_PCIE_TX, FI_PCIE_RX = 197, 198
FI_NVLINK_XMIT_BYTES, FI_NVLINK_RCV_BYTES, FI_NVLINK_RECOVERY_EVENTS = 202, 204, 215
FI_RECOVERY_ACTION = 230
FI_REASON_SW_THERMAL, FI_REASON_HW_THERMAL, FI_REASON_HW_POWER_BRAKE = 269, 270, 271

ALL_LINKS = 0xFFFFFFFF
SCOPES = dict.fromkeys(
    (FI_NVLINK_DATA_TX, FI_NVLINK_DATA_RX, FI_NVLINK_DL_REPLAY, FI_NVLINK_DL_RECOVERY, FI_NVLINK_DL_CRC,
     FI_NVLINK_XMIT_BYTES, FI_NVLINK_RCV_BYTES, FI_NVLINK_RECOVERY_EVENTS), ALL_LINKS)  # fmt: skip
"""Fields that are asked for all links together; all others have scope 0 (power: the GPU, not the module)."""

TYPE_DOUBLE, TYPE_U32, TYPE_ULONG, TYPE_U64, TYPE_I64, TYPE_I32, TYPE_U16 = range(7)

# --- arguments ----------------------------------------------------------------------------------------------------------------
CLOCK_SM, CLOCK_MEM = 1, 2
TEMPERATURE_GPU = 0
THRESHOLD_SHUTDOWN, THRESHOLD_SLOWDOWN, THRESHOLD_GPU_MAX = 0, 1, 3
ECC_CORRECTED, ECC_UNCORRECTED, ECC_VOLATILE, ECC_AGGREGATE = 0, 1, 0, 1
MAX_LINKS = 18
FABRIC_UNSUPPORTED = 0
VIRTUALIZATION = {0: "", 1: "passthrough", 2: "vgpu", 3: "vgpu_host", 4: "vsga_host"}

EVENT_XID = 0x8
EVENTS = {
    0x200: "gpu_ecc_storm",
    0x400: "gpu_dram_retirement",
    0x800: "gpu_dram_retirement_failed",
    0x1000: "gpu_poison",
    0x2000: "gpu_poison_fatal",
    0x4000: "gpu_unavailable",
    0x8000: "gpu_recovery_action",
}
EVENT_MASK = EVENT_XID | 0x200 | 0x400 | 0x800 | 0x1000 | 0x2000 | 0x4000 | 0x8000

GPM_SM_UTIL, GPM_ANY_TENSOR, GPM_DRAM_BW = 2, 5, 10
GPM_PCIE_TX, GPM_PCIE_RX, GPM_NVLINK_RX, GPM_NVLINK_TX = 20, 21, 60, 61
GPM_METRICS = (GPM_SM_UTIL, GPM_ANY_TENSOR, GPM_DRAM_BW, GPM_PCIE_TX, GPM_PCIE_RX, GPM_NVLINK_RX, GPM_NVLINK_TX)

# --- structures: native alignment -----------------------------------------------------------------------------------------------
FIELD_VALUE = struct.Struct("@IIqqIIQ")
"""fieldId, scopeId, timestamp, latencyUsec, valueType, nvmlReturn, value."""
MEMORY_V1 = struct.Struct("@QQQ")
"""total, free, used (the reserve counted in)."""
MEMORY_V2 = struct.Struct("@IQQQQ")
"""version, total, reserved, free, used."""
UTILIZATION = struct.Struct("@II")
PCI_INFO = struct.Struct("@16sIIIII32s")
"""legacy id, domain, bus, device, device id, subsystem id, id."""
MARGIN_V1 = struct.Struct("@Ii")
TEMPERATURE_V1 = struct.Struct("@IIi")
FABRIC_V1 = struct.Struct("@16sIIB3x")
"""cluster, status, clique, state: without a version word, and with a state of one byte."""
FABRIC_V2 = struct.Struct("@I16sIIBxxxI")
"""version, cluster, status, clique, state, health."""
FABRIC_V3 = struct.Struct("@I16sIIBxxxIBxxx")
SRAM_V1 = struct.Struct("@I4xQQQQQQQQQQQI4x")
REMAPPED = struct.Struct("@IIII")
EVENT_DATA = struct.Struct("@PQQII")
"""device, type, data, GPU instance, compute instance."""
GPM_HEAD = struct.Struct("@IIPP")
GPM_METRIC = struct.Struct("@IIdPPP")
GPM_SUPPORT = struct.Struct("@II")
PROCESS_V2 = struct.Struct("@I4xQII")


def versioned(layout: struct.Struct, number: int) -> int:
    """NVML's version word: the structure's size and its version. A wrong one is refused by the driver or, worse, is not."""
    return layout.size | (number << 24)
