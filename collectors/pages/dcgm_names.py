"""What stands on a dcgm-exporter page: fields by their old and new names, units, and the numbers that mean "no value"."""

from __future__ import annotations

from collectors.accelerators import BY_DCGM, MIB, Signal
from collectors.pages.rows import GAUGE, RATE, SHARE, Rule
from collectors.pages.text import Page

DEV, PROF = "DCGM_FI_DEV_", "DCGM_FI_PROF_"
XID = (DEV + "XID_ERRORS", DEV + "XID_ERROR")
XID_WINDOW = "DCGM_EXP_XID_ERRORS_COUNT"
HEALTH = "DCGM_EXP_GPU_HEALTH_STATUS"
HEALTH_LEVELS = ((20, 2.0), (10, 1.0), (0, 0.0))
FREE = DEV + "FB_FREE"

# The renaming of 2026 (DCGM 4.6): old name without its prefix → new ones, oldest first. The numbers behind them are the same fields.
RENAMED = {
    "GPU_UTIL": ("GPU_UTIL_RATIO",),
    "SM_ACTIVE": ("SM_UTIL_RATIO",),
    "PIPE_TENSOR_ACTIVE": ("TENSOR_UTIL_RATIO",),
    "DRAM_ACTIVE": ("DRAM_UTIL_RATIO",),
    "POWER_USAGE": ("BOARD_POWER_WATTS",),
    "GPU_TEMP": ("GPU_TEMP_CELSIUS",),
    "MEMORY_TEMP": ("MEMORY_TEMP_CELSIUS",),
    "GPU_TEMP_LIMIT": ("GPU_TEMP_MARGIN_CELSIUS",),
    "FB_USED_PERCENT": ("FB_USED_RATIO",),
    "PCIE_REPLAY_COUNTER": ("PCIE_REPLAY_TOTAL",),
    "NVLINK_REPLAY_ERROR_COUNT_TOTAL": ("NVLINK_REPLAY_ERROR_TOTAL",),
    "NVLINK_RECOVERY_ERROR_COUNT_TOTAL": ("NVLINK_RECOVERY_ERROR_TOTAL",),
    "CORRECTABLE_REMAPPED_ROWS": ("ROW_REMAP_CORRECTABLE_TOTAL",),
    "UNCORRECTABLE_REMAPPED_ROWS": ("ROW_REMAP_UNCORRECTABLE_TOTAL",),
    "ROW_REMAP_FAILURE": ("ROW_REMAP_FAILED",),
    "CLOCKS_EVENT_REASONS": ("CLOCK_THROTTLE_REASONS",),
    "POWER_MGMT_LIMIT": ("BOARD_POWER_LIMIT_REQUESTED_WATTS",),
    "THRESHOLD_SRM": ("SRAM_EXCEEDED",),
    "GET_GPU_RECOVERY_ACTION": ("GPU_RECOVERY_ACTION",),
}
TIMES = ("POWER_VIOLATION", "THERMAL_VIOLATION", "SYNC_BOOST_VIOLATION")
# Columns made up of several fields or series, and those with a field in another unit besides.
OWN = (
    *(Rule(DEV + name, "nvlink_crc_errors_per_s", how=RATE, adds=True)
      for name in ("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVLINK_CRC_FLIT_ERROR_TOTAL",
                   "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "NVLINK_CRC_DATA_ERROR_TOTAL")),
    *(Rule(DEV + name, "retired_pages_count", adds=True)
      for name in ("RETIRED_SBE", "PAGE_RETIRED_SBE_TOTAL", "RETIRED_DBE", "PAGE_RETIRED_DBE_TOTAL")),
    *(Rule(DEV + name, "pcie_correctable_per_s", how=RATE)
      for name in ("PCIE_COUNT_CORRECTABLE_ERRORS", "PCIE_CORRECTABLE_ERROR_TOTAL")),
    Rule(DEV + "SM_CLOCK_HERTZ", "sm_clock_mhz", 1e-6),
    Rule(DEV + "MEMORY_CLOCK_HERTZ", "memory_clock_mhz", 1e-6),
    Rule(DEV + "GPU_ENERGY_JOULES_TOTAL", "energy_j_per_s", how=RATE),
    *(Rule(PROF + f"PCIE_{way}_BYTES_TOTAL", f"pcie_{way.lower()}_bytes_per_s", how=RATE) for way in ("RX", "TX")),
    *(Rule(DEV + name, f"nvlink_{way.lower()}_bytes_per_s", how=RATE)
      for way in ("RX", "TX") for name in (f"NVLINK_COUNT_{way}_BYTES", f"NVLINK_{way}_BYTES_TOTAL")),
    Rule(FREE, "fb_free_bytes", MIB),
)  # fmt: skip
OWN_COLUMNS = frozenset({"nvlink_crc_errors_per_s", "retired_pages_count", "xid_last"})


def rules() -> tuple[Rule, ...]:
    """All of them, the field of the catalogue first, then its other names."""
    named = [rule for name, signal in BY_DCGM.items() if signal.name not in OWN_COLUMNS for rule in _of(name, signal)]
    return (*named, *OWN)


def _of(name: str, signal: Signal) -> list[Rule]:
    prefix = PROF if name.startswith(PROF) else DEV
    short = name.removeprefix(prefix)
    names = (name, *(prefix + new for new in RENAMED.get(short, ())))
    return [Rule(each, signal.name, signal.dcgm_factor, _how(name, signal)) for each in names]


def _how(name: str, signal: Signal) -> str:
    if signal.kind != "counter" or name.startswith(PROF):
        return GAUGE
    return SHARE if signal.unit == "ratio" else RATE


def scales(page: Page) -> dict[str, float]:
    """Seconds per count of the violation times where the page says microseconds, as older exporters do; newer ones count nanoseconds."""
    return {DEV + name: 1e-6 for name in TIMES if "(in us)" in page.help(DEV + name).lower()}


def blank(value: float) -> bool:
    """Whether a number stands for "no value": DCGM has sixteen of them at the top of each type, and exporters print them as they are.

    Examples
    --------
    >>> blank(9223372036854775794.0), blank(2147483632.0), blank(140737488355328.0), blank(2147483700.0)
    (True, True, True, False)
    """
    return value >= 9.223372036854775e18 or 0x7FFFFFF0 <= value <= 0x7FFFFFFF or 1 << 47 <= value < (1 << 47) + 16
