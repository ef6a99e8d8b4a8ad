"""Who computed wrong first: not-a-number before the reduction, or parameters that differ between replicas.

After the all-reduce every rank holds the same not-a-number; only the loss and the gradient norm *before* it tell whose it was, and only in
the first bad step (an optimizer that does not skip it spreads it to all parameters).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import msgspec

from detectors.base import Detector, Frame, series_evidence
from detectors.state import decode_state, encode_state
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, EntityKind, StepReport, StepRow, Verdict
from trainwarden.settings import option

UNKNOWN, CLEAN, BAD = -1, 0, 1
_MAX_STEPS = 2048
_JOB_SILENCE_NS = 3600 * NS_PER_S


@dataclass(frozen=True)
class CorruptionSettings:
    """Settings of `corruption`."""

    confirm_steps: int = option(
        3, "bad steps before anything is said: a single one is what loss scaling produces by design"
    )
    wait_s: float = option(
        2.0, "how long to wait for ranks that did not report a step, or for further steps of a job that stopped"
    )
    clear_steps: int = option(40, "clean steps after which the opinion is taken back")
    agreed_checks: int = option(
        2, "replicas must have agreed so often before a difference counts: sharded parameters always differ"
    )
    differing_checks: int = option(2, "checks in a row in which the same rank differs")
    restate_s: float = option(10.0, "while bad steps go on, it is said again after so long")


class Opinion(msgspec.Struct):
    """An open opinion; `node` is empty when no rank stands out."""

    kind: str
    node: str
    rank: int
    step: int
    onset_ns: int
    said_ns: int
    text: str
    ranks: list[int] = []


class JobState(msgspec.Struct):
    """One job's attempt. `cells` and `sums` hold what each rank said about the steps that are not settled yet."""

    job: str
    attempt: int = -1
    world: int = 0
    nodes: list[str] = []
    heard_ns: int = 0
    says_loss: bool = False
    says_local: bool = False
    cells: dict[int, list[int]] = {}
    starts_ns: dict[int, int] = {}
    heard_at_ns: dict[int, int] = {}
    settled_to: int = -1
    bad_steps: list[int] = []
    first_cells: list[int] = []
    first_ns: int = 0
    clean_steps: int = 0
    sums: dict[int, list[float]] = {}
    agreed: int = 0
    differing: dict[int, int] = {}
    opinions: dict[str, Opinion] = {}

    def begin(self, report: StepReport) -> None:
        """A newer attempt: all ranks start from the same parameters again."""
        self.attempt, self.world = report.attempt, max(report.world, report.rank + 1)
        self.nodes = [""] * self.world
        self.cells, self.starts_ns, self.heard_at_ns, self.sums, self.differing, self.opinions = {}, {}, {}, {}, {}, {}
        self.settled_to, self.bad_steps, self.first_cells, self.first_ns, self.clean_steps, self.agreed = (
            -1,
            [],
            [],
            0,
            0,
            0,
        )


class State(msgspec.Struct):
    """State of the detector."""

    jobs: dict[str, JobState] = {}


class CorruptionDetector(Detector):
    """Says `non_finite` or `silent_corruption`."""

    name = "corruption"
    kinds = ("non_finite", "silent_corruption")
    Settings = CorruptionSettings
    settings: CorruptionSettings

    def __init__(self, settings: CorruptionSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()

    def update(self, frame: Frame) -> list[Verdict]:
        for report in frame.steps:
            self._take_in(report, frame.now_ns)
        verdicts: list[Verdict] = []
        for job in self._state.jobs.values():
            verdicts += self._judge_finite(job, frame.now_ns) + self._judge_sums(job, frame.now_ns)
        silent = [name for name, job in self._state.jobs.items() if frame.now_ns - job.heard_ns > _JOB_SILENCE_NS]
        for name in silent:
            del self._state.jobs[name]
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """Loss and local gradient of rank 1 are not finite from second 10 on."""
        frames = SyntheticCluster(seed=1).frames(20, lambda second: Scene(not_finite={1}) if second >= 10 else None)
        return Example(frames, "non_finite", node_entity(1))

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    # --- what is said --------------------------------------------------------------------------------------------------------

    def _take_in(self, report: StepReport, now_ns: int) -> None:
        job = self._state.jobs.setdefault(report.job, JobState(report.job))
        if report.attempt > job.attempt or (
            report.attempt == job.attempt and report.world > 0 and report.world != job.world
        ):
            job.begin(report)
        if report.attempt < job.attempt or not 0 <= report.rank < job.world:
            return
        job.nodes[report.rank] = report.node
        job.heard_ns = now_ns
        for row in report.rows:
            job.says_loss |= math.isfinite(row.loss)
            job.says_local |= math.isfinite(row.grad_norm_local)
            if row.step > job.settled_to:
                cells = job.cells.setdefault(row.step, [UNKNOWN] * job.world)
                cells[report.rank] = BAD if _is_bad_before_reduction(job, row) else CLEAN
                job.starts_ns.setdefault(row.step, row.started_at_ns)
                job.heard_at_ns.setdefault(row.step, now_ns)
            if math.isfinite(row.param_checksum):
                job.sums.setdefault(row.step, [math.nan] * job.world)[report.rank] = row.param_checksum

    # --- not a number --------------------------------------------------------------------------------------------------------

    def _judge_finite(self, job: JobState, now_ns: int) -> list[Verdict]:
        self._settle(job, now_ns)
        verdicts = self._clear_finite(job, now_ns)
        if job.bad_steps and self._is_confirmed(job, now_ns):
            verdicts += self._name_first(job, now_ns)
        return verdicts

    def _settle(self, job: JobState, now_ns: int) -> None:
        """Close steps in order: all ranks reported them, or they waited long enough."""
        for step in sorted(job.cells):
            waited = now_ns - job.heard_at_ns[step] > self.settings.wait_s * NS_PER_S or len(job.cells) > _MAX_STEPS
            if UNKNOWN in job.cells[step] and not waited:
                return
            cells, start_ns = job.cells.pop(step), job.starts_ns.pop(step)
            del job.heard_at_ns[step]
            job.settled_to = step
            self._count(job, step, cells, start_ns)

    def _count(self, job: JobState, step: int, cells: list[int], start_ns: int) -> None:
        if BAD not in cells:
            job.clean_steps += 1
            if job.clean_steps >= self.settings.clear_steps:
                job.bad_steps, job.first_cells = [], []
            return
        if not job.bad_steps:
            job.first_cells, job.first_ns = cells, start_ns
        job.bad_steps = [*job.bad_steps[:1], *job.bad_steps[1:][-30:], step]
        job.clean_steps = 0

    def _is_confirmed(self, job: JobState, now_ns: int) -> bool:
        recent = [step for step in job.bad_steps if step > job.bad_steps[-1] - 10 * self.settings.confirm_steps]
        stopped = now_ns - job.heard_ns > self.settings.wait_s * NS_PER_S and job.clean_steps == 0
        return len(recent) >= self.settings.confirm_steps or stopped

    def _name_first(self, job: JobState, now_ns: int) -> list[Verdict]:
        known = job.opinions.get("non_finite")
        if known is not None and (job.clean_steps or now_ns - known.said_ns < self.settings.restate_s * NS_PER_S):
            return []
        guilty = [rank for rank, cell in enumerate(job.first_cells) if cell == BAD]
        step = job.bad_steps[0]
        if len(guilty) == 1 and job.world > 1:
            rank, node = guilty[0], job.nodes[guilty[0]]
            text = (f"rank {rank} on {node} was the first whose loss or local gradient was not finite (step {step}); "
                    "the reduction gave it to all")  # fmt: skip
            opinion = known or Opinion("non_finite", node, rank, step, job.first_ns, now_ns, text)
        else:
            text = f"loss or gradients of job {job.job} are not finite from step {step} on, on {len(guilty)} of {job.world} ranks at once"
            opinion = known or Opinion("non_finite", "", -1, step, job.first_ns, now_ns, text, guilty)
        opinion.said_ns = now_ns
        job.opinions["non_finite"] = opinion
        return [self._say(job, opinion, now_ns, 0.95 if opinion.node else 0.6)]

    def _clear_finite(self, job: JobState, now_ns: int) -> list[Verdict]:
        known = job.opinions.get("non_finite")
        if known is None or job.bad_steps:
            return []
        del job.opinions["non_finite"]
        known.text = f"loss and gradients of job {job.job} are finite again"
        return [self._say(job, known, now_ns, 0.95, clears=True)]

    # --- parameters that differ ------------------------------------------------------------------------------------------------

    def _judge_sums(self, job: JobState, now_ns: int) -> list[Verdict]:
        newest = max(job.sums, default=-1)
        for step in sorted(job.sums):
            values = job.sums[step]
            if any(math.isnan(value) for value in values):
                if newest - step > 64 or len(job.sums) > _MAX_STEPS:
                    del job.sums[step]
                continue
            del job.sums[step]
            self._compare(job, values)
        return self._name_differing(job, now_ns, newest)

    def _compare(self, job: JobState, values: list[float]) -> None:
        common, count = Counter(values).most_common(1)[0]
        if count == job.world:
            job.agreed += 1
            job.differing = {}
        elif 2 * count > job.world and job.agreed >= self.settings.agreed_checks:
            odd = [rank for rank, value in enumerate(values) if value != common]
            job.differing = {rank: job.differing.get(rank, 0) + 1 for rank in odd}

    def _name_differing(self, job: JobState, now_ns: int, step: int) -> list[Verdict]:
        verdicts = []
        for rank, count in sorted(job.differing.items()):
            known = job.opinions.get(f"sum/{rank}")
            if count < self.settings.differing_checks or known is not None:
                continue
            text = f"parameters of rank {rank} on {job.nodes[rank]} differ from those of all other replicas, which agree among themselves"
            opinion = Opinion("silent_corruption", job.nodes[rank], rank, step, now_ns, now_ns, text)
            job.opinions[f"sum/{rank}"] = opinion
            verdicts.append(self._say(job, opinion, now_ns, 0.95))
        return verdicts

    def _say(self, job: JobState, opinion: Opinion, at_ns: int, confidence: float, clears: bool = False) -> Verdict:
        entity = (
            Entity(EntityKind.NODE, opinion.node, opinion.node) if opinion.node else Entity(EntityKind.JOB, job.job)
        )
        onset_ns = min(opinion.onset_ns, at_ns)
        cells = [float(cell) for cell in job.first_cells]
        note = f"step {opinion.step}; one value per rank: 1 not finite before the reduction, 0 finite, -1 not reported"
        evidence = (series_evidence("first bad step", "1", [onset_ns] * len(cells), cells, note=note),) if cells else ()
        return self.verdict(
            kind=opinion.kind, entity=entity, window=(onset_ns, at_ns), onset_at_ns=onset_ns, job=job.job, attempt=job.attempt,
            rank=opinion.rank, score=float(max(len(job.bad_steps), 1)), value=float(opinion.step), confidence=confidence,
            text=opinion.text, clears=clears, evidence=evidence,
            victims=tuple(dict.fromkeys(node for node in job.nodes if node and node != opinion.node)) if opinion.node else (),
        )  # fmt: skip


def _is_bad_before_reduction(job: JobState, row: StepRow) -> bool:
    """A row's NaN may also mean that the job never reports that number: only numbers it is known to report count."""
    if row.finite:
        return False
    known = (row.loss if job.says_loss else 0.0, row.grad_norm_local if job.says_local else 0.0)
    blind = not job.says_loss and not job.says_local
    return blind or not all(math.isfinite(value) for value in known)
