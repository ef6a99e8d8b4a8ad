"""Questions that may never be answered: asked in a thread of their own, one at a time, and never waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from trainwarden.clock import NS_PER_S, Clock

T = TypeVar("T")

STALE_PERIODS = 2.5


class Answer(NamedTuple, Generic[T]):
    """What was said, when it was asked (monotonic), and how long it took."""

    value: T
    asked_ns: int
    took_ns: int


class Question(Generic[T]):
    """A question asked every `every_s`; while one is open no other is begun, so that a dead device costs one thread, not one a tick.

    Parameters
    ----------
    ask
        May block for ever and may raise `OSError`; runs in a thread that dies with the process.

    Attributes
    ----------
    last
        The newest good answer, however old; None before the first one.
    error
        Why there was none the last time.
    count
        Questions that came to an end, well or not.
    """

    def __init__(self, name: str, clock: Clock, every_s: float, ask: Callable[[], T]) -> None:
        self._name = name
        self._clock = clock
        self.every_s = every_s
        self._every_ns = int(every_s * NS_PER_S)
        self._ask = ask
        self._asked_ns: int | None = None
        self._thread: threading.Thread | None = None
        self._answer: Answer[T] | None = None
        self.last: T | None = None
        self.error: Exception | None = None
        self.count = 0

    def newest(self) -> Answer[T] | None:
        """The newest answer, None before the first one and when it is older than 2.5 periods. Asks again when it is time."""
        now_ns = self._clock.monotonic_ns()
        if not self.open and (self._asked_ns is None or now_ns - self._asked_ns >= self._every_ns):
            self._asked_ns = now_ns
            self._thread = threading.Thread(target=self._serve, args=(now_ns,), name=f"tw-{self._name}", daemon=True)
            self._thread.start()
        answer = self._answer
        if answer is None or now_ns - answer.asked_ns > STALE_PERIODS * self._every_ns:
            return None
        return answer

    @property
    def open(self) -> bool:
        """Whether a question waits for its answer."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def waiting_s(self) -> float:
        """How long the open question has waited; 0 when none is open."""
        if not self.open or self._asked_ns is None:
            return 0.0
        return (self._clock.monotonic_ns() - self._asked_ns) / NS_PER_S

    def soon(self) -> None:
        """Ask again at the next `newest`, before its time."""
        self._asked_ns = None

    def settle(self, timeout_s: float) -> bool:
        """Wait for the open question, for whoever has the time; true when none is open any more."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.open

    def _serve(self, asked_ns: int) -> None:
        try:
            value = self._ask()
        except Exception as error:  # noqa: BLE001 - whoever asked reads `error` and gives it as the reason of a gap
            self.error = error
            self._answer = None
            self.count += 1
            return
        self.error = None
        self.last = value
        self.count += 1
        self._answer = Answer(value, asked_ns, self._clock.monotonic_ns() - asked_ns)
