"""Loss or gradient norm that jumps on all replicas alike: the job learns badly, no node is bad.

A replica whose numbers differ from the others' is another matter (`corruption`): the middle of the ranks decides here, and one rank cannot
move it. What is expected follows the last steps, so the fall of a young loss is no news; the spread is their own, so a noisy loss is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
from msgspec import structs

from detectors.base import Detector, Frame, series_evidence
from detectors.robust import median_of_known
from detectors.state import Array, decode_state, encode_state, nan_array
from detectors.steps.assembly import rows_by_step
from detectors.steps.blocks import SCALE_OF_MAD
from detectors.steps.examples import changed_rows
from detectors.steps.silence import forget_silent
from detectors.steps.table import PHASES, StepTable, tables_of
from detectors.synthetic import JOB, Example, SyntheticCluster
from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, EntityKind, StepRow, Verdict
from trainwarden.settings import option

LOSS, NORM = range(2)
_NAMES = ("loss", "gradient norm")
_LATENESS_NS = 3 * NS_PER_S
_MAX_PENDING = 2048
_RANKS_READ = 256
"""The middle of so many ranks, spread over the job, is as good as that of all."""


@dataclass(frozen=True)
class LossSpikeSettings:
    """Settings of `loss_spike`."""

    warm_steps: int = option(200, "plain steps of an attempt before anything is said: a young loss is wild")
    window_steps: int = option(128, "steps that the expected level and its spread are learnt from")
    block_steps: int = option(5, "the middle of so many steps must be out of line: one wild batch is none")
    loss_deviations: float = option(
        8.0, "the loss jumps when it is so many robust deviations above what its course foretells"
    )
    loss_rise: float = option(0.15, "and by at least this share of its size")
    norm_deviations: float = option(10.0, "the same for the gradient norm, in its logarithm")
    norm_ratio: float = option(4.0, "which must be so many times its usual size")
    clear_steps: int = option(50, "steps in line after which it is taken back")
    restate_s: float = option(30.0, "while it lasts, it is said again after so long")


class Opinion(msgspec.Struct):
    """A jump that was said: of `LOSS` or `NORM`, expected level and height, and how many steps were in line since."""

    what: int
    expected: float
    value: float
    step: int
    onset_ns: int
    said_ns: int
    in_line: int = 0


class JobState(msgspec.Struct):
    """One job's attempt. `open_steps` holds [2 × ranks] of steps that not all ranks reported; `history` is rows of (time, loss, norm)."""

    job: str
    attempt: int = -1
    world: int = 0
    heard_ns: int = 0
    seen: int = 0
    closed_to: int = -1
    open_steps: dict[int, Array] = {}
    starts_ns: dict[int, int] = {}
    heard_at_ns: dict[int, int] = {}
    history: Array = msgspec.field(default_factory=lambda: nan_array(0, 2))
    recent: Array = msgspec.field(default_factory=lambda: nan_array(0, 2))
    recent_ns: list[int] = []
    opinion: Opinion | None = None


class State(msgspec.Struct):
    """State of the detector."""

    jobs: dict[str, JobState] = {}


class LossSpikeDetector(Detector):
    """Says `loss_spike` of a job."""

    name = "loss_spike"
    kinds = ("loss_spike",)
    false_alarms_per_node_day: ClassVar[float] = 0.005
    Settings = LossSpikeSettings
    settings: LossSpikeSettings

    def __init__(self, settings: LossSpikeSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for name, table in tables_of(frame).items():
            _take_in(self._state.jobs.setdefault(name, JobState(name)), table, frame.now_ns)
        for job in self._state.jobs.values():
            for step in _due(job, frame.now_ns):
                verdicts += self._step(job, step)
        forget_silent(self._state.jobs, frame.now_ns, lambda job: job.heard_ns)
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """A loss of about 2 that is above 3 on all ranks from second 40 on."""

        def change(second: int, rank: int, row: StepRow) -> StepRow:
            noise = 0.02 * math.sin(7.1 * row.step + 0.3 * rank)
            return structs.replace(row, loss=(3.2 if second >= 40 else 2.0) + noise, grad_norm=0.4 + noise)

        frames = changed_rows(SyntheticCluster(seed=1).frames(60), change)
        return Example(frames, "loss_spike", Entity(EntityKind.JOB, JOB))

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Jobs whose loss is judged: their attempt is old enough."""
        jobs, least = self._state.jobs.values(), self.settings.window_steps // 2
        judged = sum(job.seen > self.settings.warm_steps and len(job.history) >= least for job in jobs)
        return {"jobs": (judged, len(jobs))}

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _step(self, job: JobState, step: int) -> list[Verdict]:
        values, at_ns = job.open_steps.pop(step), job.starts_ns.pop(step)
        del job.heard_at_ns[step]
        job.closed_to = max(job.closed_to, step)
        if not np.isfinite(values).any():
            return []
        job.seen += 1
        keep = 1 - self.settings.block_steps
        job.recent = np.concatenate([job.recent[keep:], median_of_known(values.T)[None, :]])
        job.recent_ns = [*job.recent_ns[keep:], at_ns]
        oldest = job.recent[:1] if len(job.recent) >= self.settings.block_steps else None
        verdicts = self._judge(job, step, at_ns) if job.seen > self.settings.warm_steps else []
        if oldest is not None and job.opinion is None:
            job.history = np.concatenate([job.history[1 - self.settings.window_steps :], oldest])
        return verdicts

    def _judge(self, job: JobState, step: int, at_ns: int) -> list[Verdict]:
        if len(job.history) < self.settings.window_steps // 2 or len(job.recent) < self.settings.block_steps:
            return []
        found = self._jump(job)
        if job.opinion is not None:
            return self._follow(job, found, at_ns)
        if found is None:
            return []
        what, expected, value = found
        job.opinion = Opinion(what, expected, value, step, job.recent_ns[0], at_ns)
        return [self._say(job, job.opinion, at_ns)]

    def _jump(self, job: JobState) -> tuple[int, float, float] | None:
        """(what, expected, value) of the measure that is out of line now."""
        settings = self.settings
        middle = median_of_known(job.recent)
        expected, spread = _foretold(job.history[:, LOSS], settings.block_steps)
        rise = middle[LOSS] - expected
        if rise > settings.loss_deviations * spread and rise > settings.loss_rise * abs(expected):
            return LOSS, expected, float(middle[LOSS])
        with np.errstate(divide="ignore", invalid="ignore"):
            logs, now = np.log(job.history[:, NORM]), math.log(middle[NORM]) if middle[NORM] > 0 else math.nan
        level, width = _middle(logs)
        if now - level > max(settings.norm_deviations * width, math.log(settings.norm_ratio)):
            return NORM, math.exp(level), float(middle[NORM])
        return None

    def _follow(self, job: JobState, found: tuple[int, float, float] | None, at_ns: int) -> list[Verdict]:
        """History stands still while a jump lasts, so it ends when the job is back, or when a new level is kept for long."""
        opinion = job.opinion
        assert opinion is not None  # the caller looked
        opinion.in_line = 0 if found else opinion.in_line + 1
        if opinion.in_line >= self.settings.clear_steps:
            job.opinion = None
            return [self._say(job, opinion, at_ns, clears=True)]
        if at_ns - opinion.onset_ns > 20 * self.settings.restate_s * NS_PER_S:
            job.opinion, job.history = None, nan_array(0, 2)
            return [self._say(job, opinion, at_ns, clears=True)]
        if not found or at_ns - opinion.said_ns < self.settings.restate_s * NS_PER_S:
            return []
        opinion.said_ns = at_ns
        return [self._say(job, opinion, at_ns)]

    def _say(self, job: JobState, opinion: Opinion, at_ns: int, clears: bool = False) -> Verdict:
        name = _NAMES[opinion.what]
        height = f"from {opinion.expected:.4g} to {opinion.value:.4g} at step {opinion.step}"
        text = f"{name} of job {job.job} jumped {height}, on all replicas alike"
        if clears:
            text = f"{name} of job {job.job} is in line again"
        series = np.concatenate([job.history[-20:, opinion.what], job.recent[:, opinion.what]])
        series = series[np.isfinite(series)]
        note = "middle of the ranks, the last steps before and after the jump, one point per step"
        evidence = series_evidence(name, "1", [at_ns] * len(series), series.tolist(), high=opinion.expected, note=note)
        return self.verdict(
            kind="loss_spike", entity=Entity(EntityKind.JOB, job.job), window=(min(opinion.onset_ns, at_ns), at_ns),
            onset_at_ns=opinion.onset_ns, job=job.job, attempt=job.attempt, score=opinion.value / max(abs(opinion.expected), 1e-9),
            value=opinion.value, high=opinion.expected, confidence=0.85, text=text, clears=clears, evidence=(evidence,),
        )  # fmt: skip


def _take_in(job: JobState, table: StepTable, now_ns: int) -> None:
    attempt = table.attempts[-1]
    if attempt > job.attempt:
        heard = job.heard_ns
        fresh = JobState(job.job, attempt, table.of_attempt(attempt).world, heard)
        for field in structs.fields(fresh):
            setattr(job, field.name, getattr(fresh, field.name))
    mine = table.of_attempt(job.attempt)
    if not mine.reports:
        return
    job.heard_ns, job.world = now_ns, max(job.world, mine.world)
    stride = max(1, job.world // _RANKS_READ)
    mine = mine.every(stride)
    plain = np.isin(mine.phase, (PHASES[""], PHASES["train"], PHASES["checkpoint"]))
    wanted = plain & (mine.step > job.closed_to) & (mine.rank >= 0)
    columns = np.stack([mine.number("loss"), mine.number("grad_norm")])
    for step, rows in rows_by_step(mine.step, wanted):
        places = mine.rank[rows] // stride
        values = job.open_steps.get(step)
        if values is None or values.shape[1] <= places.max():
            grown = nan_array(2, max((job.world - 1) // stride, int(places.max())) + 1)
            if values is not None:
                grown[:, : values.shape[1]] = values
            values = job.open_steps[step] = grown
        values[:, places] = columns[:, rows]
        job.starts_ns.setdefault(step, int(mine.whole("started_at_ns")[rows[0]]))
        job.heard_at_ns.setdefault(step, now_ns)


def _due(job: JobState, now_ns: int) -> list[int]:
    """Steps to judge, in order: everybody spoke, or it is late."""
    due = []
    for step in sorted(job.open_steps):
        whole = np.isfinite(job.open_steps[step]).any(axis=0).all()
        late = now_ns - job.heard_at_ns[step] > _LATENESS_NS or len(job.open_steps) > _MAX_PENDING
        if not whole and not late:
            break
        due.append(step)
    return due


def _foretold(values: Array, ahead: int) -> tuple[float, float]:
    """Where the course of the last steps leads, and the robust deviation of the middle of `ahead` steps around it.

    The line goes through the middles of the two halves of the window: few outliers cannot turn it.
    """
    known = values[np.isfinite(values)]
    if len(known) < 16:
        return math.nan, math.nan
    half = len(known) // 2
    first, second = float(np.median(known[:half])), float(np.median(known[half:]))
    slope = min((second - first) / half, 0.0)
    line = second + slope * (np.arange(len(known)) - 1.5 * half)
    _, spread = _middle(known - line)
    return float(line[-1] + slope * ahead), max(spread, 1e-3 * abs(second))


def _middle(values: Array) -> tuple[float, float]:
    """Median and robust deviation; NaN when too few are known."""
    known = values[np.isfinite(values)]
    if len(known) < 16:
        return math.nan, math.nan
    middle = float(np.median(known))
    return middle, SCALE_OF_MAD * float(np.median(np.abs(known - middle)))
