"""How fast each job goes, compared with itself: what tells a fault that hurts from one that only probes see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import StepReport, StepRow
from trainwarden.topology import Topology

_KEPT_STEPS = 400
_LEARNT = 20
_NEWEST = 8
_LONGEST_MS = 1e9
"""Longer than eleven days is no step: also what is not a number, and what would overflow in nanoseconds."""


@dataclass(frozen=True)
class PaceLimits:
    """A step stalls when it is longer than usual by `stall_ms`; stalls are counted over `stall_window_s`. A job `suffers` at
    `suffering_ratio` times its usual step time, which is then no longer learnt from."""  # fmt: skip

    suffering_ratio: float
    stall_ms: float
    stall_window_s: float


class Pace(msgspec.Struct):
    """A job's usual step time and how far steps lie from it (mean absolute deviation), and its newest ones."""

    usual_ms: float = 0.0
    steps: int = 0
    newest_ms: list[float] = []
    newest_step: int = -1
    newest_ns: int = 0
    stalls_ns: list[int] = []
    spread_ms: float = 0.0

    @property
    def learnt(self) -> bool:
        """Whether the usual step time is known."""
        return self.steps > _LEARNT

    def ratio(self) -> float:
        """Newest over usual."""
        return median(self.newest_ms) / self.usual_ms if self.learnt and self.newest_ms else 0.0

    def deviations(self) -> float:
        """How far the newest steps lie above the usual ones, in standard errors of their median; 0 when not known, or within 2 %."""
        if not self.learnt or len(self.newest_ms) < _NEWEST or self.ratio() < 1.02:
            return 0.0
        error_ms: float = 1.2533 * 1.2533 * self.spread_ms / math.sqrt(_NEWEST)
        return (median(self.newest_ms) - self.usual_ms) / max(error_ms, 1e-6 * self.usual_ms, 1e-9)

    def take(self, rows: list[StepRow], limits: PaceLimits) -> None:
        """Steps not seen before: in a synchronous job all ranks take equally long, so whoever reports first is believed."""
        plain = [row for row in rows if row.phase in ("train", "") and row.duration_ms < _LONGEST_MS]
        self.newest_step = max((row.step for row in rows), default=self.newest_step)
        ends = (row.started_at_ns + int(row.duration_ms * NS_PER_MS) for row in plain)
        self.newest_ns = max(ends, default=self.newest_ns)
        self.newest_ms = [*self.newest_ms, *(row.duration_ms for row in plain)][-_NEWEST:]
        usual_now = not self.learnt or self.ratio() < limits.suffering_ratio
        for row in plain:
            self._learn(row, usual_now, limits.stall_ms)

    def forget(self, before_ns: int) -> None:
        """Drop stalls that are too old to count."""
        self.stalls_ns = [at for at in self.stalls_ns if at >= before_ns][-256:]

    def _learn(self, row: StepRow, usual_now: bool, stall_ms: float) -> None:
        learnt = self.learnt
        if learnt and row.duration_ms > self.usual_ms + stall_ms:
            self.stalls_ns.append(row.started_at_ns)
        if usual_now:
            bounded = min(row.duration_ms, 2.0 * self.usual_ms) if learnt else row.duration_ms
            weight = max(1.0 / (self.steps + 1), 1.0 / _KEPT_STEPS)
            self.spread_ms += weight * (abs(bounded - self.usual_ms) * (self.steps > 0) - self.spread_ms)
            self.usual_ms += weight * (bounded - self.usual_ms)
        self.steps += 1


def follow(
    paces: dict[str, Pace], reports: Sequence[StepReport], topology: Topology, limits: PaceLimits
) -> dict[str, Pace]:
    """Paces after `reports`; of jobs that neither run nor report, none are kept."""
    running = {layout.job for layout in topology.jobs()} | {report.job for report in reports}
    newest = {job: pace.newest_step for job, pace in paces.items()}
    for report in reports:
        # most ranks tell what the first one told: ten thousand of them must cost nothing
        step, rows = newest.get(report.job, -1), report.rows
        if not rows or step - 100 <= rows[-1].step <= step:
            continue
        pace = paces.setdefault(report.job, Pace())
        if rows[-1].step < step and rows[-1].started_at_ns <= pace.newest_ns:
            continue  # no job that went back: what a collector had kept while it could not send
        if rows[-1].step < step:
            pace.newest_step = -1
        pace.take([row for row in rows if row.step > pace.newest_step], limits)
        pace.forget(report.observed_at_ns - int(limits.stall_window_s * NS_PER_S))
        newest[report.job] = pace.newest_step
    return {job: pace for job, pace in paces.items() if job in running}
