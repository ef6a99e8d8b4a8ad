"""One GPU: what is asked of it every second, every ten and every minute, and what it has been found not to answer."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from collectors.nvidia import abi, decode, fields, gpm
from collectors.nvidia.decode import NAN, within
from collectors.nvidia.fields import FAST, MEDIUM, SLOW
from collectors.nvidia.library import Buffer, Call, Library

ALSO = {
    "gpu_util_ratio": ("memory_util_ratio",),
    "fabric_state": ("fabric_status", "fabric_health"),
    "nvlink_active_count": ("nvlink_inactive_count",),
    "remapped_rows": (
        "remapped_rows_correctable",
        "remapped_rows_uncorrectable",
        "row_remap_pending",
        "row_remap_failure",
    ),
}
"""Columns that come from the same call as another one."""
REPROBE_NS = 3600 * 10**9
"""What was not supported is asked again after this time: a driver in trouble says so too."""


class LostError(Exception):
    """The GPU fell off the bus."""


class ReopenError(Exception):
    """The library has lost its driver; `code` says how."""

    def __init__(self, code: int) -> None:
        super().__init__(f"result code {code}")
        self.code = code


@dataclass
class Identity:
    """What a GPU is; `uuid` is its key, the index moves when another one is gone."""

    name: str
    uuid: str
    pci: str
    model: str = ""
    serial: str = ""
    vbios: str = ""
    virtual: str = ""
    index: int = 0


@dataclass
class Spans:
    """Intervals of the tiers, after how many of them a value is too old to be told, and whether activity is read."""

    every_ns: tuple[int, int, int] = (10**9, 10 * 10**9, 60 * 10**9)
    stale_periods: float = 2.5
    gpm: bool = True


@dataclass
class Layout:
    """Columns of a row by name, with which the parent started this process."""

    at: Mapping[str, int]
    converter: fields.Converter = field(init=False)

    def __post_init__(self) -> None:
        self.converter = fields.Converter(self.at)

    def empty(self) -> array[float]:
        """A row of which nothing is known."""
        return array("f", [NAN] * len(self.at))


class Gpu:
    """Reads one GPU into `row`. Not thread-safe: whoever reads it has it alone until the call returns, however long that takes."""

    def __init__(
        self, library: Library, handle: ctypes.c_void_p, identity: Identity, layout: Layout, spans: Spans
    ) -> None:
        self.identity = identity
        self.handle = handle
        self.row = layout.empty()
        self.read_ns = [0, 0, 0]
        self.reset_required = False
        self.mig = False
        self.took_us = 0
        self._library = library
        self._layout = layout
        self._spans = spans
        self._counters = decode.Counters()
        self._batches = [fields.Batch(library, fields.fields_of(tier)) for tier in (FAST, MEDIUM, SLOW)]
        self._gpm = gpm.Gpm(library) if spans.gpm else None
        self._absent: dict[str, str] = {}
        self._probed_ns = 0
        self._energy = 0.0
        self._links_seen = False
        self._uint, self._uint64 = ctypes.c_uint(), ctypes.c_ulonglong()
        self._uint_ref, self._uint64_ref = ctypes.byref(self._uint), ctypes.byref(self._uint64)
        self._bind(library)

    def _bind(self, library: Library) -> None:
        self._clock = library.call("DeviceGetClockInfo")
        self._reasons = library.newest("DeviceGetCurrentClocksEventReasons", "DeviceGetCurrentClocksThrottleReasons")
        self._temperature = library.call("DeviceGetTemperature")
        self._temperature_v = library.call("DeviceGetTemperatureV")
        self._temperature_buffer = Buffer(abi.TEMPERATURE_V1, 1)
        self._utilization, self._rates = library.call("DeviceGetUtilizationRates"), Buffer(abi.UTILIZATION)
        self._power = library.call("DeviceGetPowerUsage")
        self._margin, self._margin_buffer = library.call("DeviceGetMarginTemperature"), Buffer(abi.MARGIN_V1, 1)
        self._memory_v2, self._memory_v2_buffer = library.call("DeviceGetMemoryInfo_v2"), Buffer(abi.MEMORY_V2, 2)
        self._memory_v1, self._memory_v1_buffer = library.call("DeviceGetMemoryInfo"), Buffer(abi.MEMORY_V1)
        self._sram, self._sram_buffer = library.call("DeviceGetSramEccErrorStatus"), Buffer(abi.SRAM_V1, 1)
        self._remapped = library.call("DeviceGetRemappedRows")

    # --- what the sampler calls ---------------------------------------------------------------------------------------------

    def due(self, tier: int, now_ns: int) -> bool:
        """Whether a tier is to be read now; a tenth of a period early is in time."""
        every_ns = self._spans.every_ns[tier]
        return now_ns - self.read_ns[tier] >= every_ns - every_ns // 10 or not self.read_ns[tier]

    def read(self, now_ns: int) -> None:
        """Read what is due.

        Raises
        ------
        LostError, ReopenError
            The row is left as it was.
        """
        self.took_us = 0
        if now_ns - self._probed_ns >= REPROBE_NS:
            self._probed_ns = now_ns
            self.forget()
        if self.due(SLOW, now_ns):
            self._mig_mode()  # first, because another mode makes other things supported
        for tier, read in ((FAST, self._read_fast), (MEDIUM, self._read_medium), (SLOW, self._read_slow)):
            if tier == FAST or self.due(tier, now_ns):
                read(now_ns)
                self.read_ns[tier] = now_ns

    def spread(self, share: float) -> None:
        """Let the next reading of the slower tiers come earlier by a share of a period, so that the GPUs take turns."""
        for tier in (MEDIUM, SLOW):
            self.read_ns[tier] -= int(share * self._spans.every_ns[tier])

    def forget(self) -> None:
        """Ask again for what was not supported: the driver, the MIG mode or the life of the GPU is another."""
        self._absent.clear()
        for batch in self._batches:
            batch.forget()
        if self._gpm is not None:
            self._gpm.reason = ""

    def close(self) -> None:
        """Give back what was allocated in the driver."""
        if self._gpm is not None:
            self._gpm.free()

    def support(self) -> dict[str, str]:
        """Columns that this GPU does not give, with the reason: not_supported, permission, old_library, mig, vgpu, no_links."""
        why = {**fields.reasons(self._batches), **self._absent}
        why.update({column: why[first] for first, columns in ALSO.items() if first in why for column in columns})
        if self._gpm is not None and self._gpm.reason:
            why.update({column: self._gpm.reason for column in gpm.ACTIVITY})
        self._fallbacks_out(why)
        special = "mig" if self.mig else "vgpu" if self.identity.virtual == "vgpu" else ""
        return {column: special if special and reason == "not_supported" else reason for column, reason in why.items()}

    def _fallbacks_out(self, why: dict[str, str]) -> None:
        for column in list(why):
            at = self._layout.at.get(column)
            if at is None or self.row[at] == self.row[at]:  # something else gave a value
                del why[column]

    # --- tiers -----------------------------------------------------------------------------------------------------------------

    def _read_fast(self, now_ns: int) -> None:
        row, at = self.row, self._layout.at
        row[at["sm_clock_mhz"]] = within(self._number("sm_clock_mhz", self._clock, abi.CLOCK_SM), 0, 20e3)
        row[at["temp_c"]] = self._temperature_c()
        reasons = self._ask("clocks_event_reasons", self._reasons, self._uint64_ref)
        row[at["clocks_event_reasons"]] = within(float(self._uint64.value), 0, 2**24) if reasons else NAN
        busy, memory = (
            self._rates.values()
            if self._ask("gpu_util_ratio", self._utilization, self._rates.reference)
            else (None, None)
        )
        row[at["gpu_util_ratio"]], row[at["memory_util_ratio"]] = (
            decode.ratio_of_percent(busy),
            decode.ratio_of_percent(memory),
        )
        self._fields(FAST, now_ns)
        if abi.FI_POWER_INSTANT in self._batches[FAST].absent:
            # a mean over a second on most chips since Ampere, and there is no telling which: better than none
            row[at["power_w"]] = decode.watts(self._number("power_w", self._power))

    def _read_medium(self, now_ns: int) -> None:
        row, at = self.row, self._layout.at
        # it has two or three levels and stays on one of them under load: a call to each GPU a second less
        row[at["memory_clock_mhz"]] = within(self._number("memory_clock_mhz", self._clock, abi.CLOCK_MEM), 0, 20e3)
        values = self._fields(MEDIUM, now_ns)
        if values.get(abi.FI_ENERGY, self._energy) < self._energy:
            self.forget()  # the count began again: a reset, or another driver
        self._energy = values.get(abi.FI_ENERGY, self._energy)
        total, used, reserved, ratio = self.memory(self.handle)
        row[at["fb_total_bytes"]], row[at["fb_used_bytes"]] = total, used
        row[at["fb_reserved_bytes"]], row[at["fb_used_ratio"]] = reserved, ratio
        row[at["temp_margin_c"]] = self._margin_c()
        for column, name in (
            ("pcie_link_gen", "DeviceGetCurrPcieLinkGeneration"),
            ("pcie_link_width", "DeviceGetCurrPcieLinkWidth"),
        ):
            row[at[column]] = within(self._number(column, self._library.call(name)), 1, 64)
        self._read_gpm()

    def _read_slow(self, now_ns: int) -> None:
        row, at = self.row, self._layout.at
        self._fields(SLOW, now_ns)
        if abi.FI_REMAPPED_FAILURE in self._batches[SLOW].absent:
            self._remapped_by_call()
        for column, name in (
            ("pcie_link_gen_max", "DeviceGetMaxPcieLinkGeneration"),
            ("pcie_link_width_max", "DeviceGetMaxPcieLinkWidth"),
        ):
            row[at[column]] = within(self._number(column, self._library.call(name)), 1, 64)
        row[at["compute_processes_count"]] = self.processes(self.handle)
        self._sram_buffer.prepare()
        exceeded = self._ask("sram_threshold_exceeded", self._sram, self._sram_buffer.reference)
        row[at["sram_threshold_exceeded"]] = within(self._sram_buffer.values()[-1], 0, 1) if exceeded else NAN
        self._fabric()
        self._links()
        self._thresholds()

    # --- parts -----------------------------------------------------------------------------------------------------------------

    def _ask(self, column: str, call: Call, *arguments: object) -> bool:
        """Whether the call answered; one that never will is not made again."""
        if column in self._absent:
            return False
        code = call(self.handle, *arguments)
        if code == abi.SUCCESS:
            return True
        self._note(code)
        if code in abi.LASTING and code != abi.INVALID_ARGUMENT:
            self._absent[column] = abi.LASTING[code]
        return False

    def _note(self, code: int) -> None:
        if code == abi.GPU_IS_LOST:
            raise LostError
        if code in abi.REOPEN:
            raise ReopenError(code)
        self.reset_required = self.reset_required or code == abi.RESET_REQUIRED

    def _number(self, column: str, call: Call, *arguments: int) -> float | None:
        return float(self._uint.value) if self._ask(column, call, *arguments, self._uint_ref) else None

    def _fields(self, tier: int, now_ns: int) -> dict[int, float]:
        batch = self._batches[tier]
        code, values = batch.read(self.handle)
        self._note(code)
        self.took_us += batch.took_us
        self._layout.converter.fill(self.row, tier, values, self._counters, now_ns)
        return values

    def memory(self, handle: object) -> tuple[float, float, float, float]:
        """(total, used, reserved, used ratio) of the GPU or of one of its instances."""
        self._memory_v2_buffer.prepare()
        if "memory_v2" not in self._absent:
            code = self._memory_v2(handle, self._memory_v2_buffer.reference)
            if code == abi.SUCCESS:
                _, total, reserved, _, used = self._memory_v2_buffer.values()
                return decode.memory(total, used, reserved)
            self._note(code)
            self._absent.update({"memory_v2": abi.LASTING[code]} if code in abi.LASTING else {})
        if self._memory_v1(handle, self._memory_v1_buffer.reference) != abi.SUCCESS:
            return NAN, NAN, NAN, NAN
        total, _, used = self._memory_v1_buffer.values()
        return decode.memory(total, used, None)

    def _temperature_c(self) -> float:
        self._temperature_buffer.prepare()
        if self._ask("temperature_v", self._temperature_v, self._temperature_buffer.reference):
            return within(float(self._temperature_buffer.values()[2]), 0, 250)
        return within(self._number("temp_c", self._temperature, abi.TEMPERATURE_GPU), 0, 250)

    def _margin_c(self) -> float:
        self._margin_buffer.prepare()
        if self._ask("temp_margin_c", self._margin, self._margin_buffer.reference):
            return within(float(self._margin_buffer.values()[1]), -150, 250)
        highest, now = self._threshold("gpu_max", abi.THRESHOLD_GPU_MAX), self.row[self._layout.at["temp_c"]]
        return highest - now

    def _threshold(self, name: str, kind: int) -> float:
        """A limit in degrees, as chips before Ada and Hopper give it."""
        call = self._library.call("DeviceGetTemperatureThreshold")
        return within(self._number(f"threshold_{name}", call, kind), 1, 250)

    def _thresholds(self) -> None:
        """Where limits are given in degrees they become margins to the highest operating temperature, as newer chips count."""
        at, absent = self._layout.at, self._batches[SLOW].absent
        if abi.FI_TLIMIT_SLOWDOWN not in absent:
            return
        highest = self._threshold("gpu_max", abi.THRESHOLD_GPU_MAX)
        self.row[at["temp_slowdown_margin_c"]] = highest - self._threshold("slowdown", abi.THRESHOLD_SLOWDOWN)
        self.row[at["temp_shutdown_margin_c"]] = highest - self._threshold("shutdown", abi.THRESHOLD_SHUTDOWN)

    def _remapped_by_call(self) -> None:
        numbers = [ctypes.c_uint() for _ in range(4)]
        columns = ("remapped_rows_correctable", "remapped_rows_uncorrectable", "row_remap_pending", "row_remap_failure")
        if self._ask("remapped_rows", self._remapped, *[ctypes.byref(number) for number in numbers]):
            for column, number in zip(columns, numbers, strict=True):
                self.row[self._layout.at[column]] = float(number.value)

    def processes(self, handle: object) -> float:
        """Number of processes with a compute context; only the number, so that no version of the structure can mislead."""
        call = self._library.newest(*(f"DeviceGetComputeRunningProcesses{suffix}" for suffix in ("_v3", "_v2", "")))
        self._uint.value = 0
        code = call(handle, self._uint_ref, None)
        return within(float(self._uint.value), 0, 4096) if code in (abi.SUCCESS, abi.INSUFFICIENT_SIZE) else NAN

    def _read_gpm(self) -> None:
        if self._gpm is None or not self._gpm.supported(self.handle):
            return
        code, columns = self._gpm.read(self.handle)
        self._note(code)
        for column, value in columns.items():
            at = self._layout.at[column]
            if column in gpm.ACTIVITY or self.row[at] != self.row[at]:
                self.row[at] = value

    def _fabric(self) -> None:
        state, status, health = fabric(self._library, self._ask)
        at = self._layout.at
        self.row[at["fabric_state"]], self.row[at["fabric_status"]], self.row[at["fabric_health"]] = (
            state,
            status,
            health,
        )

    def _links(self) -> None:
        """Links up, and links down that should not be. A board whose links were never up and that has no fabric has no bridge."""
        at = self._layout.at
        states = self._link_states()
        active = sum(states)
        self._links_seen = self._links_seen or active > 0 or self.row[at["fabric_state"]] > abi.FABRIC_UNSUPPORTED
        known = bool(states) and self._links_seen
        if states and not known:
            self._absent["nvlink_inactive_count"] = "no_links"
        self.row[at["nvlink_active_count"]] = float(active) if states else NAN
        self.row[at["nvlink_inactive_count"]] = float(len(states) - active) if known else NAN

    def _mig_mode(self) -> None:
        pending = ctypes.c_uint()
        call = self._library.call("DeviceGetMigMode")
        known = self._ask("mig_enabled", call, self._uint_ref, ctypes.byref(pending))
        mig = known and self._uint.value == 1
        self.row[self._layout.at["mig_enabled"]] = float(mig) if known else NAN
        if mig != self.mig:
            self.mig = mig
            self.forget()

    def _link_states(self) -> list[bool]:
        call = self._library.call("DeviceGetNvLinkState")
        states: list[bool] = []
        # only the answer about the first link is remembered: chips have 0, 4, 6, 12 or 18, and the first too many is refused
        if self._ask("nvlink_active_count", call, 0, self._uint_ref):
            states.append(self._uint.value == 1)
            while len(states) < abi.MAX_LINKS and call(self.handle, len(states), self._uint_ref) == abi.SUCCESS:
                states.append(self._uint.value == 1)
        return states


def fabric(library: Library, ask: Callable[..., bool]) -> tuple[float, float, float]:
    """(state, status, health mask) by the newest structure that this library takes."""
    for version, layout in ((3, abi.FABRIC_V3), (2, abi.FABRIC_V2)):
        if library.has("DeviceGetGpuFabricInfoV"):
            buffer = Buffer(layout, version)
            buffer.prepare()
            if ask(f"fabric_v{version}", library.call("DeviceGetGpuFabricInfoV"), buffer.reference):
                _, _, status, _, state, health, *_ = buffer.values()
                return float(state), float(status), float(health)
    buffer = Buffer(abi.FABRIC_V1)
    if ask("fabric_state", library.call("DeviceGetGpuFabricInfo"), buffer.reference):
        _, status, _, state = buffer.values()
        return float(state), float(status), NAN
    return NAN, NAN, NAN
