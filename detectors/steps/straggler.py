"""Who computes longer than its peers, so that they wait: the split of a step into local time and waiting.

In synchronous training every rank's *step* grows when one rank is slow; only the guilty one's local time grows, and its wait shrinks.
Both are compared with the other ranks in the same steps and with the rank's own usual place among them, over blocks of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from detectors.base import Detector, Frame, series_evidence
from detectors.state import Array, decode_state, encode_state, nan_array
from detectors.steps.assembly import DATA, Assembly, JointStep, excess_over_peers, reports_by_job
from detectors.steps.blocks import SCALE_OF_MAD, Block, Usual, fold, step_excess
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, EntityKind, Evidence, StepReport, Verdict
from trainwarden.settings import option

_KEPT_BLOCKS = 40
_FRESH_NS = 6 * NS_PER_S
_SPIKE_SHARE, _SPIKE_GAIN = 0.01, 0.15
"""A rank's spike level is what one step in a hundred exceeds, tracked with this gain (in usual steps)."""
_CALM_NS = 12 * NS_PER_S
_JOB_SILENCE_NS = 3600 * NS_PER_S


@dataclass(frozen=True)
class StragglerSettings:
    """Settings of `straggler`."""

    block_steps: int = option(4, "steps are judged in blocks: a block has at least so many")
    block_s: float = option(1.0, "and lasts at least so long")
    skip_steps: int = option(10, "plain steps ignored after the start of an attempt")
    warm_blocks: int = option(10, "blocks to learn from before anybody can be blamed")
    forgetting: float = option(0.03, "weight of a block in the usual place of each rank, once that is learnt")
    alarm_score: float = option(16.0, "height of the change-point sum (in scales, after allowance) that blames")
    allowance: float = option(1.25, "scales above its usual place that a rank may lie without adding to the sum")
    least_s: float = option(5.0, "a slow stretch shorter than this is a hiccup")
    least_blocks: int = option(4, "and so is one of fewer blocks")
    least_share: float = option(0.065, "share of the step of the job that the rank must cost before it matters")
    steady_share: float = option(
        0.7, "share of the blocks of the stretch that must show it: two bad ones around a calm are no slow rank"
    )
    stall_window_s: float = option(
        24.0, "window for stalls: single steps far beyond what the ranks of the job show now and then"
    )
    stall_share: float = option(0.8, "one rank must have this share of all stalls")
    stall_risk: float = option(1e-6, "and so many that chance spreads them like this with at most this probability")
    data_bursts: int = option(
        3, "stalls in loading data must come in so many bursts with calm between, or twice as many lone ones"
    )
    compute_bursts: int = option(5, "the same for stalls in computing: more, because a node may be taken away for them")
    job_slow_ratio: float = option(
        2.5, "the whole job is slow when steps take so many times their usual time and no rank is blamed"
    )
    job_slow_s: float = option(20.0, "for so long")
    clear_blocks: int = option(5, "calm for so many blocks (of block_s) takes the opinion back")
    restate_s: float = option(10.0, "while a fault lasts, it is said again after so long")


class Blame(msgspec.Struct):
    """An open opinion about one rank (or about the job, rank -1)."""

    kind: str
    node: str
    rank: int
    onset_ns: int
    excess_ms: float
    stalling: bool
    said_ns: int = 0
    calm_since_ns: int = 0


class Stall(msgspec.Struct):
    """One step in which one rank alone took far longer."""

    at_ns: int
    rank: int
    excess_ms: float
    data: bool


class JobState(msgspec.Struct):
    """What is known of one job."""

    assembly: Assembly
    usual: Usual
    keys: list[str] = []
    to_skip: int = 0
    gathered: list[JointStep] = []
    blocks: list[Block] = []
    score: Array = msgspec.field(default_factory=lambda: nan_array(0))
    run_start_ns: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    run_blocks: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    stalls: list[Stall] = []
    spike_ms: Array = msgspec.field(default_factory=lambda: nan_array(0))
    slow_since_ns: int = 0
    blames: dict[str, Blame] = {}


class State(msgspec.Struct):
    """State of the detector."""

    jobs: dict[str, JobState] = {}


class StragglerDetector(Detector):
    """Blames the rank with the longer local time and the shorter wait; says `compute_slow`, `data_slow` or `job_slow`."""

    name = "straggler"
    kinds = ("compute_slow", "data_slow", "job_slow")
    Settings = StragglerSettings
    settings: StragglerSettings

    def __init__(self, settings: StragglerSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for job, reports in reports_by_job(frame).items():
            state = self._state.jobs.setdefault(job, JobState(Assembly(job), Usual()))
            for report in reports:
                self._take_in(state, report, frame.now_ns)
        for state in self._state.jobs.values():
            for step in state.assembly.close(frame.now_ns):
                verdicts += self._step(state, step)
        self._forget_old_jobs(frame.now_ns)
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """Rank 2 computes 40 ms longer from second 40 on."""
        frames = SyntheticCluster(seed=1).frames(
            60, lambda second: Scene(compute_ms={2: 40.0}) if second >= 40 else None
        )
        return Example(frames, "compute_slow", node_entity(2))

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _forget_old_jobs(self, now_ns: int) -> None:
        for job in [
            name for name, state in self._state.jobs.items() if now_ns - state.assembly.last_heard_ns > _JOB_SILENCE_NS
        ]:
            del self._state.jobs[job]

    def _take_in(self, state: JobState, report: StepReport, now_ns: int) -> None:
        if state.assembly.starts_anew(report):
            state.assembly.restart(report)
            state.to_skip = self.settings.skip_steps
            state.gathered, state.blocks, state.stalls, state.blames, state.slow_since_ns = [], [], [], {}, 0
        state.assembly.add(report, now_ns)

    def _step(self, state: JobState, step: JointStep) -> list[Verdict]:
        if not step.usual or state.assembly.world < 2:
            state.to_skip = max(state.to_skip, 1)
            return []
        if state.to_skip:
            state.to_skip -= 1
            return []
        if not np.isfinite(step.values[0]).any():
            return []
        state.gathered.append(step)
        span_ns = step.started_at_ns - state.gathered[0].started_at_ns
        if len(state.gathered) < self.settings.block_steps or span_ns < self.settings.block_s * NS_PER_S:
            return []
        steps, state.gathered = state.gathered, []
        return self._block(state, steps)

    def _block(self, state: JobState, steps: list[JointStep]) -> list[Verdict]:
        self._settle_ranks(state)
        block = fold(steps)
        if not np.isfinite(block.step_ms):
            return []
        state.blocks = [*state.blocks[1 - _KEPT_BLOCKS :], block]
        if state.usual.blocks < self.settings.warm_blocks:
            state.usual.learn(block, np.zeros(len(state.keys), dtype=np.bool_), self.settings.forgetting)
            return []
        self._advance(state, block)
        self._count_stalls(state, steps)
        verdicts = self._blame_steady(state, block) + self._blame_stalls(state, block) + self._blame_job(state, block)
        verdicts += self._review(state, block)
        state.usual.learn(block, self._frozen(state), self.settings.forgetting)
        return verdicts

    def _settle_ranks(self, state: JobState) -> None:
        """Carry each rank's usual place over to the numbers of this attempt: places belong to nodes, not to rank numbers."""
        keys = _rank_keys(state.assembly.nodes)
        if keys == state.keys:
            return
        old = {key: number for number, key in enumerate(state.keys)}
        places = [old.get(key, -1) for key in keys]
        state.usual = state.usual.resized(places) if state.usual.blocks else Usual()
        spikes = np.append(state.spike_ms, np.median(state.spike_ms) if len(state.spike_ms) else 0.0)
        state.spike_ms = spikes[[place if place >= 0 else len(spikes) - 1 for place in places]]
        state.keys = keys
        self._reset_runs(state)

    def _reset_runs(self, state: JobState) -> None:
        count = len(state.keys)
        state.score = np.zeros(count)
        state.run_start_ns, state.run_blocks = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)

    def _advance(self, state: JobState, block: Block) -> None:
        scale = self._scale_now(state, block)
        z = np.nan_to_num(np.clip((block.excess - state.usual.excess) / scale, -4.0, 6.0) - self.settings.allowance)
        state.score = np.maximum(0.0, np.minimum(state.score + z, 2.0 * self.settings.alarm_score))
        running = state.score > 0
        state.run_start_ns = np.where(running & (state.run_blocks == 0), block.start_ns, state.run_start_ns)
        state.run_blocks = np.where(running, state.run_blocks + 1, 0)

    def _scale_now(self, state: JobState, block: Block) -> Array:
        """Own usual scale, or the spread that the *other* ranks show just now when the machine is restless."""
        recent = np.stack([kept.excess for kept in state.blocks[-6:]])
        own = state.usual.limit_scale(block.step_ms)
        if not np.isfinite(recent).all():
            return own
        spread = SCALE_OF_MAD * np.median(np.abs(recent - np.median(recent, axis=0)), axis=0)
        restless = spread - excess_over_peers(spread[None, :])[0]
        return np.asarray(np.maximum(own, restless))

    def _run(self, state: JobState, rank: int) -> list[Block]:
        return state.blocks[-min(int(state.run_blocks[rank]), len(state.blocks)) :]

    def _blame_steady(self, state: JobState, block: Block) -> list[Verdict]:
        guilty = [rank for rank in range(len(state.keys)) if self._is_guilty(state, block, rank)]
        if not guilty or 2 * len(guilty) > len(state.keys):
            return []
        verdicts = []
        for rank in guilty:
            run = self._run(state, rank)
            excess = _mean_over(run, "excess", rank) - float(state.usual.excess[rank])
            data_ms = _mean_over(run, "data_excess", rank)
            kind = "data_slow" if data_ms > 0.5 * excess else "compute_slow"
            blame = Blame(kind, state.assembly.nodes[rank], rank, int(state.run_start_ns[rank]), excess, False)
            verdicts += self._open(state, blame, block)
        return verdicts

    def _is_guilty(self, state: JobState, block: Block, rank: int) -> bool:
        settings, usual = self.settings, state.usual
        lasted_ns = block.end_ns - int(state.run_start_ns[rank])
        if state.score[rank] < settings.alarm_score or lasted_ns < settings.least_s * NS_PER_S:
            return False
        if state.run_blocks[rank] < settings.least_blocks:
            return False
        run = self._run(state, rank)
        excess = _mean_over(run, "excess", rank) - float(usual.excess[rank])
        local_rise = _mean_over(run, "local_ms", rank) - float(usual.local_ms[rank])
        wait_fall = float(usual.wait_excess[rank]) - _mean_over(run, "wait_excess", rank)
        step_ms = float(np.mean([kept.step_ms for kept in run]))
        above = [kept.excess[rank] - usual.excess[rank] > 0.3 * excess for kept in run]
        if np.mean(above) < settings.steady_share:
            return False
        return excess >= settings.least_share * step_ms and local_rise >= 0.35 * excess and wait_fall >= 0.35 * excess

    def _count_stalls(self, state: JobState, steps: list[JointStep]) -> None:
        """Only steps that every rank reported: a stall of a rank that nobody heard would make another's look singular."""
        steps = [step for step in steps if np.isfinite(step.values[0]).all()]
        if not steps:
            return
        excess = step_excess(steps) - state.usual.excess
        step_ms = state.usual.step_ms
        limit = np.maximum(
            8.0 * state.usual.limit_scale(step_ms), max(0.6 * step_ms, 1.5 * float(np.median(state.spike_ms)))
        )
        for row, rank in np.argwhere(np.nan_to_num(excess) > limit):
            local = float(excess[row, rank])
            data = float(np.nan_to_num(steps[row].values[DATA, rank])) > 0.5 * local
            state.stalls.append(Stall(steps[row].started_at_ns, int(rank), local, data))
        horizon_ns = steps[-1].started_at_ns - int(self.settings.stall_window_s * NS_PER_S)
        state.stalls = [stall for stall in state.stalls if stall.at_ns >= horizon_ns][-2048:]
        above = np.mean(excess > state.spike_ms, axis=0)
        state.spike_ms = np.maximum(0.0, state.spike_ms + _SPIKE_GAIN * step_ms * (above - _SPIKE_SHARE))

    def _blame_stalls(self, state: JobState, block: Block) -> list[Verdict]:
        counts = np.bincount([stall.rank for stall in state.stalls], minlength=len(state.keys))
        rank = int(np.argmax(counts))
        mine = [stall for stall in state.stalls if stall.rank == rank]
        if (
            not mine
            or block.end_ns - mine[-1].at_ns > _FRESH_NS
            or len(mine) < self.settings.stall_share * len(state.stalls)
        ):
            return []
        if len(counts) * chance_of(len(mine), len(state.stalls), 1.0 / len(counts)) > self.settings.stall_risk:
            return []
        kind = "data_slow" if sum(stall.data for stall in mine) > 0.5 * len(mine) else "compute_slow"
        bursts = _bursts(mine)
        needed = self.settings.data_bursts if kind == "data_slow" else self.settings.compute_bursts
        if sum(len(burst) > 1 for burst in bursts) < needed and len(bursts) < 2 * needed:
            return []
        excess = float(np.median([stall.excess_ms for stall in mine]))
        onset_ns = next((burst[0].at_ns for burst in bursts if len(burst) > 1), mine[0].at_ns)
        return self._open(state, Blame(kind, state.assembly.nodes[rank], rank, onset_ns, excess, True), block)

    def _blame_job(self, state: JobState, block: Block) -> list[Verdict]:
        if block.step_ms < self.settings.job_slow_ratio * state.usual.step_ms:
            state.slow_since_ns = 0
            return []
        state.slow_since_ns = state.slow_since_ns or block.start_ns
        if block.end_ns - state.slow_since_ns < self.settings.job_slow_s * NS_PER_S or any(
            b.rank >= 0 for b in state.blames.values()
        ):
            return []
        excess = block.step_ms - state.usual.step_ms
        return self._open(state, Blame("job_slow", "", -1, state.slow_since_ns, excess, False), block)

    def _open(self, state: JobState, blame: Blame, block: Block) -> list[Verdict]:
        known = state.blames.get(blame.node)
        if known is not None and (known.kind == blame.kind or not known.stalling):
            return []
        blame.said_ns = block.end_ns
        state.blames[blame.node] = blame
        return [self._say(state, blame, block)]

    def _review(self, state: JobState, block: Block) -> list[Verdict]:
        verdicts = []
        for key, blame in list(state.blames.items()):
            if self._calm(state, blame, block):
                blame.calm_since_ns = blame.calm_since_ns or block.start_ns
                if block.end_ns - blame.calm_since_ns >= self.settings.clear_blocks * self.settings.block_s * NS_PER_S:
                    del state.blames[key]
                    self._forget_run(state, blame)
                    verdicts.append(self._say(state, blame, block, clears=True))
            else:
                blame.calm_since_ns = 0
                if block.end_ns - blame.said_ns >= self.settings.restate_s * NS_PER_S and self._goes_on(
                    state, blame, block
                ):
                    blame.said_ns = block.end_ns
                    verdicts.append(self._say(state, blame, block))
        return verdicts

    def _calm(self, state: JobState, blame: Blame, block: Block) -> bool:
        if blame.rank < 0:
            return bool(block.step_ms < 0.6 * self.settings.job_slow_ratio * state.usual.step_ms)
        if blame.stalling:
            return sum(stall.rank == blame.rank and block.end_ns - stall.at_ns < _CALM_NS for stall in state.stalls) < 2
        return bool(block.excess[blame.rank] - state.usual.excess[blame.rank] < 0.35 * blame.excess_ms)

    def _goes_on(self, state: JobState, blame: Blame, block: Block) -> bool:
        """Whether this very block supports the opinion (a pause between bursts neither supports nor clears it)."""
        return not blame.stalling or any(
            stall.rank == blame.rank and block.end_ns - stall.at_ns < _FRESH_NS for stall in state.stalls
        )

    def _forget_run(self, state: JobState, blame: Blame) -> None:
        if blame.rank >= 0:
            state.score[blame.rank], state.run_blocks[blame.rank] = 0.0, 0
            state.stalls = [stall for stall in state.stalls if stall.rank != blame.rank]

    def _frozen(self, state: JobState) -> Array:
        """Ranks whose usual place must not be learnt now: blamed, or well on the way to it."""
        frozen = np.asarray(state.score > 0.5 * self.settings.alarm_score)
        for blame in state.blames.values():
            if blame.rank >= 0:
                frozen[blame.rank] = True
        return frozen

    def _say(self, state: JobState, blame: Blame, block: Block, clears: bool = False) -> Verdict:
        assembly = state.assembly
        entity = (
            Entity(EntityKind.NODE, blame.node, blame.node) if blame.rank >= 0 else Entity(EntityKind.JOB, assembly.job)
        )
        share = blame.excess_ms / max(block.step_ms, blame.excess_ms, 1e-9)
        text = _text(state, blame, block, clears)
        return self.verdict(
            kind=blame.kind, entity=entity, window=(min(blame.onset_ns, block.start_ns), block.end_ns), onset_at_ns=blame.onset_ns,
            job=assembly.job, attempt=assembly.attempt, rank=blame.rank, score=_score(state, blame), value=_value(state, blame, block),
            confidence=min(0.99, 0.8 + share / 4), text=text, clears=clears, evidence=_evidence(state, blame),
            victims=tuple(dict.fromkeys(node for node in assembly.nodes if node and node != blame.node)),
        )  # fmt: skip


def _rank_keys(nodes: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    keys = []
    for node in nodes:
        seen[node] = seen.get(node, -1) + 1
        keys.append(f"{node}#{seen[node]}")
    return keys


def _mean_over(run: list[Block], field: str, rank: int) -> float:
    values = np.array([getattr(block, field)[rank] for block in run])
    return float(np.mean(values[np.isfinite(values)])) if np.isfinite(values).any() else 0.0


def chance_of(count: int, total: int, share: float) -> float:
    """Probability that `count` or more of `total` independent stalls fall on a rank that draws each with probability `share`.

    Examples
    --------
    >>> chance_of(3, 3, 0.25)
    0.015625
    """
    return sum(math.comb(total, k) * share**k * (1.0 - share) ** (total - k) for k in range(count, total + 1))


def _bursts(stalls: list[Stall]) -> list[list[Stall]]:
    """Stalls in groups, parted by calm of at least 1.5 s."""
    groups: list[list[Stall]] = []
    for stall in stalls:
        if not groups or stall.at_ns - groups[-1][-1].at_ns > 1.5 * NS_PER_S:
            groups.append([])
        groups[-1].append(stall)
    return groups


def _score(state: JobState, blame: Blame) -> float:
    return float(state.score[blame.rank]) if blame.rank >= 0 else blame.excess_ms


def _value(state: JobState, blame: Blame, block: Block) -> float:
    return float(block.local_ms[blame.rank]) if blame.rank >= 0 else block.step_ms


def _text(state: JobState, blame: Blame, block: Block, clears: bool) -> str:
    if blame.rank < 0:
        if clears:
            return f"steps of job {state.assembly.job} are back to normal"
        return (f"steps of job {state.assembly.job} take {block.step_ms:.0f} ms on every rank (usual {state.usual.step_ms:.0f} ms); "
                "nobody's own time stands out")  # fmt: skip
    who = f"rank {blame.rank} on {blame.node}"
    if clears:
        return f"{who} keeps up with its peers again"
    what = "waits for its input" if blame.kind == "data_slow" else "computes"
    if blame.stalling:
        return f"{who} {what} {blame.excess_ms:.0f} ms too long in bursts of single steps, alone among its peers"
    peers = float(np.nanmedian(np.delete(block.local_ms, blame.rank)))
    own, less = block.local_ms[blame.rank], -block.wait_excess[blame.rank]
    return (f"{who} {what} longer than its peers: local {own:.0f} ms against {peers:.0f} ms, and waits {less:.0f} ms less than they "
            f"do; it costs {blame.excess_ms:.0f} ms of a {block.step_ms:.0f} ms step")  # fmt: skip


def _evidence(state: JobState, blame: Blame) -> tuple[Evidence, ...]:
    times = [block.end_ns for block in state.blocks]
    steps = series_evidence(
        "job step time", "ms", times, [block.step_ms for block in state.blocks], high=state.usual.step_ms, limit=24
    )
    if blame.rank < 0:
        return (steps,)
    rank, usual = blame.rank, float(state.usual.excess[blame.rank])
    band = 3.0 * float(state.usual.limit_scale(state.usual.step_ms)[rank])
    local = series_evidence(f"local time of rank {rank} above its peers", "ms", times, [b.excess[rank] for b in state.blocks],
                            usual - band, usual + band, limit=24)  # fmt: skip
    wait = series_evidence(
        f"wait of rank {rank} above its peers", "ms", times, [b.wait_excess[rank] for b in state.blocks], limit=24
    )
    return (local, wait, steps)
