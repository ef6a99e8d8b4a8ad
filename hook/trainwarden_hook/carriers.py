"""What happens to a sealed save in the background: each place it is carried to has a thread of its own.

A hung disk or peer holds up its own thread only; what was waiting there is replaced by the newer save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trainwarden_hook.memory import Buffer
from trainwarden_hook.packing import Header, Refused

log = logging.getLogger("trainwarden.checkpoint")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What became of one save in one place; times in milliseconds, empty ``error`` when ``ok``."""

    step: int
    where: str
    ok: bool
    error: str = ""
    size_bytes: int = 0
    stall_ms: float = 0.0
    persist_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Sealed:
    """A whole save in a buffer, as long as the buffer still counts ``ticket``."""

    buffer: Buffer
    header: Header
    ticket: int

    def still_valid(self) -> bool:
        """Whether nothing has been written over it."""
        return self.buffer.writing == self.ticket


class Goal(Protocol):
    """Where saves are carried: a folder, a peer."""

    where: str

    def write(self, header: Header, payload: memoryview, still_valid: Callable[[], bool]) -> bool:
        """Carry one save; ``False`` if it was overwritten on the way.

        Raises
        ------
        OSError
            It could not be carried.
        """
        ...


class Carrier:
    """Carries the newest sealed save to one goal."""

    def __init__(self, goal: Goal, report: Callable[[SaveReport], None]) -> None:
        self._goal = goal
        self._report = report
        self._changed = threading.Condition()
        self._waiting: Sealed | None = None
        self._closed = False
        self.carrying: Buffer | None = None
        self._thread = threading.Thread(target=self._work, name=f"trainwarden-{goal.where}", daemon=True)
        self._thread.start()

    def offer(self, sealed: Sealed) -> None:
        """Carry this one next, instead of any that waits."""
        with self._changed:
            self._waiting = sealed
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing waits or is on its way."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self.carrying is None, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Carry what waits, then end the thread; give up after ``timeout_s``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _next(self) -> Sealed | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closed)
            sealed, self._waiting = self._waiting, None
            self.carrying = sealed.buffer if sealed is not None else None
            return sealed

    def _work(self) -> None:
        while (sealed := self._next()) is not None:
            report = self._carry(sealed)
            with self._changed:
                self.carrying = None
            try:
                self._report(report)
            except Exception:
                log.exception("what became of the save of step %d cannot be told", report.step)
            with self._changed:
                self._changed.notify_all()

    def _carry(self, sealed: Sealed) -> SaveReport:
        started = time.perf_counter()
        header = sealed.header
        try:
            done = self._goal.write(header, sealed.buffer.payload(header), sealed.still_valid)
            error = "" if done else "overwritten by a later save on its way"
        except (OSError, Refused) as failure:
            done, error = False, str(getattr(failure, "strerror", None) or failure)
        except Exception as failure:
            log.exception("the save of step %d could not be carried to %s", header.step, self._goal.where)
            done, error = False, f"{type(failure).__name__}: {failure}"
        took_ms = (time.perf_counter() - started) * 1e3
        return SaveReport(header.step, self._goal.where, done, error, header.payload_bytes, 0.0, took_ms)
