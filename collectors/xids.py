"""One event of an Xid that two sources saw: the kernel log, which has its text, and the driver library, which is there without its rights.

Same PCI address, same code, within five seconds: one event. The kernel's line is the better one, so the library's report waits a moment
for it; where no line comes (some hosts keep the kernel log to themselves), the library's is told.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from trainwarden.clock import NS_PER_S
from trainwarden.records import LogEvent

SAME_NS = 5 * NS_PER_S
HOLD_NS = NS_PER_S
MOST = 4096


@dataclass(frozen=True)
class _Held:
    pci: str
    event: LogEvent
    until_ns: int


class XidBoard:
    """What is known of Xids on this node. Thread-safe: the log source and the GPU source both write here.

    Times are of the monotonic clock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernel_ns: dict[tuple[str, str], int] = {}
        self._told_ns: dict[tuple[str, str], int] = {}
        self._held: list[_Held] = []
        self._last: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self.merged = 0

    def by_kernel(self, pci: str, code: str, now_ns: int) -> bool:
        """A line of the kernel log; whether its event is news (false: the library's report of it has been told already)."""
        key = (pci, code)
        with self._lock:
            told_ns = self._told_ns.get(key)
            if told_ns is not None and now_ns - told_ns < SAME_NS:
                self.merged += 1
                return False
            waiting = [held for held in self._held if (held.pci, held.event.code) == key]
            self.merged += len(waiting)
            self._held = [held for held in self._held if (held.pci, held.event.code) != key]
            self._counted(key, self._kernel_ns.get(key), now_ns)
            self._kernel_ns[key] = now_ns
        return True

    def by_library(self, pci: str, event: LogEvent, now_ns: int) -> None:
        """A report of the driver library; `due` hands it out when the kernel log stays silent."""
        key = (pci, event.code)
        with self._lock:
            seen_ns = self._kernel_ns.get(key)
            if seen_ns is not None and now_ns - seen_ns < SAME_NS:
                self.merged += 1
            elif len(self._held) < MOST:
                self._held.append(_Held(pci, event, now_ns + HOLD_NS))

    def due(self, now_ns: int) -> list[LogEvent]:
        """Reports that nobody else told, one for each address and code."""
        if not self._held:
            return []
        told: list[LogEvent] = []
        with self._lock:
            ready = [held for held in self._held if held.until_ns <= now_ns]
            self._held = [held for held in self._held if held.until_ns > now_ns]
            for held in ready:
                key = (held.pci, held.event.code)
                before_ns = self._told_ns.get(key)
                if before_ns is not None and now_ns - before_ns < SAME_NS:
                    self.merged += 1
                    continue
                self._counted(key, before_ns, now_ns)
                self._told_ns[key] = now_ns
                told.append(held.event)
        return told

    def last(self, pci: str) -> int:
        """The newest Xid of a device since the agent started; 0 when there was none."""
        return self._last.get(pci, 0)

    def count(self, pci: str) -> int:
        """Xids of a device since the agent started; repeats within five seconds are one."""
        return self._counts.get(pci, 0)

    def _counted(self, key: tuple[str, str], before_ns: int | None, now_ns: int) -> None:
        pci, code = key
        number = code.partition(":")[2]
        if number.isdecimal():
            self._last[pci] = int(number)
        if before_ns is None or now_ns - before_ns >= SAME_NS:
            self._counts[pci] = self._counts.get(pci, 0) + 1
        if len(self._kernel_ns) + len(self._told_ns) > MOST:
            self._kernel_ns = {k: at for k, at in self._kernel_ns.items() if now_ns - at < SAME_NS}
            self._told_ns = {k: at for k, at in self._told_ns.items() if now_ns - at < SAME_NS}
