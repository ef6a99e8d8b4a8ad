"""Waiting for what other threads and processes do: for a condition, and with a limit that a loaded machine keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0


def until(condition: Callable[[], Any], what: str = "it", limit_s: float = LIMIT_S) -> Any:
    """What the condition gives when that is true at last.

    Raises
    ------
    AssertionError
        It did not come to pass in time.
    """
    end_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"{what} did not come to pass within {limit_s:g} s"
        time.sleep(0.01)
    return found
