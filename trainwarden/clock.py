"""Time as an interface: the same code runs on the wall clock and, in tests, through hours in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """What code may ask of time."""

    def now_ns(self) -> int:
        """Wall-clock time, unix nanoseconds (UTC)."""
        ...

    def monotonic_ns(self) -> int:
        """Time that never goes back, nanoseconds from an arbitrary start."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait; a simulated clock moves itself forward instead."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class SimulatedClock:
    """A clock that stands still until it is moved.

    Examples
    --------
    >>> clock = SimulatedClock(start_ns=0)
    >>> clock.sleep(3600)
    >>> clock.now_ns() // NS_PER_S
    3600
    """

    def __init__(self, start_ns: int = 1_700_000_000 * NS_PER_S) -> None:
        self._now_ns = start_ns
        self._monotonic_ns = 0
        self._watchers: list[Callable[[int], None]] = []

    def now_ns(self) -> int:
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def sleep(self, seconds: float) -> None:
        self.advance_ns(int(seconds * NS_PER_S))

    def advance_ns(self, delta_ns: int) -> None:
        """Let time pass: both clocks move, watchers are told the new wall time."""
        self._now_ns += delta_ns
        self._monotonic_ns += delta_ns
        for watcher in self._watchers:
            watcher(self._now_ns)

    def step_ns(self, delta_ns: int) -> None:
        """Step the wall clock only (NTP, a wrong hand): monotonic time does not move."""
        self._now_ns += delta_ns

    def watch(self, watcher: Callable[[int], None]) -> None:
        """Call `watcher(now_ns)` after each advance."""
        self._watchers.append(watcher)
