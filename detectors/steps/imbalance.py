"""Work that is divided unequally: a stage that has more of it than the others, or batches whose cost goes from rank to rank.

Both make ranks wait for ranks, and no node is bad: most slow jobs are of this kind. A stage is told from a node by its members, who are
slow alike; work is told from noise by an independent witness: the other stages that the same batch went through, or the number of samples
or tokens. Without a witness nothing is said: a slow rank that changes from step to step is also what a noisy machine looks like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from detectors.base import Detector, Frame, series_evidence
from detectors.robust import median_of_known
from detectors.state import Array, decode_state, encode_state, nan_array
from detectors.steps.assembly import DURATION, LOCAL, WORK, Assembly, JointStep
from detectors.steps.examples import parallel_frames
from detectors.steps.peers import is_pipelined
from detectors.steps.silence import forget_silent
from detectors.steps.table import tables_of
from detectors.synthetic import JOB, Example
from trainwarden.clock import NS_PER_S
from trainwarden.parallel import ParallelLayout
from trainwarden.records import Entity, EntityKind, Evidence, Verdict
from trainwarden.settings import option
from trainwarden.topology import JobLayout

_LARGE = 1000
"""Ranks above which a job is looked at once a window: nothing is lost by waiting but the time of this core."""
STAGE_TIMES = "local time of a step by pipeline stage"
"""Evidence whose values are the stages in order; the planner names it in a plan's reason, as what to move."""


@dataclass(frozen=True)
class ImbalanceSettings:
    """Settings of `imbalance`."""

    sample_s: float = option(1.0, "at most one step in so long is looked at")
    window_steps: int = option(12, "so many of them make an opinion")
    review_steps: int = option(4, "which is formed anew after so many more")
    skip_steps: int = option(5, "of the first steps of an attempt, so many say nothing")
    stage_ratio: float = option(
        1.15, "a stage has too much work when its local time is so many times that of the others"
    )
    least_share: float = option(0.05, "and the ranks lose so much of a step by it")
    steady_share: float = option(0.8, "in this share of the steps looked at")
    batch_share: float = option(
        0.06, "batches are unequal when the slowest rank, another each time, costs so much of a step"
    )
    witness: float = option(0.6, "and its excess correlates so well with that of the other stages, or with its work")
    most_often: float = option(0.4, "no rank may be the slowest in more than this share of the steps")
    clear_reviews: int = option(4, "so many reviews without a finding take the opinion back")
    restate_s: float = option(10.0, "while it lasts, it is said again after so long")


class Finding(msgspec.Struct):
    """What a window says: how much of a step is lost, and to what. `cause` is "stage" or "batches"; `stage_ms` by stage, if it is one."""

    cause: str
    share: float
    value: float
    text: str
    stage_ms: tuple[float, ...] = ()


class Opinion(msgspec.Struct):
    """Something said and not yet taken back."""

    onset_ns: int
    said_ns: int
    missed: int = 0


class JobState(msgspec.Struct):
    """One job's window; `local` and `work` are steps × ranks, `duration_ms` and `at_ns` per step."""

    assembly: Assembly
    to_skip: int = 0
    last_ns: int = 0
    fresh: int = 0
    local: list[Array] = []
    work: list[Array] = []
    duration_ms: list[float] = []
    at_ns: list[int] = []
    lost: list[float] = []
    lost_ns: list[int] = []
    opinion: Opinion | None = None


class State(msgspec.Struct):
    """State of the detector."""

    jobs: dict[str, JobState] = {}


class ImbalanceDetector(Detector):
    """Says `imbalance` of a job, never of a node."""

    name = "imbalance"
    kinds = ("imbalance",)
    false_alarms_per_node_day: ClassVar[float] = 0.005
    Settings = ImbalanceSettings
    settings: ImbalanceSettings

    def __init__(self, settings: ImbalanceSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()

    def update(self, frame: Frame) -> list[Verdict]:
        for job, table in tables_of(frame).items():
            state = self._state.jobs.setdefault(job, JobState(Assembly(job)))
            if state.assembly.take(table, frame.now_ns, is_pipelined(frame.topology.job(job))):
                _begin(state, self.settings.skip_steps)
        verdicts: list[Verdict] = []
        for job, state in self._state.jobs.items():
            for step in state.assembly.close(frame.now_ns):
                verdicts += self._step(state, step, frame.topology.job(job))
        forget_silent(self._state.jobs, frame.now_ns, lambda state: state.assembly.last_heard_ns)
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """Eight ranks in two stages; the second has half as much work again."""
        slower = {rank: 35.0 for rank in range(4, 8)}
        return Example(parallel_frames(60, {"dp": "4", "pp": "2"}, slower), "imbalance", Entity(EntityKind.JOB, JOB))

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Jobs of which enough steps were looked at."""
        jobs = self._state.jobs.values()
        return {"jobs": (sum(len(job.local) >= self.settings.window_steps for job in jobs), len(jobs))}

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _step(self, state: JobState, step: JointStep, layout: JobLayout | None) -> list[Verdict]:
        if not step.usual or state.assembly.world < 2 or not np.isfinite(step.values[LOCAL]).any():
            return []
        if state.to_skip:
            state.to_skip -= 1
            return []
        if step.started_at_ns - state.last_ns < self.settings.sample_s * NS_PER_S:
            return []
        self._keep(state, step)
        pause = self.settings.window_steps if state.assembly.world > _LARGE else self.settings.review_steps
        if len(state.local) < self.settings.window_steps or state.fresh < pause:
            return []
        state.fresh = 0
        fits = layout is not None and layout.attempt == state.assembly.attempt
        parallel = layout.parallel if layout is not None and fits else None
        known = parallel if parallel is not None and len(parallel.places) == state.assembly.world else None
        return self._judge(state, self._finding(state, known))

    def _keep(self, state: JobState, step: JointStep) -> None:
        cut = 1 - self.settings.window_steps
        state.last_ns, state.fresh = step.started_at_ns, state.fresh + 1
        state.local = [*state.local[cut:], step.values[LOCAL].astype(np.float32)]
        state.work = [*state.work[cut:], step.values[WORK].astype(np.float32)]
        durations = step.values[DURATION]
        state.duration_ms = [*state.duration_ms[cut:], float(np.median(durations[np.isfinite(durations)]))]
        state.at_ns = [*state.at_ns[cut:], step.started_at_ns]

    def _finding(self, state: JobState, parallel: ParallelLayout | None) -> Finding | None:
        local, step_ms = np.stack(state.local).astype(np.float64), np.array(state.duration_ms)
        stage = self._slow_stage(local, step_ms, parallel, state.assembly.nodes) if parallel else None
        batches = self._unequal_batches(local, np.stack(state.work).astype(np.float64), step_ms, parallel)
        if stage and batches:
            return Finding("stage", stage.share, stage.value, f"{stage.text}; besides, {batches.text}", stage.stage_ms)
        return stage or batches

    # --- a stage -------------------------------------------------------------------------------------------------------------

    def _slow_stage(self, local: Array, step_ms: Array, parallel: ParallelLayout, nodes: list[str]) -> Finding | None:
        numbers = np.array(parallel.groups("pp"))
        if numbers.max() < 1:
            return None
        of_stage = np.stack([_row_medians(local[:, numbers == n]) for n in range(numbers.max() + 1)], axis=1)
        slow = int(np.nanargmax(median_of_known(of_stage)))
        others = np.delete(of_stage, slow, axis=1)
        ratio = of_stage[:, slow] / _row_medians(others)
        lost = (of_stage[:, slow] - np.nanmean(others, axis=1)) / step_ms
        steady = np.mean((ratio >= self.settings.stage_ratio) & (lost >= self.settings.least_share))
        middle = float(np.median(ratio))
        if steady < self.settings.steady_share or not _alike(local, np.flatnonzero(numbers == slow), middle, nodes):
            return None
        stage = parallel.coordinate(int(np.flatnonzero(numbers == slow)[0]), "pp")
        text = f"the ranks of pipeline stage {stage} all need {middle:.2f} times as long as those of the other stages"
        return Finding(
            "stage", float(np.median(lost)), middle, text, _by_stage(median_of_known(of_stage), numbers, parallel)
        )

    # --- batches -------------------------------------------------------------------------------------------------------------

    def _unequal_batches(
        self, local: Array, work: Array, step_ms: Array, parallel: ParallelLayout | None
    ) -> Finding | None:
        peers = np.array(parallel.peer_groups()) if parallel else np.zeros(local.shape[1], dtype=np.int64)
        apart = _apart_from_peers(local - median_of_known(local), peers)
        known = np.isfinite(apart).any(axis=1)
        if known.mean() < self.settings.steady_share:
            return None
        slowest = np.nanargmax(apart[known], axis=1)
        share = float(np.median(np.nanmax(apart[known], axis=1) / step_ms[known]))
        often = np.bincount(slowest).max() / len(slowest)
        if share < self.settings.batch_share or often > self.settings.most_often:
            return None
        stages, by_work = _agreement_of_stages(apart, parallel), _correlation(apart, _apart_from_peers(work, peers))
        if max(stages, by_work) < self.settings.witness:
            return None
        witness = "the other stages of the same replica" if stages >= by_work else "its samples"
        text = (f"the slowest rank is another in each step and costs {share:.0%} of it, in agreement with {witness} "
                f"(correlation {max(stages, by_work):.2f}): batches cost unequally much")  # fmt: skip
        return Finding("batches", share, share, text)

    # --- saying it -----------------------------------------------------------------------------------------------------------

    def _judge(self, state: JobState, finding: Finding | None) -> list[Verdict]:
        now_ns, known = state.at_ns[-1], state.opinion
        state.lost = [*state.lost[-23:], finding.share if finding else 0.0]
        state.lost_ns = [*state.lost_ns[-23:], now_ns]
        if finding is None:
            return self._miss(state)
        if known is not None and now_ns - known.said_ns < self.settings.restate_s * NS_PER_S:
            known.missed = 0
            return []
        state.opinion = Opinion(known.onset_ns if known else state.at_ns[0], now_ns)
        return [
            self._say(state, state.opinion, finding.text + ": no node is bad, the work should be divided anew", finding)
        ]

    def _miss(self, state: JobState) -> list[Verdict]:
        known = state.opinion
        if known is None:
            return []
        known.missed += 1
        if known.missed < self.settings.clear_reviews:
            return []
        state.opinion = None
        return [self._say(state, known, f"the work of job {state.assembly.job} is divided equally again", None)]

    def _say(self, state: JobState, opinion: Opinion, text: str, finding: Finding | None) -> Verdict:
        at_ns, assembly = state.at_ns[-1], state.assembly
        evidence = series_evidence(
            "share of a step lost to imbalance", "1", state.lost_ns, state.lost, high=self.settings.least_share
        )
        stages = finding.stage_ms if finding else ()
        by_stage = Evidence(STAGE_TIMES, "ms", (at_ns,) * len(stages), stages, note=f"stages 0 to {len(stages) - 1}")
        return self.verdict(
            kind="imbalance", entity=Entity(EntityKind.JOB, assembly.job), window=(state.at_ns[0], at_ns), onset_at_ns=opinion.onset_ns,
            job=assembly.job, attempt=assembly.attempt, score=finding.share if finding else 0.0, value=finding.value if finding else 0.0,
            confidence=0.85, text=text, clears=finding is None,
            evidence=(evidence, by_stage) if stages else (evidence,),
        )  # fmt: skip


def _by_stage(usual_ms: Array, numbers: Array, parallel: ParallelLayout) -> tuple[float, ...]:
    """In the order of the stages; the groups are numbered as they appear among the ranks."""
    place = {parallel.coordinate(int(np.flatnonzero(numbers == n)[0]), "pp"): n for n in range(len(usual_ms))}
    return tuple(round(float(usual_ms[place[stage]]), 3) for stage in sorted(place))


def _begin(state: JobState, to_skip: int) -> None:
    state.to_skip, state.last_ns, state.fresh, state.opinion = to_skip, 0, 0, None
    state.local, state.work, state.duration_ms, state.at_ns, state.lost, state.lost_ns = [], [], [], [], [], []


def _row_medians(values: Array) -> Array:
    return median_of_known(values.T)


def _alike(local: Array, members: Array, ratio: float, nodes: list[str]) -> bool:
    """Whether the members of a stage are slow together: on several nodes, and closer to each other than the stage is to the others."""
    if len({nodes[rank] for rank in members.tolist()}) < 2:
        return False
    usual = median_of_known(local[:, members])
    usual = usual[np.isfinite(usual)]
    if usual.size < 2:
        return False
    low, middle, high = np.quantile(usual, [0.1, 0.5, 0.9])
    return bool(high - low <= 0.5 * (ratio - 1.0) * middle)


def _apart_from_peers(values: Array, peers: Array) -> Array:
    """Distance of each value to the median of its peers in the same step."""
    result = nan_array(*values.shape)
    for number in range(int(peers.max()) + 1):
        members = np.flatnonzero(peers == number)
        if len(members) > 1:
            result[:, members] = values[:, members] - _row_medians(values[:, members])[:, None]
    return result


def _agreement_of_stages(apart: Array, parallel: ParallelLayout | None) -> float:
    """Correlation of what the ranks of one replica need beyond their peers, between neighbouring stages; 0 when there is one stage."""
    if parallel is None:
        return 0.0
    stages, replicas = np.array(parallel.groups("pp")), np.array(parallel.groups("dp", "tp", "cp", "ep", "role"))
    table = nan_array(len(apart), int(stages.max()) + 1, int(replicas.max()) + 1)
    table[:, stages, replicas] = apart
    return _correlation(table[:, :-1], table[:, 1:]) if table.shape[1] > 1 else 0.0


def _correlation(one: Array, other: Array) -> float:
    known = np.isfinite(one) & np.isfinite(other)
    if known.sum() < 8 or one[known].std() == 0 or other[known].std() == 0:
        return 0.0
    return float(np.corrcoef(one[known], other[known])[0, 1])
