"""What NVML answers, in our units: pure functions. A value that means "not known" is None here and NaN in a row, never 0."""

from __future__ import annotations

import math
import struct

from collectors.nvidia import abi

NAN = float("nan")

_DOUBLE, _RAW = struct.Struct("@d"), struct.Struct("@Q")
DOUBLE_BLANK = 140737488355328.0
"""DCGM's "not known" for floating point, and the first of its kin; the library passes it on in places."""
U64_BLANK = 0x7FFFFFFFFFFFFFF0
U32_BLANKS = range(0x7FFFFFF0, 0x80000000)
U32_ABSENT, U64_ABSENT = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def field_value(kind: int, raw: int) -> float | None:
    """A field's union by its type; None for a blank and for a type that does not exist."""
    if kind == abi.TYPE_U32:
        low = raw & 0xFFFFFFFF
        return None if low == U32_ABSENT or low in U32_BLANKS else float(low)
    if kind in (abi.TYPE_U64, abi.TYPE_ULONG):
        return None if raw >= U64_BLANK else float(raw)
    if kind == abi.TYPE_DOUBLE:
        value: float = _DOUBLE.unpack(_RAW.pack(raw))[0]
        return value if math.isfinite(value) and abs(value) < DOUBLE_BLANK else None
    return _signed(kind, raw)


def _signed(kind: int, raw: int) -> float | None:
    if kind == abi.TYPE_I64:
        value = raw - (1 << 64) if raw >> 63 else raw
        return None if value >= U64_BLANK else float(value)
    if kind == abi.TYPE_I32:
        low = raw & 0xFFFFFFFF
        return None if low in U32_BLANKS else float(low - (1 << 32) if low >> 31 else low)
    return float(raw & 0xFFFF) if kind == abi.TYPE_U16 else None


def field_results(data: bytes) -> list[tuple[int, int, float | None, int]]:
    """(field id, result code, value, microseconds the driver took) of each field in the array that GetFieldValues filled."""
    whole = len(data) - len(data) % abi.FIELD_VALUE.size
    return [
        (field, code, field_value(kind, raw) if code == abi.SUCCESS else None, max(0, took_us))
        for field, _, _, took_us, kind, code, raw in abi.FIELD_VALUE.iter_unpack(data[:whole])
    ]


def signed_degrees(value: float | None) -> float:
    """A temperature limit: margins are negative, and some drivers hand them out as unsigned numbers.

    Examples
    --------
    >>> signed_degrees(4294967288.0)
    -8.0
    """
    if value is None:
        return NAN
    return within(value - 2**32 if value >= 2**31 else value, -150, 250)


def within(value: float | None, low: float, high: float) -> float:
    """The value if it can be true, else NaN: a structure of another version shows numbers that no sensor has."""
    return value if value is not None and low <= value <= high else NAN


def ratio_of_percent(value: float | None) -> float:
    """0..100 as 0..1."""
    return within(value, 0, 100) / 100 if value is not None else NAN


def watts(milliwatts: float | None) -> float:
    """mW as W; more than 20 kW is no power of a board."""
    return within(milliwatts, 0, 20e6) / 1000 if milliwatts is not None else NAN


def memory(total: int, used: int, reserved: int | None) -> tuple[float, float, float, float]:
    """(total, used, reserved, used ratio): the ratio is of what programs can have. Version 1 counts the reserve as used."""
    if not 0 < total < U64_BLANK or used > total or (reserved or 0) > total:
        return NAN, NAN, NAN, NAN
    usable = total - (reserved or 0)
    return float(total), float(used), NAN if reserved is None else float(reserved), used / usable if usable else NAN


def pci_address(text: str) -> str:
    """One spelling: ``0000:3b:00.0``; empty for what is no address.

    Examples
    --------
    >>> pci_address("00000000:3B:00.0"), pci_address("0000:3b:00")
    ('0000:3b:00.0', '0000:3b:00.0')
    """
    head, _, function = text.strip().lower().partition(".")
    parts = head.split(":")
    if len(parts) == 2:
        parts = ["0", *parts]
    try:
        domain, bus, device = (int(part, 16) for part in parts)
    except ValueError:
        return ""
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function or '0'}"


class Counters:
    """Rates of a GPU's counters, by the monotonic clock. A counter that fell (driver reload, reset) starts again: no rate, no jump."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, int]] = {}

    def per_second(self, key: int, value: float | None, now_ns: int, scale: float = 1.0) -> float:
        """(value - previous) × `scale` per second; NaN with nothing to compare with."""
        if value is None:
            self._last.pop(key, None)
            return NAN
        before = self._last.get(key)
        self._last[key] = (value, now_ns)
        if before is None or value < before[0] or now_ns <= before[1]:
            return NAN
        return (value - before[0]) * scale * 1e9 / (now_ns - before[1])

    def clear(self) -> None:
        """Forget all: what follows is another life of the device."""
        self._last.clear()
