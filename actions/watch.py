"""The service's picture of the wardens, read again and again: deciding must not wait for a node that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from actions.backends.base import Backend, job_state
from actions.world import JobState, NodeState
from trainwarden.clock import Clock


@dataclass(frozen=True)
class _Progress:
    generation: int
    step: int
    rose_at_ns: int


class Watch:
    """Keeps the newest picture and when each job's lowest step last rose. Thread-safe."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._lock = threading.Lock()
        self._cluster: dict[str, NodeState] = {}
        self._read_at_ns = 0
        self._progress: dict[str, _Progress] = {}
        self._save_ms: dict[str, float] = {}
        self._reached: dict[str, int] = {}

    def refresh(self) -> Mapping[str, NodeState]:
        """Ask every warden; a silent one keeps what it said last, marked unreachable."""
        cluster = self._backend.cluster()
        now_ns = self._clock.now_ns()
        with self._lock:
            self._cluster, self._read_at_ns = cluster, now_ns
            for job in {state.job for state in cluster.values() if state.job}:
                self._note_progress(job_state(job, cluster, now_ns), now_ns)
        return cluster

    def cluster(self) -> Mapping[str, NodeState]:
        """The picture as last read; asks nobody."""
        with self._lock:
            return self._cluster

    def job(self, job: str) -> JobState:
        """One job as last read."""
        with self._lock:
            progress = self._progress.get(job)
            state = job_state(job, self._cluster, self._read_at_ns)
            rose_at_ns = progress.rose_at_ns if progress else 0
            return replace(state, advanced_at_ns=rose_at_ns, observed_save_ms=self._save_ms.get(job, 0.0))

    def reached(self, job: str) -> int:
        """Highest step that every rank of `job` was ever seen to have done; -1 before the first. Outlives a dead attempt."""
        with self._lock:
            return self._reached.get(job, -1)

    def saved(self, job: str, duration_ms: float) -> None:
        """A save of `job` took so long; the next one gets twice that."""
        with self._lock:
            self._save_ms[job] = max(duration_ms, 0.5 * self._save_ms.get(job, 0.0))

    def _note_progress(self, job: JobState, now_ns: int) -> None:
        known, step = self._progress.get(job.job), job.last_step
        if step < 0:
            return
        self._reached[job.job] = max(step, self._reached.get(job.job, -1))
        # The first look counts as progress: a service that has just started must not take every job for a hung one.
        if known is None or step > known.step or job.generation > known.generation:
            self._progress[job.job] = _Progress(job.generation, step, now_ns)
