"""Memory that the C library keeps for itself after it was freed.

A state that was captured, packed and sent leaves hundreds of megabytes of holes behind, between what was made meanwhile; the next state
fills only those that fit it. So a worker's memory rose with every other snapshot, though what it knows did not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def trimmer() -> Callable[[int], int] | None:
    """`malloc_trim` of glibc; None with a C library that has no such thing (musl gives back by itself)."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


def give_back() -> None:
    """Give whole free pages back to the system. Tens of milliseconds after a snapshot of 1,250 nodes, in which others may wait for memory:
    to be called rarely, and beside what is urgent."""
    if (trim := trimmer()) is not None:
        trim(0)
