"""How far each job has come: what tells recovery from hope."""

from __future__ import annotations

from dataclasses import dataclass, field

from detectors.base import Frame
from trainwarden.records import LogEvent
from trainwarden.topology import Topology


@dataclass
class JobProgress:
    """Newest attempt of a job, the step it reached and when that was."""

    attempt: int = 0
    step: int = -1
    at_ns: int = 0
    world: int = 0
    finished_ranks: set[int] = field(default_factory=set)
    finished: bool = False


class Progress:
    """Progress of all jobs, from steps, from the hook's last words, and from the topology."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobProgress] = {}
        self.topology = Topology()

    def of(self, job: str) -> JobProgress:
        """Progress of one job; empty when nothing is known."""
        return self._jobs.get(job) or JobProgress()

    def attempt(self, job: str) -> int:
        """Newest attempt anybody has spoken of."""
        layout = self.topology.job(job)
        return max(self.of(job).attempt, layout.attempt if layout else 0)

    def advance(self, job: str, step: int, attempt: int, now_ns: int) -> None:
        """A rank finished `step`. Steps of an older attempt are late news and change nothing."""
        known = self._jobs.setdefault(job, JobProgress(attempt))
        if attempt > known.attempt:
            known = self._jobs[job] = JobProgress(attempt)
        if attempt == known.attempt and step > known.step:
            known.step, known.at_ns, known.finished = step, now_ns, False
            known.finished_ranks.clear()

    def take(self, frame: Frame) -> None:
        """Everything a frame says about progress."""
        self.topology = frame.topology
        for report in frame.steps:
            if report.rows:
                self.advance(report.job, max(row.step for row in report.rows), report.attempt, frame.now_ns)
                self._jobs[report.job].world = report.world
        for event in frame.logs:
            self._maybe_finished(event)

    def job_on(self, node: str) -> str:
        """The job that runs on `node` now; empty when none does."""
        layout = self.topology.job_of(node) if node else None
        return layout.job if layout and not self.of(layout.job).finished else ""

    def _maybe_finished(self, event: LogEvent) -> None:
        said_so = event.code == "hook_bye" and event.attributes.get("reason") == "finished"
        if not event.job or not (said_so or event.code == "worker_exit:0"):
            return
        job = self._jobs.setdefault(event.job, JobProgress(event.attempt))
        if event.attempt == job.attempt:
            job.finished_ranks.add(event.rank)
            layout = self.topology.job(event.job)
            job.finished = len(job.finished_ranks) >= max(
                1, job.world, len(layout.ranks) if layout and layout.attempt == job.attempt else 0
            )
