"""Saves that hold the job up longer than they used to: shared storage that is slow or full, or one node's way to it.

A save is known by `StepRow.checkpoint_ms`. The job waits for its slowest rank, so that one counts; the others say whether it is alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
from msgspec import structs

from detectors.base import Detector, Frame, series_evidence
from detectors.state import Array, decode_state, encode_state, nan_array
from detectors.steps.assembly import rows_by_step
from detectors.steps.blocks import SCALE_OF_MAD
from detectors.steps.examples import changed_rows
from detectors.steps.silence import forget_silent
from detectors.steps.table import StepTable, tables_of
from detectors.synthetic import JOB, Example, SyntheticCluster
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import Entity, EntityKind, StepRow, Verdict
from trainwarden.settings import option

_KEPT_SAVES = 24
_MAX_PENDING = 256
_USUAL_STEP_GAIN = 0.05


@dataclass(frozen=True)
class CheckpointStallSettings:
    """Settings of `checkpoint_stall`."""

    least_saves: int = option(3, "saves to learn from before one can be called slow")
    ratio: float = option(3.0, "a save is slow when it takes so many times the usual time")
    deviations: float = option(6.0, "and is so many robust deviations above it, in its logarithm")
    least_s: float = option(1.0, "and holds the job up for so much longer than usual")
    least_steps: float = option(2.0, "or for so many usual steps, the larger of the two")
    extreme_ratio: float = option(
        10.0, "one save is a hiccup and two in a row are not, unless it took so many times its time"
    )
    alone_share: float = option(
        0.3, "a rank is alone when the others' middle rose by less than this share of its own rise"
    )
    wait_s: float = option(5.0, "how long to wait for ranks that did not report a save")
    clear_saves: int = option(2, "so many usual saves in a row take the opinion back")


class Opinion(msgspec.Struct):
    """What was said; `node` is empty when all ranks are slow alike."""

    node: str
    rank: int
    onset_ns: int
    usual: int = 0


class JobState(msgspec.Struct):
    """One job. `open_saves` holds each rank's milliseconds by step, `usual_ms` and `ended_ns` the last usual saves and all saves."""

    job: str
    attempt: int = -1
    world: int = 0
    nodes: list[str] = []
    heard_ns: int = 0
    step_ms: float = 0.0
    open_saves: dict[int, Array] = {}
    heard_at_ns: dict[int, int] = {}
    ends_ns: dict[int, int] = {}
    closed_to: int = -1
    usual_ms: list[float] = []
    saves_ms: list[float] = []
    saves_ns: list[int] = []
    slow_run: int = 0
    opinion: Opinion | None = None


class State(msgspec.Struct):
    """State of the detector."""

    jobs: dict[str, JobState] = {}


class CheckpointStallDetector(Detector):
    """Says `checkpoint_stall` of a job, or of the node whose save alone is slow."""

    name = "checkpoint_stall"
    kinds = ("checkpoint_stall",)
    false_alarms_per_node_day: ClassVar[float] = 0.005
    Settings = CheckpointStallSettings
    settings: CheckpointStallSettings

    def __init__(self, settings: CheckpointStallSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for name, table in tables_of(frame).items():
            _take_in(self._state.jobs.setdefault(name, JobState(name)), table, frame.now_ns)
        for job in self._state.jobs.values():
            for step in self._due(job, frame.now_ns):
                verdicts += self._save(job, step)
        forget_silent(self._state.jobs, frame.now_ns, lambda job: job.heard_ns)
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """Saves of 40 ms that take two seconds on all ranks from second 40 on."""

        def change(second: int, rank: int, row: StepRow) -> StepRow:
            if not (second >= 40 and row.checkpoint_ms > 0):
                return row
            return structs.replace(row, checkpoint_ms=2000.0 + rank, duration_ms=row.duration_ms + 2000.0)

        frames = changed_rows(SyntheticCluster(seed=1, save_every=60).frames(60), change)
        return Example(frames, "checkpoint_stall", Entity(EntityKind.JOB, JOB))

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Jobs whose usual save is known, of those that ever saved."""
        saving = [job for job in self._state.jobs.values() if job.saves_ms]
        return {"jobs": (sum(len(job.usual_ms) >= self.settings.least_saves for job in saving), len(saving))}

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _due(self, job: JobState, now_ns: int) -> list[int]:
        due = []
        for step in sorted(job.open_saves):
            late = (
                now_ns - job.heard_at_ns[step] > self.settings.wait_s * NS_PER_S or len(job.open_saves) > _MAX_PENDING
            )
            if not late and not np.isfinite(job.open_saves[step]).all():
                break
            due.append(step)
        return due

    def _save(self, job: JobState, step: int) -> list[Verdict]:
        times, end_ns = job.open_saves.pop(step), job.ends_ns.pop(step)
        del job.heard_at_ns[step]
        job.closed_to = max(job.closed_to, step)
        rank = int(np.nanargmax(times))
        longest = float(times[rank])
        job.saves_ms, job.saves_ns = (
            [*job.saves_ms[1 - _KEPT_SAVES :], longest],
            [*job.saves_ns[1 - _KEPT_SAVES :], end_ns],
        )
        if not self._is_slow(job, longest):
            job.slow_run = 0
            job.usual_ms = [*job.usual_ms[1 - _KEPT_SAVES :], longest]
            return self._usual(job, end_ns)
        job.slow_run += 1
        usual_ms = float(np.median(job.usual_ms))
        if job.slow_run < 2 and longest < self.settings.extreme_ratio * usual_ms:
            return []
        return self._slow(job, times, rank, end_ns)

    def _is_slow(self, job: JobState, longest_ms: float) -> bool:
        if len(job.usual_ms) < self.settings.least_saves:
            return False
        logs = np.log(np.maximum(job.usual_ms, 1e-3))
        middle = float(np.median(logs))
        spread = max(SCALE_OF_MAD * float(np.median(np.abs(logs - middle))), 0.05)
        excess_ms = longest_ms - math.exp(middle)
        floor_ms = max(self.settings.least_s * 1000.0, self.settings.least_steps * job.step_ms)
        rise = math.log(max(longest_ms, 1e-3)) - middle
        return excess_ms > floor_ms and rise > max(math.log(self.settings.ratio), self.settings.deviations * spread)

    def _slow(self, job: JobState, times: Array, rank: int, end_ns: int) -> list[Verdict]:
        usual_ms, longest = float(np.median(job.usual_ms)), float(times[rank])
        others = np.delete(times, rank)
        others = others[np.isfinite(others)]
        rise = longest - usual_ms
        alone = len(others) >= 2 and float(np.median(others)) - usual_ms < self.settings.alone_share * rise
        node = job.nodes[rank] if alone and float(np.max(others)) - usual_ms < 0.5 * rise else ""
        known = job.opinion
        onset_ns = known.onset_ns if known else end_ns - int(longest * NS_PER_MS)
        job.opinion = Opinion(node, rank if node else -1, onset_ns)
        who = f"of rank {rank} on {node} alone" if node else f"of job {job.job}"
        text = f"a save {who} took {longest / 1000:.1f} s (usual {usual_ms / 1000:.2f} s) and held the job up"
        return [self._say(job, job.opinion, end_ns, text)]

    def _usual(self, job: JobState, end_ns: int) -> list[Verdict]:
        if job.opinion is None:
            return []
        job.opinion.usual += 1
        if job.opinion.usual < self.settings.clear_saves:
            return []
        opinion, job.opinion = job.opinion, None
        return [self._say(job, opinion, end_ns, f"saves of job {job.job} take their usual time again", clears=True)]

    def _say(self, job: JobState, opinion: Opinion, at_ns: int, text: str, clears: bool = False) -> Verdict:
        node = opinion.node
        entity = Entity(EntityKind.NODE, node, node) if node else Entity(EntityKind.JOB, job.job)
        usual_ms = float(np.median(job.usual_ms))
        evidence = series_evidence(
            "longest save of a rank", "ms", job.saves_ns, job.saves_ms, high=self.settings.ratio * usual_ms
        )
        return self.verdict(
            kind="checkpoint_stall", entity=entity, window=(min(opinion.onset_ns, at_ns), at_ns), onset_at_ns=opinion.onset_ns,
            job=job.job, attempt=job.attempt, rank=opinion.rank, score=job.saves_ms[-1] / max(usual_ms, 1e-3), value=job.saves_ms[-1],
            high=self.settings.ratio * usual_ms, confidence=0.85, text=text, clears=clears, evidence=(evidence,),
        )  # fmt: skip


def _take_in(job: JobState, table: StepTable, now_ns: int) -> None:
    attempt = table.attempts[-1]
    if attempt > job.attempt:
        job.attempt, job.world, job.closed_to = attempt, table.of_attempt(attempt).world, -1
        job.nodes = [""] * job.world
        job.open_saves, job.heard_at_ns, job.ends_ns, job.opinion, job.slow_run = {}, {}, {}, None, 0
    mine = table.of_attempt(job.attempt, job.world)
    if not mine.reports:
        return
    job.heard_ns = now_ns
    saving = mine.number("checkpoint_ms") > 0
    fits = saving & (mine.step > job.closed_to) & (mine.rank >= 0) & (mine.rank < job.world)
    _follow_step_time(job, mine, saving)
    if not fits.any():
        return
    job.nodes = mine.nodes_by_rank(job.nodes)
    ends_ns = mine.whole("started_at_ns") + (np.nan_to_num(mine.number("duration_ms")) * NS_PER_MS).astype(np.int64)
    for step, rows in rows_by_step(mine.step, fits):
        times = job.open_saves.setdefault(step, nan_array(job.world))
        times[mine.rank[rows]] = mine.number("checkpoint_ms")[rows]
        job.heard_at_ns.setdefault(step, now_ns)
        job.ends_ns[step] = max(int(np.median(ends_ns[rows])), job.ends_ns.get(step, 0))


def _follow_step_time(job: JobState, table: StepTable, saving: Array) -> None:
    plain = table.number("duration_ms")[~saving]
    plain = plain[np.isfinite(plain)]
    if plain.size:
        middle = float(np.median(plain))
        job.step_ms += (middle - job.step_ms) * (_USUAL_STEP_GAIN if job.step_ms else 1.0)
