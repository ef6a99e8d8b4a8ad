"""The local workers of one launcher: start through the zygote, watch, stop, kill."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from trainwarden_hook.zygote import Request, Zygote

SPAWN_TIMEOUT_S = 30.0
ABANDON_AFTER_S = 5.0


@dataclass
class Worker:
    """One training process."""

    rank: int
    local_rank: int
    generation: int
    pid: int = 0
    exit_code: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it has been started and has not ended."""
        return self.pid > 0 and self.exit_code is None


class Workers:
    """Thread-safe table of the local workers.

    Parameters
    ----------
    on_exit
        Called in the watcher thread the moment a worker ends.
    grace_s
        Time between SIGTERM and SIGKILL; a stopped (SIGSTOP) worker gets SIGKILL at once.
    """

    def __init__(self, zygote: Zygote, on_exit: Callable[[Worker], None], grace_s: float) -> None:
        self._zygote = zygote
        self._on_exit = on_exit
        self._grace_s = grace_s
        self._changed = threading.Condition()
        self._by_key: dict[int, Worker] = {}
        self._early_exits: dict[int, int] = {}
        self._next_key = 0
        self.zygote_lost = False
        self.current: list[Worker] = []
        threading.Thread(target=self._watch, name="trainwarden-workers", daemon=True).start()

    def _watch(self) -> None:
        while True:
            event = self._zygote.read()
            if event is None:
                break
            self._take(event)
        with self._changed:
            self.zygote_lost = True
            lost = [worker for worker in self._by_key.values() if worker.exit_code is None]
            for worker in lost:
                worker.exit_code = -signal.SIGKILL
            self._changed.notify_all()
        if not self._zygote.closed:
            for worker in lost:
                self._on_exit(worker)

    def _take(self, event: dict[str, int]) -> None:
        with self._changed:
            if "spawned" in event:
                ended = self._spawned(self._by_key[event["key"]], event["spawned"])
            else:
                ended = self._exited(event["exited"], event["code"])
            self._changed.notify_all()
        if ended is not None:
            self._on_exit(ended)

    def _spawned(self, worker: Worker, pid: int) -> Worker | None:
        worker.pid = pid
        worker.exit_code = self._early_exits.pop(pid, None)
        return worker if worker.exit_code is not None else None

    def _exited(self, pid: int, code: int) -> Worker | None:
        for worker in self._by_key.values():
            if worker.pid == pid and worker.exit_code is None:
                worker.exit_code = code
                return worker
        self._early_exits[pid] = code
        return None

    def start(self, worker: Worker, request: Request) -> None:
        """Start one worker and wait until its pid is known.

        Raises
        ------
        RuntimeError
            The zygote is gone or does not answer.
        """
        with self._changed:
            key = self._next_key
            self._next_key += 1
            self._by_key[key] = worker
            self.current.append(worker)
            sent = self._zygote.spawn(replace(request, key=key))
            self._changed.wait_for(lambda: worker.pid > 0 or self.zygote_lost or not sent, SPAWN_TIMEOUT_S)
            if worker.pid == 0:
                raise RuntimeError(
                    f"the worker for local rank {worker.local_rank} could not be started: the zygote is gone"
                )

    def alive_ranks(self) -> set[int]:
        """Ranks of the present world that live here."""
        return {worker.rank for worker in list(self.current) if worker.alive}

    def forget_ended(self, local_rank: int) -> None:
        """The worker of that place has ended, been noticed, and is being replaced."""
        with self._changed:
            self.current = [worker for worker in self.current if worker.local_rank != local_rank or worker.alive]

    def kill(self, rank: int) -> int | None:
        """SIGKILL the live worker of ``rank``; its pid, or ``None`` if it is not here or has ended."""
        with self._changed:
            pid = next((worker.pid for worker in self.current if worker.rank == rank and worker.alive), None)
            if pid is not None:
                _signal(pid, signal.SIGKILL)
            return pid

    def stop(self, first: signal.Signals = signal.SIGTERM) -> list[Worker]:
        """Stop all local workers; returns those that could not be killed (stuck in the kernel)."""
        with self._changed:
            for worker in self._alive():
                _signal(worker.pid, signal.SIGKILL if _is_stopped(worker.pid) else first)
            self._changed.wait_for(lambda: not self._alive(), self._grace_s)
            for worker in self._alive():
                _signal(worker.pid, signal.SIGKILL)
            self._changed.wait_for(lambda: not self._alive(), ABANDON_AFTER_S)
            stuck = self._alive()
            self._by_key = {key: worker for key, worker in self._by_key.items() if worker in stuck}
            self.current = []
            return stuck

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._by_key.values() if worker.alive and not self.zygote_lost]

    def wait_change(self, timeout_s: float) -> None:
        """Sleep until a worker ends or ``timeout_s`` is over."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if not any(worker.exit_code is not None for worker in self.current):
                self._changed.wait(max(0.0, deadline - time.monotonic()))


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    """Whether the kernel shows state T (stopped): SIGTERM would wait for SIGCONT for ever."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] in {"T", "t"}
    except (OSError, IndexError):
        return False
