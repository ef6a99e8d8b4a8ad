"""Step times of real training jobs, replayed through every registered detector: who would be isolated, and was that right?

`python -m benchmarks.detect.steps_real [--json FILE] [--cov-jobs N]` prints one line per job and exits with 0 when all are right.

* ByteDance (three production traces with a known cause): AR must isolate the worker (dp 0, stage 0) and nobody else; SE (sequence
  lengths) and ST (stage partition) must be called imbalance and isolate nobody.
* Alibaba PAI (step times of each of ten workers): in job 1 worker 6 becomes slow for some iterations and must be named; job 2's workers
  are unequal for good and must be left alone; jobs 3 and 4 have several straggling workers and no agreed answer: they are reported.
* Alibaba's 100 jobs, of which only the coefficient of variation per iteration is public: it says how unequal the ten workers were, not
  who was slow. So each iteration gets ten times with exactly that coefficient and a random owner for each: nobody stays slow but by
  chance, and every isolation is false by construction. This tests false isolations under real sizes of variation, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.detect import steps_data
from benchmarks.detect.steps_data import Job
from detectors.base import Detector, Frame, registry
from trainwarden.clock import NS_PER_S
from trainwarden.policy import KINDS, lowest_reach
from trainwarden.records import EntityKind, Reach, StepReport, Verb, Verdict
from trainwarden.topology import Topology


@dataclass(frozen=True)
class Expected:
    """The right answer: nodes to isolate, and kinds that must be said. `open_ended` jobs have no agreed answer."""

    isolated: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    open_ended: bool = False


EXPECTED = {
    "AR": Expected(("dp0-stage0",), ("compute_slow",)),
    "SE": Expected((), ("imbalance",)),
    "ST": Expected((), ("imbalance",)),
    "alibaba-1": Expected(("worker6",), ("compute_slow",)),
    "alibaba-2": Expected(),
    "alibaba-3": Expected(open_ended=True),
    "alibaba-4": Expected(open_ended=True),
}


@dataclass
class Outcome:
    """What was said of a job. `delays` are seconds and steps from the onset (where one is known) to the first isolation."""

    job: str
    ranks: int
    steps: int
    right: bool | None = None
    isolated: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    first_at_step: int = -1
    delay_s: float = float("nan")

    def line(self) -> str:
        """One line for a person."""
        verdict = {True: "right", False: "WRONG", None: "as it comes"}[self.right]
        after = f" at step {self.first_at_step}" if self.first_at_step >= 0 else ""
        delay = f", {self.delay_s:.0f} s after the onset" if self.delay_s == self.delay_s else ""
        isolated = f"isolates {', '.join(self.isolated)}{after}{delay}" if self.isolated else "isolates nobody"
        said = ", ".join(self.said) or "nothing"
        return f"{self.job:11} {verdict:12} {self.ranks:3} ranks {self.steps:5} steps  {isolated}; said: {said}"


def frames_of(job: Job) -> Iterator[Frame]:
    """One frame a second: the reports of the steps that ended in it. No ticks: these jobs have no telemetry."""
    topology = Topology()
    topology.apply(job.topology)
    pending = sorted(job.reports, key=lambda report: report.observed_at_ns)
    at, now_ns = 0, job.start_ns
    while at < len(pending):
        now_ns += NS_PER_S
        first = at
        while at < len(pending) and pending[at].observed_at_ns <= now_ns:
            at += 1
        yield Frame(now_ns, (), _canonical(pending[first:at]), (), topology)


def _canonical(reports: Sequence[StepReport]) -> tuple[StepReport, ...]:
    return tuple(sorted(reports, key=lambda r: (r.observed_at_ns, r.node, r.boot_id, r.seq)))


def isolates(verdict: Verdict) -> bool:
    """Whether the default policy would take a node out of the job for this, and the detector asks for as much."""
    kind = KINDS[verdict.kind]
    return (
        not verdict.clears
        and lowest_reach([kind.reach, verdict.reach]) is Reach.ACT
        and Verb.ISOLATE in kind.remedy
        and verdict.entity.kind is EntityKind.NODE
    )


def replay(job: Job, detectors: Sequence[type[Detector]]) -> list[Verdict]:
    """All verdicts on a job, by fresh detectors with their default settings."""
    fresh = [kind() for kind in detectors]
    return [verdict for frame in frames_of(job) for detector in fresh for verdict in detector.update(frame)]


def judge(job: Job, verdicts: Sequence[Verdict], expected: Expected) -> Outcome:
    """Compare what was said with the right answer."""
    guilty = [verdict for verdict in verdicts if isolates(verdict)]
    said = sorted({f"{v.kind} {v.entity.name}" for v in verdicts if not v.clears})
    outcome = Outcome(job.name, job.ranks, job.steps, isolated=sorted({v.entity.name for v in guilty}), said=said)
    if guilty:
        outcome.first_at_step = job.step_at(guilty[0].window_end_ns)
        if job.onset_ns:
            outcome.delay_s = round((guilty[0].window_end_ns - job.onset_ns) / NS_PER_S, 1)
    kinds = {v.kind for v in verdicts if not v.clears}
    if not expected.open_ended:
        outcome.right = tuple(outcome.isolated) == expected.isolated and set(expected.said) <= kinds
    return outcome


def false_isolations(jobs: Sequence[Job], detectors: Sequence[type[Detector]]) -> dict[str, float]:
    """Isolations in jobs where nobody is slow for longer than one step."""
    isolated, worker_steps, alone, notices = 0, 0, 0, 0
    for job in jobs:
        verdicts = replay(job, detectors)
        found = {v.entity.name for v in verdicts if isolates(v)}
        isolated, alone = isolated + len(found), alone + bool(found)
        notices += len({(v.kind, v.entity.name) for v in verdicts if not v.clears and not isolates(v)})
        worker_steps += len(job.reports)
    rate = 1e6 * isolated / max(worker_steps, 1)
    return {"jobs": len(jobs), "worker_steps": worker_steps, "false_isolations": isolated, "jobs_with_one": alone,
            "false_isolations_per_million_worker_steps": round(rate, 3), "other_notices": notices}  # fmt: skip


def measure(cov_jobs: int = 100) -> dict[str, object]:
    """Every job of every set, by name, and the test of false isolations."""
    detectors = list(registry().all().values())
    outcomes = [judge(job, replay(job, detectors), EXPECTED[job.name]) for job in steps_data.known_jobs()]
    for outcome in outcomes:
        print(outcome.line(), flush=True)
    drawn = false_isolations(list(steps_data.drawn_jobs(cov_jobs)), detectors)
    print(
        f"alibaba-cov {drawn['jobs']} jobs, {drawn['worker_steps']} worker-steps: {drawn['false_isolations']} false isolations "
        f"({drawn['false_isolations_per_million_worker_steps']} per million), {drawn['other_notices']} other notices"
    )
    return {"jobs": [asdict(outcome) for outcome in outcomes], "drawn": drawn}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there as well")
    parser.add_argument("--cov-jobs", type=int, default=100, help="how many of the 100 jobs of the CoV set")
    chosen = parser.parse_args(arguments)
    found = measure(chosen.cov_jobs)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1))
    jobs = found["jobs"]
    assert isinstance(jobs, list)
    return int(any(job["right"] is False for job in jobs))


if __name__ == "__main__":
    sys.exit(main())
