"""Temperature, light and voltage from the memory of an optical module (SFF-8472, SFF-8636, CMIS).

The layouts are those of the public specifications; no capture of a real 400G module was at hand.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from collectors.base import NAN, Row

SFP, QSFP, CMIS = {0x03}, {0x0C, 0x0D, 0x11}, {0x18, 0x19, 0x1E, 0x1F}
DARK_DBM = -40.0
CMIS_LANES_AT = 0x11 * 128
PLAUSIBLE_C = (-40.0, 150.0)


def decode(memory: bytes) -> Row:
    """Columns of one module; empty for one without such sensors (copper), an unknown kind, or memory that ends too early."""
    if not memory:
        return {}
    kind = memory[0]
    if kind in SFP:
        return _sfp(memory)
    if kind in QSFP:
        return _qsfp(memory)
    return _cmis(memory) if kind in CMIS else {}


def dbm(microwatts: float) -> float:
    """Power as decibels above a milliwatt; a dark lane is -40, not minus infinity.

    Examples
    --------
    >>> round(dbm(907.7), 2), dbm(0.0)
    (-0.42, -40.0)
    """
    return max(DARK_DBM, 10 * math.log10(microwatts / 1000)) if microwatts > 0 else DARK_DBM


def _row(temperature: int, tenths_of_mv: int, rx: Sequence[int], tx: Sequence[int], bias: Sequence[int]) -> Row:
    """`temperature` in 1/256 C, powers in 0.1 uW, bias in 2 uA, as all three specifications have them."""
    if not (temperature or tenths_of_mv or any(rx) or any(tx)):
        return {}
    celsius = temperature / 256
    received = [dbm(power / 10) for power in rx]
    return {
        "module_temp_c": celsius if PLAUSIBLE_C[0] < celsius < PLAUSIBLE_C[1] else NAN,
        "module_voltage_v": tenths_of_mv / 10_000 if tenths_of_mv else NAN,
        "rx_power_dbm": min(received, default=NAN),
        "rx_power_spread_db": max(received) - min(received) if received else NAN,
        "tx_power_dbm": min((dbm(power / 10) for power in tx), default=NAN),
        "bias_ma": min((current * 0.002 for current in bias), default=NAN),
    }


def _sfp(memory: bytes) -> Row:
    diagnostics = memory[92] if len(memory) > 92 else 0
    # bit 6: there are sensors; bit 5: their values are calibrated, else they need coefficients that we do not apply
    if len(memory) < 256 + 106 or not diagnostics & 0x40 or not diagnostics & 0x20:
        return {}
    temperature, voltage, bias, tx, rx = struct.unpack_from(">hHHHH", memory, 256 + 96)
    return _row(temperature, voltage, [rx], [tx], [bias])


def _qsfp(memory: bytes) -> Row:
    if len(memory) < 58:
        return {}
    temperature, voltage = struct.unpack_from(">h2xH", memory, 22)
    rx, bias, tx = (list(struct.unpack_from(">4H", memory, at)) for at in (34, 42, 50))
    if not any(rx) and not any(tx) and not any(bias):
        rx = tx = bias = []  # copper, or a module without monitors
    return _row(temperature, voltage, rx, tx, bias)


def _cmis(memory: bytes) -> Row:
    if len(memory) < 18:
        return {}
    temperature, voltage = struct.unpack_from(">hH", memory, 14)
    rx: list[int] = []
    tx: list[int] = []
    bias: list[int] = []
    if len(memory) >= CMIS_LANES_AT + 202:
        tx, bias, rx = (list(struct.unpack_from(">8H", memory, CMIS_LANES_AT + at)) for at in (154, 170, 186))
        used = [
            lane for lane in range(8) if tx[lane] or bias[lane]
        ]  # the present mode leaves some lanes out: these read 0
        tx, bias, rx = ([values[lane] for lane in used] for values in (tx, bias, rx))
    return _row(temperature, voltage, rx, tx, bias)
