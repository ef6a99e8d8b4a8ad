"""Saving: copy to shared memory at a step boundary, seal in the background, carry to disk and to a peer."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainwarden_hook import crew, pinning
from trainwarden_hook.carriers import Carrier, Goal, SaveReport, Sealed
from trainwarden_hook.copying import Overlap, copy_all
from trainwarden_hook.memory import Buffer, Buffers, Stamp
from trainwarden_hook.packing import HEADER_BYTES, Plan

__all__ = ["OVERLAP_FROM_BYTES", "SaveReport", "Saver"]
OVERLAP_FROM_BYTES = 64 << 20
log = logging.getLogger("trainwarden.checkpoint")
Stable = Callable[[str, Any], bool]


@dataclass(frozen=True, slots=True)
class _Sealing:
    buffer: Buffer
    plan: Plan
    step: int
    ticket: int
    stall_ms: float
    overlap: Overlap | None


class Saver:
    """Saves of one rank.

    Parameters
    ----------
    folder
        Where sealed saves go on disk; ``None`` keeps them in memory only.
    report
        Called in a background thread (for failures before the copy: in the training thread)
        with what became of each save.
    peer
        Where a replica of each sealed save goes; ``None`` for nowhere.
    stable
        Says of a path and tensor whether nothing but the optimizer's step changes it; then large saves are
        copied beside the next step, and `before_change` must be called before the optimizer's step.
    overlap_from_bytes
        Smaller saves are copied at once all the same; ``None``: all are.
    """

    def __init__(
        self,
        buffers: Buffers,
        folder: Goal | None,
        stamp: Stamp,
        report: Callable[[SaveReport], None],
        peer: Goal | None = None,
        stable: Stable | None = None,
        overlap_from_bytes: int | None = OVERLAP_FROM_BYTES,
    ) -> None:
        self._buffers = buffers
        self.stamp = stamp
        self._report = report
        self._disk = Carrier(folder, self._tell) if folder is not None else None
        self._peer = Carrier(peer, self._tell) if peer is not None else None
        self._stable = stable if overlap_from_bytes is not None else None
        self._overlap_from_bytes = overlap_from_bytes or 0
        self._overlap: Overlap | None = None
        self._cuda: pinning.Runtime | None = None
        self._jobs: queue.SimpleQueue[_Sealing | None] = queue.SimpleQueue()
        self._sealing: Buffer | None = None
        self._open_jobs = 0
        self._idle = threading.Condition()
        self.busy_skips = 0
        self._thread = threading.Thread(target=self._work, name="trainwarden-checkpoint", daemon=True)
        self._thread.start()

    @property
    def _carriers(self) -> list[Carrier]:
        return [carrier for carrier in (self._disk, self._peer) if carrier is not None]

    # -- in the training thread

    def save(self, step: int, state: Mapping[str, Any], must: bool) -> SaveReport | None:
        """Copy ``state`` to memory as the save of ``step``; the rest happens in the background.

        Parameters
        ----------
        must
            A save by command is copied at once, and overwrites one that is still being sealed; a
            periodic one is skipped then.

        Returns
        -------
        SaveReport or None
            A failure, or ``None`` when the copy stands or is on its way (the report follows).
        """
        started = time.perf_counter()
        self.before_change()
        buffer = self._buffers.choose(self._disk.carrying if self._disk is not None else None)
        if buffer is self._sealing and not must:
            self.busy_skips += 1
            return SaveReport(step, "memory", False, "the save before is still being sealed")
        try:
            plan = Plan(state, None if must else self._stable)
            self._copy(plan, buffer)
        except (OSError, TypeError, RuntimeError) as error:
            return SaveReport(step, "memory", False, f"{error}")
        self._sealing = buffer
        with self._idle:
            self._open_jobs += 1
        stall_ms = (time.perf_counter() - started) * 1e3
        plan.tensors.clear()
        self._jobs.put(_Sealing(buffer, plan, step, buffer.writing, stall_ms, self._overlap))
        return None

    def _copy(self, plan: Plan, buffer: Buffer) -> None:
        view = buffer.begin(HEADER_BYTES + plan.payload_bytes)
        if any(piece.tensor.is_cuda for piece in plan.tensors):
            self._cuda = self._cuda or pinning.runtime()
            buffer.page_lock(self._cuda)
        payload = view[HEADER_BYTES : HEADER_BYTES + plan.payload_bytes]
        plan.write_index(payload)
        later = [piece for piece in plan.tensors if piece.stable]
        if not later or sum(piece.size for piece in later) < self._overlap_from_bytes:
            plan.write_tensors(payload)
            return
        data = payload[plan.data_start :]
        copy_all([piece for piece in plan.tensors if not piece.stable], data)
        self._overlap = Overlap(later, data, payload)

    def before_change(self) -> None:
        """The optimizer is about to change the state: what is still being copied must be complete first."""
        overlap, self._overlap = self._overlap, None
        if overlap is not None:
            overlap.wait()
            if overlap.problem:
                # Something besides the optimizer changes the state of this script.
                log.warning("saves are copied at once from now on: %s", overlap.problem)
                self._stable = None

    def copy_at_once(self) -> None:
        """Overlap no copy from now on."""
        self._stable = None

    def prepare(self, size_bytes: int) -> None:
        """Reserve the memory of a state of this size in the background, before the first save needs it."""
        self._cuda = pinning.runtime()
        threading.Thread(target=self._prepare, args=(size_bytes,), name="trainwarden-prepare", daemon=True).start()

    def _prepare(self, size_bytes: int) -> None:
        crew.load()
        try:
            for buffer in self._buffers.pair:
                buffer.prepare(HEADER_BYTES + size_bytes)
                buffer.page_lock(self._cuda)
        except OSError as error:
            log.warning("no %d bytes could be reserved for a save: %s", size_bytes, error)

    def holds(self, step: int) -> bool:
        """Whether the memory holds a whole save of ``step``."""
        return any(buffer.sealed and buffer.step == step for buffer in self._buffers.pair)

    def wait_sealed(self, timeout_s: float) -> bool:
        """Wait until everything saved so far is sealed, or is known to be no save."""
        with self._idle:
            return self._idle.wait_for(lambda: self._open_jobs == 0, timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until everything saved so far is sealed and carried."""
        deadline = time.monotonic() + timeout_s
        sealed = self.wait_sealed(timeout_s)
        return sealed and all(carrier.wait_idle(max(0.0, deadline - time.monotonic())) for carrier in self._carriers)

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish what is queued and end the threads."""
        deadline = time.monotonic() + timeout_s
        self._jobs.put(None)
        self._thread.join(timeout_s)
        for carrier in self._carriers:
            carrier.close(max(0.1, deadline - time.monotonic()))

    # -- in the background

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._finish(job)
            except Exception as error:
                log.exception("the save of step %d failed", job.step)
                self._fail(job, f"{type(error).__name__}: {error}")
            with self._idle:
                self._open_jobs -= 1
                self._idle.notify_all()

    def _tell(self, report: SaveReport) -> None:
        """A listener that fails must not end the thread that seals."""
        try:
            self._report(report)
        except Exception:
            log.exception("what became of the save of step %d cannot be told", report.step)

    def _no_longer_sealing(self, job: _Sealing) -> None:
        if self._sealing is job.buffer and job.buffer.writing == job.ticket:
            self._sealing = None

    def _fail(self, job: _Sealing, reason: str) -> None:
        self._no_longer_sealing(job)
        self._tell(SaveReport(job.step, "memory", False, reason))

    def _finish(self, job: _Sealing) -> None:
        stall_ms = job.stall_ms + self._after_copy(job)
        problem = job.overlap.problem if job.overlap is not None else ""
        bad = "" if problem else job.buffer.look_for_nan(job.plan)
        if problem or (bad and job.buffer.writing == job.ticket):
            self._fail(job, problem or f"the model's {bad} holds NaN")
            return
        blocks = job.overlap.blocks if job.overlap is not None else None
        header = job.buffer.seal(job.plan, self.stamp, job.step, job.ticket, blocks)
        self._no_longer_sealing(job)
        if header is None:
            self._tell(SaveReport(job.step, "memory", False, "overwritten by a later save before it was sealed"))
            return
        self._tell(SaveReport(job.step, "memory", True, "", header.payload_bytes, stall_ms))
        for carrier in self._carriers:
            carrier.offer(Sealed(job.buffer, header, job.ticket))
        if self._buffers.other(job.buffer).step < 0:
            self._prepare(header.payload_bytes)

    @staticmethod
    def _after_copy(job: _Sealing) -> float:
        """Wait for an overlapped copy; the milliseconds that the training thread had to wait for it as well."""
        if job.overlap is None:
            return 0.0
        job.overlap.finish()
        return job.overlap.waited_ms
