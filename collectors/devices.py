"""Files and calls of devices that may never answer: each device is read by itself, and one that hangs costs its own row only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from collectors.crew import Crew
from trainwarden.clock import NS_PER_S
from trainwarden.records import Gap

T = TypeVar("T")

WAIT_S = 0.25
HUNG_NS = 2 * NS_PER_S


class Reading(Generic[T]):
    """One device's part of a turn. `answer` is of this turn, None while there is none; `error` says why."""

    def __init__(self, name: str, read: Callable[[], T]) -> None:
        self.name = name
        self.busy_since_ns = 0
        self.answer: T | None = None
        self.error: Exception | None = None
        self._read = read

    def run(self) -> None:
        """Read; whatever goes wrong is kept for whoever asked."""
        try:
            self.answer, self.error = self._read(), None
        except Exception as error:  # noqa: BLE001 - it becomes the reason of a gap
            self.error = error

    @property
    def reason(self) -> str:
        """Why there is no answer; empty when there is one."""
        since_ns = self.busy_since_ns
        if since_ns:
            return "hung" if time.monotonic_ns() - since_ns > HUNG_NS else "late"
        if self.error is not None:
            return "error"
        return "" if self.answer is not None else "late"


class Devices(Generic[T]):
    """Reads devices in turns, by one thread as long as none of them hangs.

    Parameters
    ----------
    reader
        Makes what reads a device, once for each; it needs files and state of its own, for it may still hang while others are read.
    wait_s
        How long a turn is waited for. A device that is still being read is not asked again, nor waited for.
    """

    def __init__(self, reader: Callable[[str], Callable[[], T]], wait_s: float = WAIT_S) -> None:
        self._reader = reader
        self._wait_s = wait_s
        self._crew: Crew | None = None
        self._readings: dict[str, Reading[T]] = {}

    def read(self, names: Iterable[str]) -> dict[str, T]:
        """What each device answers in this turn; those without an answer are missing. Devices that are not named are forgotten."""
        known = self._readings
        self._readings = {name: known.get(name) or Reading(name, self._reader(name)) for name in names}
        if not self._readings:
            return {}
        chosen = list(self._readings.values())
        for reading in chosen:
            if not reading.busy_since_ns:
                reading.answer = None
        if self._crew is None:
            self._crew = Crew()
        self._crew.turn(chosen, self._wait_s)
        answers = {reading.name: reading.answer for reading in chosen if not reading.busy_since_ns}
        return {name: answer for name, answer in answers.items() if answer is not None}

    def gaps(self, source: str) -> tuple[Gap, ...]:
        """A gap for each device that did not answer in the last turn, as ``hung:mlx5_0/1``."""
        reasons = {name: reading.reason for name, reading in self._readings.items()}
        return tuple(Gap(source, f"{reason}:{name}") for name, reason in reasons.items() if reason)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; happens by itself when nobody asks any more."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None
