"""Who computed wrong first: not-a-number before the reduction, parameters or gradients that differ from the replicas'.

After the all-reduce every rank holds the same not-a-number; only the loss and the gradient norm *before* it tell whose it was, and only in
the first bad step (an optimizer that does not skip it spreads it to all parameters). A flipped bit need not make a not-a-number: then the
replicas' checksums differ, or one rank's own gradients are of another size than its peers' step after step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from detectors.base import Detector, Frame, series_evidence
from detectors.state import Array, decode_state, encode_state, nan_array
from detectors.steps.assembly import MAX_VICTIMS, rows_by_step
from detectors.steps.gradients import GradientSizes
from detectors.steps.peers import Groups, peer_groups
from detectors.steps.silence import forget_silent
from detectors.steps.table import StepTable, tables_of
from detectors.steps.ties import OwnSizes
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, EntityKind, Verdict
from trainwarden.settings import option
from trainwarden.topology import JobLayout

UNKNOWN, CLEAN, BAD = -1, 0, 1
_MAX_STEPS = 2048


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
    norm_ratio: float = option(
        8.0, "the local gradient norm of a rank is odd when it is so many times its peers', or so small a part of it"
    )
    norm_deviations: float = option(8.0, "beyond what it used to be, by so many of its usual deviations")
    norm_steps: int = option(12, "in so many steps in a row")
    norm_warm_steps: int = option(100, "after so many to learn from")
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
    cells: dict[int, Array] = {}
    starts_ns: dict[int, int] = {}
    heard_at_ns: dict[int, int] = {}
    settled_to: int = -1
    bad_steps: list[int] = []
    first_cells: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    first_ns: int = 0
    clean_steps: int = 0
    sums: dict[int, Array] = {}
    norms: dict[int, Array] = {}
    sizes: GradientSizes = msgspec.field(default_factory=GradientSizes)
    agreed: int = 0
    differing: dict[int, int] = {}
    split: int = 0
    split_ranks: list[int] = []
    own_sizes: OwnSizes = msgspec.field(default_factory=OwnSizes)
    opinions: dict[str, Opinion] = {}

    def begin(self, attempt: int, world: int) -> None:
        """A newer attempt: all ranks start from the same parameters again."""
        fresh = JobState(self.job, attempt, world, [""] * world, self.heard_ns, self.says_loss, self.says_local)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(fresh, name))


class State(msgspec.Struct):
    """State of the detector."""

    jobs: dict[str, JobState] = {}


class CorruptionDetector(Detector):
    """Says `non_finite` or `silent_corruption`."""

    name = "corruption"
    kinds = ("non_finite", "silent_corruption")
    version: ClassVar[int] = 2
    false_alarms_per_node_day: ClassVar[float] = 0.005
    Settings = CorruptionSettings
    settings: CorruptionSettings

    def __init__(self, settings: CorruptionSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()
        self._groups: dict[str, tuple[JobLayout | None, list[str], Groups]] = {}

    def update(self, frame: Frame) -> list[Verdict]:
        for name, table in tables_of(frame).items():
            self._take_in(self._state.jobs.setdefault(name, JobState(name)), table, frame.now_ns)
        verdicts: list[Verdict] = []
        for name, job in self._state.jobs.items():
            verdicts += self._judge_finite(job, frame.topology.job(name), frame.now_ns)
            verdicts += self._judge_sums(job, frame.topology.job(name), frame.now_ns)
        forget_silent(self._state.jobs, frame.now_ns, lambda job: job.heard_ns)
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """Loss and local gradient of rank 1 are not finite from second 10 on."""
        frames = SyntheticCluster(seed=1).frames(20, lambda second: Scene(not_finite={1}) if second >= 10 else None)
        return Example(frames, "non_finite", node_entity(1))

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Jobs whose ranks' gradient norms are compared, of those that tell them; numbers and checksums are judged from the first step."""
        telling = [job for job in self._state.jobs.values() if job.says_local and job.world >= 3]
        return {"jobs": (sum(job.sizes.steps >= self.settings.norm_warm_steps for job in telling), len(telling))}

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    # --- what is said --------------------------------------------------------------------------------------------------------

    def _take_in(self, job: JobState, table: StepTable, now_ns: int) -> None:
        present = table.of_attempt(table.attempts[-1])
        newer = present.attempts[0] > job.attempt
        if newer or (present.attempts[0] == job.attempt and max(present.worlds) > 0 and present.world != job.world):
            job.begin(present.attempts[0], present.world)
        mine = table.of_attempt(job.attempt)
        if not mine.reports:
            return
        job.heard_ns = now_ns
        job.nodes = mine.nodes_by_rank(job.nodes)
        self._note_rows(job, mine, now_ns)

    def _note_rows(self, job: JobState, table: StepTable, now_ns: int) -> None:
        local = table.number("grad_norm_local")
        job.says_loss = job.says_loss or bool(np.isfinite(table.number("loss")).any())
        job.says_local |= bool(np.isfinite(local).any())
        bad = _is_bad_before_reduction(job, table)
        inside = (table.rank >= 0) & (table.rank < job.world)
        for step, rows in rows_by_step(table.step, inside & (table.step > job.settled_to)):
            ranks = table.rank[rows]
            cells = job.cells.setdefault(step, np.full(job.world, UNKNOWN, dtype=np.int8))
            cells[ranks] = np.where(bad[rows], BAD, CLEAN)
            job.norms.setdefault(step, nan_array(job.world))[ranks] = local[rows]
            job.starts_ns.setdefault(step, table.rows[rows[0]].started_at_ns)
            job.heard_at_ns.setdefault(step, now_ns)
        if not table.says("param_checksum"):
            return
        sums = table.number("param_checksum")
        for step, rows in rows_by_step(table.step, inside & np.isfinite(sums)):
            job.sums.setdefault(step, nan_array(job.world))[table.rank[rows]] = sums[rows]

    # --- not a number --------------------------------------------------------------------------------------------------------

    def _judge_finite(self, job: JobState, layout: JobLayout | None, now_ns: int) -> list[Verdict]:
        self._settle(job, layout, now_ns)
        verdicts = self._clear_finite(job, now_ns) + self._name_sizes(job, now_ns)
        if job.bad_steps and self._is_confirmed(job, now_ns):
            verdicts += self._name_first(job, now_ns)
        return verdicts

    def _settle(self, job: JobState, layout: JobLayout | None, now_ns: int) -> None:
        """Close steps in order: all ranks reported them, or they waited long enough."""
        for step in sorted(job.cells):
            waited = now_ns - job.heard_at_ns[step] > self.settings.wait_s * NS_PER_S or len(job.cells) > _MAX_STEPS
            if not waited and (job.cells[step] == UNKNOWN).any():
                return
            cells, start_ns = job.cells.pop(step), job.starts_ns.pop(step)
            self._compare_sizes(job, layout, job.norms.pop(step))
            del job.heard_at_ns[step]
            job.settled_to = step
            self._count(job, step, cells, start_ns)

    def _count(self, job: JobState, step: int, cells: Array, start_ns: int) -> None:
        if not (cells == BAD).any():
            job.clean_steps += 1
            if job.clean_steps >= self.settings.clear_steps:
                job.bad_steps, job.first_cells = [], np.zeros(0, dtype=np.int8)
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
        guilty = np.flatnonzero(job.first_cells == BAD).tolist()
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

    # --- gradients of another size -------------------------------------------------------------------------------------------

    def _compare_sizes(self, job: JobState, layout: JobLayout | None, norms: Array) -> None:
        if job.world < 3:
            job.own_sizes.take(norms)
        if job.world < 3 or not np.isfinite(norms).any():
            return
        settings, groups = self.settings, self._groups_of(job, layout)
        job.sizes.take(norms, groups, settings.norm_ratio, settings.norm_deviations, settings.norm_warm_steps)

    def _groups_of(self, job: JobState, layout: JobLayout | None) -> Groups:
        known = self._groups.get(job.job)
        if known is None or known[0] is not layout or known[1] is not job.nodes:
            mine = layout if layout is not None and layout.attempt == job.attempt else None
            known = self._groups[job.job] = (layout, job.nodes, peer_groups(mine, job.nodes)[0])
        return known[2]

    def _name_sizes(self, job: JobState, now_ns: int) -> list[Verdict]:
        verdicts = []
        for rank in job.sizes.odd_since(self.settings.norm_steps):
            if f"sum/{rank}" in job.opinions or "non_finite" in job.opinions:
                continue
            times = f"{math.exp(job.sizes.newest[rank]):.3g} times the size of its peers' for {int(job.sizes.run[rank])} steps"
            text = (
                f"local gradients of rank {rank} on {job.nodes[rank]} have been {times}, which they never were before"
            )
            opinion = Opinion("silent_corruption", job.nodes[rank], rank, job.settled_to, now_ns, now_ns, text)
            job.opinions[f"sum/{rank}"] = opinion
            verdicts.append(self._say(job, opinion, now_ns, 0.8))
        return verdicts

    # --- parameters that differ ------------------------------------------------------------------------------------------------

    def _judge_sums(self, job: JobState, layout: JobLayout | None, now_ns: int) -> list[Verdict]:
        newest = max(job.sums, default=-1)
        for step in sorted(job.sums):
            values = job.sums[step]
            if np.isnan(values).any():
                if newest - step > 64 or len(job.sums) > _MAX_STEPS:
                    del job.sums[step]
                continue
            del job.sums[step]
            self._compare(job, values, _replicas(job, layout))
        return self._name_differing(job, now_ns, newest)

    def _compare(self, job: JobState, values: Array, replicas: Groups) -> None:
        """Within each group of ranks that hold the same parameters, all but a minority must agree."""
        odd: list[int] = []
        for members in replicas:
            found, place, counts = np.unique(values[members], return_inverse=True, return_counts=True)
            common = int(np.argmax(counts))
            if len(found) > 1 and 2 * counts[common] <= len(members):
                self._note_split(job, members.tolist())
                return
            odd += members[place != common].tolist()
        if not odd:
            job.agreed += 1
            job.differing, job.split = {}, 0
        elif job.agreed >= self.settings.agreed_checks:
            job.differing = {rank: job.differing.get(rank, 0) + 1 for rank in odd}

    def _note_split(self, job: JobState, ranks: list[int]) -> None:
        """Two replicas that differ have no majority; more of them without one are no replicas, or beyond telling."""
        if len(ranks) == 2 and job.agreed >= self.settings.agreed_checks:
            job.split, job.split_ranks = job.split + 1, ranks

    def _name_split(self, job: JobState, now_ns: int, step: int) -> list[Verdict]:
        if job.split < self.settings.differing_checks or "split" in job.opinions:
            return []
        ranks = job.split_ranks
        both = " and ".join(f"rank {rank} on {job.nodes[rank]}" for rank in ranks)
        text = f"parameters of {both} differ, and two replicas cannot say which is wrong"
        leaning = job.own_sizes.leaning(ranks)
        if leaning is not None:
            text += f"; the local gradients of rank {leaning} have left their usual size, so it is the likelier"
        node = job.nodes[leaning] if leaning is not None else ""
        rank = leaning if leaning is not None else -1
        opinion = Opinion("silent_corruption", node, rank, step, now_ns, now_ns, text, ranks)
        job.opinions["split"] = opinion
        return [self._say(job, opinion, now_ns, 0.6 if node else 0.5)]

    def _name_differing(self, job: JobState, now_ns: int, step: int) -> list[Verdict]:
        verdicts = self._name_split(job, now_ns, step)
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
        cells = job.first_cells[:40].astype(np.float64).tolist() if opinion.kind == "non_finite" else []
        note = f"step {opinion.step}; one value per rank: 1 not finite before the reduction, 0 finite, -1 not reported"
        evidence = (series_evidence("first bad step", "1", [onset_ns] * len(cells), cells, note=note),) if cells else ()
        return self.verdict(
            kind=opinion.kind, entity=entity, window=(onset_ns, at_ns), onset_at_ns=onset_ns, job=job.job, attempt=job.attempt,
            rank=opinion.rank, score=float(max(len(job.bad_steps), 1)), value=float(opinion.step), confidence=confidence,
            text=opinion.text, clears=clears, evidence=evidence,
            victims=_victims(job, opinion),
        )  # fmt: skip


def _victims(job: JobState, opinion: Opinion) -> tuple[str, ...]:
    nodes = dict.fromkeys(node for node in job.nodes if node and node != opinion.node)
    return tuple(nodes)[:MAX_VICTIMS] if opinion.node else ()


def _replicas(job: JobState, layout: JobLayout | None) -> Groups:
    parallel = layout.parallel if layout is not None and layout.attempt == job.attempt else None
    if parallel is None or len(parallel.places) != job.world:
        return [np.arange(job.world)]
    numbers = np.array(parallel.replica_groups())
    return [np.flatnonzero(numbers == number) for number in range(int(numbers.max()) + 1)]


def _is_bad_before_reduction(job: JobState, table: StepTable) -> Array:
    """A row's NaN may also mean that the job never reports that number: only numbers it is known to report count."""
    bad = ~table.flag("finite")
    if not bad.any() or (not job.says_loss and not job.says_local):
        return bad
    loss = ~np.isfinite(table.number("loss")) if job.says_loss else np.zeros_like(bad)
    local = ~np.isfinite(table.number("grad_norm_local")) if job.says_local else np.zeros_like(bad)
    return np.asarray(bad & (loss | local))
