"""Saving: copy to shared memory at a step boundary, seal and write to disk in the background."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainwarden_hook.disk import Folder
from trainwarden_hook.memory import Buffer, Buffers, Stamp
from trainwarden_hook.packing import HEADER_BYTES, Header, Plan, Refused

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
class _Sealing:
    buffer: Buffer
    plan: Plan
    step: int
    ticket: int
    stall_ms: float


class Saver:
    """Saves of one rank.

    Parameters
    ----------
    folder
        Where sealed saves go on disk; ``None`` keeps them in memory only.
    report
        Called in the background thread (for failures before the copy: in the training thread)
        with what became of each save.
    """

    def __init__(
        self, buffers: Buffers, folder: Folder | None, stamp: Stamp, report: Callable[[SaveReport], None]
    ) -> None:
        self._buffers = buffers
        self._folder = folder
        self.stamp = stamp
        self._report = report
        self._jobs: queue.SimpleQueue[_Sealing | None] = queue.SimpleQueue()
        self._sealing: Buffer | None = None
        self._being_read: Buffer | None = None
        self._idle = threading.Event()
        self._idle.set()
        self.busy_skips = 0
        self._thread = threading.Thread(target=self._work, name="trainwarden-checkpoint", daemon=True)
        self._thread.start()

    def save(self, step: int, state: Mapping[str, Any], must: bool) -> SaveReport | None:
        """Copy ``state`` to memory as the save of ``step``; the rest happens in the background.

        Parameters
        ----------
        must
            A save by command also overwrites one that is still being sealed; a periodic one is skipped then.

        Returns
        -------
        SaveReport or None
            A failure, or ``None`` when the copy stands (the report follows).
        """
        started = time.perf_counter()
        buffer = self._buffers.choose(self._being_read)
        if buffer is self._sealing and not must:
            self.busy_skips += 1
            return SaveReport(step, "memory", False, "the save before is still being sealed")
        try:
            plan = Plan(state)
            view = buffer.begin(HEADER_BYTES + plan.payload_bytes)
            payload = view[HEADER_BYTES : HEADER_BYTES + plan.payload_bytes]
            plan.write_index(payload)
            plan.write_tensors(payload)
        except (OSError, TypeError, RuntimeError) as error:
            return SaveReport(step, "memory", False, f"{error}")
        stall_ms = (time.perf_counter() - started) * 1e3
        self._sealing = buffer
        self._idle.clear()
        plan.tensors.clear()
        self._jobs.put(_Sealing(buffer, plan, step, buffer.writing, stall_ms))
        return None

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until everything saved so far is sealed and written."""
        return self._idle.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish what is queued and end the thread."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._finish(job)
            except Exception as error:
                log.exception("the save of step %d failed", job.step)
                self._no_longer_sealing(job)
                self._tell(SaveReport(job.step, "memory", False, f"{type(error).__name__}: {error}"))
            if self._jobs.empty():
                self._idle.set()

    def _tell(self, report: SaveReport) -> None:
        """A listener that fails must not end the thread that seals."""
        try:
            self._report(report)
        except Exception:
            log.exception("what became of the save of step %d cannot be told", report.step)

    def _no_longer_sealing(self, job: _Sealing) -> None:
        if self._sealing is job.buffer and job.buffer.writing == job.ticket:
            self._sealing = None

    def _finish(self, job: _Sealing) -> None:
        bad = job.buffer.look_for_nan(job.plan)
        if bad and job.buffer.writing == job.ticket:
            self._sealing = None
            self._tell(SaveReport(job.step, "memory", False, f"the model's {bad} holds NaN"))
            return
        header = job.buffer.seal(job.plan, self.stamp, job.step, job.ticket)
        self._no_longer_sealing(job)
        if header is None:
            self._tell(SaveReport(job.step, "memory", False, "overwritten by a later save before it was sealed"))
            return
        self._tell(SaveReport(job.step, "memory", True, "", header.payload_bytes, job.stall_ms))
        if self._folder is not None and self._jobs.empty():
            self._persist(job, self._folder)

    def _persist(self, job: _Sealing, folder: Folder) -> None:
        started = time.perf_counter()
        buffer = job.buffer
        self._being_read = buffer
        try:
            view = buffer.open(HEADER_BYTES + job.plan.payload_bytes)
            header = Header.decode(view[:HEADER_BYTES], buffer.path)
            payload = view[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
            done = folder.write(header, payload, lambda: buffer.writing == job.ticket)
            error = "" if done else "overwritten by a later save while it was being written"
        except (OSError, Refused) as failure:
            done, error = False, str(getattr(failure, "strerror", None) or failure)
        finally:
            self._being_read = None
        persist_ms = (time.perf_counter() - started) * 1e3
        self._tell(SaveReport(job.step, "disk", done, error, job.plan.payload_bytes, 0.0, persist_ms))
