"""Files and calls of devices that may never answer: each device is read by itself, and one that hangs costs its own row only."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from collectors.crew import Crew
from trainwarden.clock import NS_PER_S
from trainwarden.records import Gap

T = TypeVar("T")

WAIT_S = 0.25
HUNG_NS = 2 * NS_PER_S
AHEAD_NS = NS_PER_S // 10


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


class Together:
    """Devices of several sources, all read when the first of these sources asks: one waking of the thread a tick, not one for each source.

    What was read for another source is its answer when it asks within `AHEAD_NS`, in the same tick that is; else it has its devices read
    again, and those of the others with them.
    """

    def __init__(self) -> None:
        self._members: list[weakref.ref[Devices[Any]]] = []
        self._crew: Crew | None = None

    def join(self, member: Devices[Any]) -> None:
        """Read its devices from now on."""
        self._members.append(weakref.ref(member))

    def turn(self, asker: Devices[Any], wait_s: float) -> None:
        """Read the devices of whoever asks, and those that the others named last."""
        now_ns = time.monotonic_ns()
        jobs = asker.begin()
        for other in (known() for known in self._members):
            if other is not None and other is not asker:
                jobs += other.begin()
                other.read_ns = now_ns
        if self._crew is None:
            self._crew = Crew()
        self._crew.turn(jobs, wait_s)

    def leave(self, member: Devices[Any]) -> None:
        """Read its devices no more; with the last one the thread ends."""
        self._members = [known for known in self._members if known() not in (None, member)]
        if not self._members and self._crew is not None:
            self._crew.close()
            self._crew = None


class Devices(Generic[T]):
    """Reads devices in turns, by one thread as long as none of them hangs.

    Parameters
    ----------
    reader
        Makes what reads a device, once for each; it needs files and state of its own, for it may still hang while others are read.
    wait_s
        How long a turn is waited for. A device that is still being read is not asked again, nor waited for.
    together
        Others that are read in the same turn; by default nobody.
    """

    def __init__(
        self, reader: Callable[[str], Callable[[], T]], wait_s: float = WAIT_S, together: Together | None = None
    ) -> None:
        self._reader = reader
        self._wait_s = wait_s
        self._round = together or Together()
        self._round.join(self)
        self._readings: dict[str, Reading[T]] = {}
        self.read_ns = 0

    def read(self, names: Iterable[str]) -> dict[str, T]:
        """What each device answers in this turn; those without an answer are missing. Devices that are not named are forgotten."""
        known, before_ns, self.read_ns = self._readings, self.read_ns, 0
        self._readings = {name: known.get(name) or Reading(name, self._reader(name)) for name in names}
        if not self._readings:
            return {}
        ahead = time.monotonic_ns() - before_ns < AHEAD_NS and self._readings.keys() <= known.keys()
        if not ahead:
            self._round.turn(self, self._wait_s)
        answers = {name: reading.answer for name, reading in self._readings.items() if not reading.busy_since_ns}
        return {name: answer for name, answer in answers.items() if answer is not None}

    def begin(self) -> list[Reading[T]]:
        """What is to be read in a turn; answers of earlier ones are forgotten."""
        chosen = list(self._readings.values())
        for reading in chosen:
            if not reading.busy_since_ns:
                reading.answer = None
        return chosen

    def gaps(self, source: str) -> tuple[Gap, ...]:
        """A gap for each device that did not answer in the last turn, as ``hung:mlx5_0/1``."""
        reasons = {name: reading.reason for name, reading in self._readings.items()}
        return tuple(Gap(source, f"{reason}:{name}") for name, reason in reasons.items() if reason)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Leave the turns; happens by itself when nobody asks any more."""
        self._round.leave(self)
