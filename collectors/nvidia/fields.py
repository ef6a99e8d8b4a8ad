"""Field values: which of them are read how often, and which column each becomes. One call per GPU and tier."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass

from collectors.nvidia import abi, decode
from collectors.nvidia.library import Library

FAST, MEDIUM, SLOW = 0, 1, 2
KIB = 1024


@dataclass(frozen=True)
class Reading:
    """A column made of one field, or of the sum of some. Of several readings of a column the first that answers counts.

    Parameters
    ----------
    rate
        The fields are running counts and the column is their growth per second (times `scale`), at most `high`.
    """

    column: str
    tier: int
    fields: tuple[int, ...]
    scale: float = 1.0
    rate: bool = False
    low: float = 0.0
    high: float = 1e18


def _rate(column: str, *fields: int, scale: float = 1.0) -> Reading:
    return Reading(column, MEDIUM, fields, scale, rate=True)


def _share(column: str, *fields: int) -> Reading:
    """Nanoseconds per second: a share of time, which may look a little over one between two readings."""
    return Reading(column, MEDIUM, fields, 1e-9, rate=True)


READINGS: tuple[Reading, ...] = (
    Reading("power_w", FAST, (abi.FI_POWER_INSTANT,), 1e-3, high=20e3),
    Reading("power_average_w", FAST, (abi.FI_POWER_AVERAGE,), 1e-3, high=20e3),
    Reading("memory_temp_c", MEDIUM, (abi.FI_MEMORY_TEMP,), low=1, high=250),
    _rate("energy_j_per_s", abi.FI_ENERGY, scale=1e-3),
    _share("power_violation_ratio", abi.FI_POLICY_POWER),
    _share("thermal_violation_ratio", abi.FI_POLICY_THERMAL),
    _share("thermal_violation_ratio", abi.FI_REASON_SW_THERMAL, abi.FI_REASON_HW_THERMAL),
    _share("sync_boost_ratio", abi.FI_POLICY_SYNC_BOOST),
    _share("sw_thermal_ratio", abi.FI_REASON_SW_THERMAL),
    _share("hw_thermal_ratio", abi.FI_REASON_HW_THERMAL),
    _share("hw_power_brake_ratio", abi.FI_REASON_HW_POWER_BRAKE),
    # volatile counts start again with the driver: as a rate here, as a state whose rise is the news there
    _rate("ecc_correctable_per_s", abi.FI_ECC_SBE_VOL),
    Reading("ecc_uncorrectable_count", MEDIUM, (abi.FI_ECC_DBE_VOL,)),
    Reading("ecc_correctable_aggregate_count", MEDIUM, (abi.FI_ECC_SBE_AGG,)),
    Reading("ecc_uncorrectable_aggregate_count", MEDIUM, (abi.FI_ECC_DBE_AGG,)),
    _rate("pcie_replay_per_s", abi.FI_PCIE_REPLAY),
    _rate("pcie_correctable_per_s", abi.FI_PCIE_CORRECTABLE),
    Reading("pcie_uncorrectable_count", MEDIUM, (abi.FI_PCIE_NON_FATAL, abi.FI_PCIE_FATAL)),
    # counters, and not GetPcieThroughput, which holds the caller for 20 ms to count
    _rate("pcie_tx_bytes_per_s", abi.FI_PCIE_TX),
    _rate("pcie_rx_bytes_per_s", abi.FI_PCIE_RX),
    _rate("nvlink_crc_errors_per_s", abi.FI_NVLINK_CRC_FLIT, abi.FI_NVLINK_CRC_DATA),
    _rate("nvlink_crc_errors_per_s", abi.FI_NVLINK_DL_CRC),
    _rate("nvlink_replays_per_s", abi.FI_NVLINK_REPLAY),
    _rate("nvlink_replays_per_s", abi.FI_NVLINK_DL_REPLAY),
    _rate("nvlink_recoveries_per_s", abi.FI_NVLINK_RECOVERY),
    _rate("nvlink_recoveries_per_s", abi.FI_NVLINK_DL_RECOVERY),
    _rate("nvlink_recoveries_per_s", abi.FI_NVLINK_RECOVERY_EVENTS),
    # the unit differs by generation: KiB up to Hopper, bytes from Blackwell on
    _rate("nvlink_tx_bytes_per_s", abi.FI_NVLINK_DATA_TX, scale=KIB),
    _rate("nvlink_tx_bytes_per_s", abi.FI_NVLINK_XMIT_BYTES),
    _rate("nvlink_rx_bytes_per_s", abi.FI_NVLINK_DATA_RX, scale=KIB),
    _rate("nvlink_rx_bytes_per_s", abi.FI_NVLINK_RCV_BYTES),
    Reading("recovery_action", MEDIUM, (abi.FI_RECOVERY_ACTION,)),
    Reading("power_limit_w", SLOW, (abi.FI_POWER_LIMIT,), 1e-3, high=20e3),
    Reading("remapped_rows_correctable", SLOW, (abi.FI_REMAPPED_COR,)),
    Reading("remapped_rows_uncorrectable", SLOW, (abi.FI_REMAPPED_UNC,)),
    Reading("row_remap_pending", SLOW, (abi.FI_REMAPPED_PENDING,), high=1),
    Reading("row_remap_failure", SLOW, (abi.FI_REMAPPED_FAILURE,), high=1),
    Reading("retired_pages_count", SLOW, (abi.FI_RETIRED_SBE, abi.FI_RETIRED_DBE)),
)
MARGINS = {"temp_shutdown_margin_c": abi.FI_TLIMIT_SHUTDOWN, "temp_slowdown_margin_c": abi.FI_TLIMIT_SLOWDOWN}
"""Limits that newer chips give as margins (T.Limit); never to be mixed with the thresholds in degrees of older ones."""


def fields_of(tier: int) -> tuple[int, ...]:
    """Ids to ask for in a tier, each once."""
    ids = [field for reading in READINGS if reading.tier == tier for field in reading.fields]
    return tuple(dict.fromkeys([*ids, *(MARGINS.values() if tier == SLOW else ())]))


class Batch:
    """The fields of one tier of one GPU. A field that is not supported is not asked again until `forget`."""

    def __init__(self, library: Library, ids: Iterable[int]) -> None:
        self._call = library.call("DeviceGetFieldValues")
        self._all = tuple(ids)
        self.absent: dict[int, str] = {}
        self.took_us = 0
        self._build()

    def forget(self) -> None:
        """Ask for all again."""
        self.absent.clear()
        self._build()

    def _build(self) -> None:
        ids = [field for field in self._all if field not in self.absent]
        # a result code that no driver leaves there: a field that a library does not fill in is no success
        rows = (abi.FIELD_VALUE.pack(field, abi.SCOPES.get(field, 0), 0, 0, 0, abi.UNKNOWN, 0) for field in ids)
        self._template = b"".join(rows)
        self._count = len(ids)
        self._buffer = ctypes.create_string_buffer(max(1, len(self._template)))

    def read(self, handle: object) -> tuple[int, dict[int, float]]:
        """(result code of the call or the worst one of a field, values by id)."""
        self.took_us = 0
        if not self._count:
            return abi.SUCCESS, {}
        ctypes.memmove(self._buffer, self._template, len(self._template))
        code = self._call(handle, self._count, self._buffer)
        if code != abi.SUCCESS:
            self._refuse_all(code)
            return code, {}
        return self._taken()

    def _taken(self) -> tuple[int, dict[int, float]]:
        values: dict[int, float] = {}
        worst, before = abi.SUCCESS, len(self.absent)
        for field, code, value, took_us in decode.field_results(self._buffer.raw):
            self.took_us += took_us
            if value is not None:
                values[field] = value
            elif code in abi.LASTING:
                self.absent[field] = abi.LASTING[code]
            elif code in (abi.GPU_IS_LOST, *abi.REOPEN):
                worst = code
        if len(self.absent) != before:
            self._build()
        return worst, values

    def _refuse_all(self, code: int) -> None:
        if code in (abi.FUNCTION_NOT_FOUND, abi.NOT_SUPPORTED):
            self.absent = dict.fromkeys(self._all, abi.LASTING[code])
            self._build()


class Converter:
    """Field values into the columns of a row."""

    def __init__(self, columns: Mapping[str, int]) -> None:
        tiers = (FAST, MEDIUM, SLOW)
        self._readings = {
            t: [(columns[r.column], r, index) for index, r in enumerate(READINGS) if r.tier == t] for t in tiers
        }
        self._margins = {columns[name]: field for name, field in MARGINS.items()}

    def fill(
        self,
        row: MutableSequence[float],
        tier: int,
        values: Mapping[int, float],
        counters: decode.Counters,
        now_ns: int,
    ) -> None:
        """Write the columns of a tier; a column whose fields gave nothing becomes NaN."""
        done: set[int] = set()
        for column, reading, key in self._readings[tier]:
            if column in done:
                continue
            found = [values[field] for field in reading.fields if field in values]
            if len(found) == len(reading.fields):
                done.add(column)
                row[column] = self._converted(reading, key, sum(found), counters, now_ns)
            else:
                row[column] = decode.NAN
                counters.per_second(key, None, now_ns)
        if tier == SLOW:
            for column, field in self._margins.items():
                row[column] = decode.signed_degrees(values.get(field))

    def _converted(self, reading: Reading, key: int, value: float, counters: decode.Counters, now_ns: int) -> float:
        if not reading.rate:
            return decode.within(value * reading.scale, reading.low, reading.high)
        grown = counters.per_second(key, value, now_ns, reading.scale)
        return min(grown, 1.0) if reading.column.endswith("_ratio") else grown


def reasons(batches: Iterable[Batch]) -> dict[str, str]:
    """Why columns made of fields are absent: those of which every reading lacks a field."""
    absent = {field: reason for batch in batches for field, reason in batch.absent.items()}
    why: dict[str, str] = {}
    present: set[str] = set()
    for reading in READINGS:
        missing = [absent[field] for field in reading.fields if field in absent]
        if missing:
            why.setdefault(reading.column, missing[0])
        else:
            present.add(reading.column)
    why.update({name: absent[field] for name, field in MARGINS.items() if field in absent})
    return {column: reason for column, reason in why.items() if column not in present}
