"""Jobs that may hang, done by one thread one after the other; whoever hangs keeps that thread, and another one does the rest."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

PATIENCE_S = 0.06


class Job(Protocol):
    """Something to do in each turn."""

    busy_since_ns: int

    def run(self) -> None:
        """Do it; may never come back."""
        ...


class _Turn:
    def __init__(self, jobs: Sequence[Job]) -> None:
        self.waiting = deque(jobs)
        self.left = len(jobs)
        self.changed = threading.Condition()

    def take(self) -> Job | None:
        with self.changed:
            if not self.waiting:
                return None
            job = self.waiting.popleft()
            job.busy_since_ns = time.monotonic_ns()
            return job

    def done(self, job: Job) -> None:
        job.busy_since_ns = 0
        with self.changed:
            self.left -= 1
            if not self.left:
                self.changed.notify()


class _Hand:
    def __init__(self) -> None:
        self._turns: SimpleQueue[_Turn | None] = SimpleQueue()
        self.busy = False
        threading.Thread(target=self._serve, daemon=True).start()

    def give(self, turn: _Turn | None) -> None:
        self.busy = turn is not None
        self._turns.put(turn)

    def _serve(self) -> None:
        while (turn := self._turns.get()) is not None:
            while (job := turn.take()) is not None:
                try:
                    job.run()
                except Exception as error:  # noqa: BLE001 - the thread has to outlive whatever a driver provokes
                    sys.stderr.write(f"trainwarden: a job failed: {type(error).__name__}: {error}\n")
                turn.done(job)
            self.busy = False


class Crew:
    """Does jobs in turns. A job that has not come back from an earlier turn is not begun again."""

    def __init__(self) -> None:
        self._hand = _Hand()

    def close(self) -> None:
        """Let the thread end after what it does now; one that hangs dies with the process."""
        self._hand.give(None)

    def turn(self, jobs: Sequence[Job], timeout_s: float) -> None:
        """Do the jobs that are free; come back when all are done or the time is over."""
        turn = _Turn([job for job in jobs if not job.busy_since_ns])
        self._free_hand().give(turn)
        end_s = time.monotonic() + timeout_s
        with turn.changed:
            while turn.left and (left_s := end_s - time.monotonic()) > 0:
                before = turn.left
                turn.changed.wait(min(left_s, PATIENCE_S))
                if turn.left == before and turn.waiting:
                    self._extra(turn)
            turn.waiting.clear()

    def _free_hand(self) -> _Hand:
        if self._hand.busy:
            self._hand.give(None)
            self._hand = _Hand()
        return self._hand

    def _extra(self, turn: _Turn) -> None:
        hand = _Hand()
        hand.give(turn)
        hand.give(None)
