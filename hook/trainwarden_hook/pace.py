"""A limit on bytes per second for what runs in the background."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Says how long to wait after each piece, so that ``bytes_per_s`` holds on average.

    Parameters
    ----------
    bytes_per_s
        0 means no limit.
    """

    def __init__(
        self,
        bytes_per_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._sleep = sleep
        self._due = 0.0

    def spend(self, size: int) -> None:
        """Wait until ``size`` bytes more are within the limit; time without work is not saved up."""
        if self._bytes_per_s <= 0:
            return
        now = self._now()
        self._due = max(self._due, now) + size / self._bytes_per_s
        if self._due > now:
            self._sleep(self._due - now)
