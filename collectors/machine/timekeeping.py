"""How well the kernel believes to know the time, by the system call that time daemons use to steer it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import NamedTuple

STA_UNSYNC, STA_NANO = 0x0040, 0x2000
TIME_ERROR = 5
PPM_PER_UNIT = 1 / 65536


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("constant", ctypes.c_long), ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long), ("time_s", ctypes.c_long), ("time_us", ctypes.c_long), ("tick", ctypes.c_long),
        ("ppsfreq", ctypes.c_long), ("jitter", ctypes.c_long), ("shift", ctypes.c_int), ("stabil", ctypes.c_long),
        ("jitcnt", ctypes.c_long), ("calcnt", ctypes.c_long), ("errcnt", ctypes.c_long), ("stbcnt", ctypes.c_long),
        ("tai", ctypes.c_int), ("spare", ctypes.c_int * 11),
    )  # fmt: skip


class ClockState(NamedTuple):
    """State of the kernel's clock.

    Attributes
    ----------
    synced
        Whether a daemon keeps it.
    offset_ms
        Correction under way.
    error_ms
        Largest error that the kernel admits to.
    frequency_ppm
        How much the clock is sped up or slowed down.
    """

    synced: bool
    offset_ms: float
    error_ms: float
    frequency_ppm: float


AskClock = Callable[[], ClockState]


def kernel_clock() -> ClockState:
    """Ask the kernel; changes nothing (``modes`` is 0). Raises `OSError`."""
    answer = _Timex()
    state = _libc().adjtimex(ctypes.byref(answer))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    per_ms = 1e6 if answer.status & STA_NANO else 1e3
    synced = state != TIME_ERROR and not answer.status & STA_UNSYNC
    return ClockState(synced, answer.offset / per_ms, answer.maxerror / 1e3, answer.freq * PPM_PER_UNIT)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
