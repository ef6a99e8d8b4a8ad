"""Who computes longer than its peers, so that they wait: the split of a step into local time and waiting.

In synchronous training every rank's *step* grows when one rank is slow; only the guilty one's local time grows, and its wait shrinks.
Both are compared with the peers (ranks of the same stage) in the same steps and with the rank's own usual place among them, over blocks of
steps; so are the phases of the local time, each by itself. Where a layout says that the peers do the same work, a rank that was slow from
the beginning stands apart from them as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
from scipy.special import bdtrc

from detectors.base import Detector, Frame, series_evidence
from detectors.state import Array, decode_state, encode_state, nan_array
from detectors.steps import stalls as singular
from detectors.steps.assembly import BACKWARD, DATA, DURATION, MAX_VICTIMS, Assembly, JointStep
from detectors.steps.blocks import PHASES, SCALE_OF_MAD, Block, Usual, divided_by_work, fold, slowest_of_peers
from detectors.steps.peers import Floats, Groups, excess_in_groups, is_pipelined, peer_groups
from detectors.steps.phases import NAMES, PhaseWatch
from detectors.steps.silence import forget_silent
from detectors.steps.stalls import Stall
from detectors.steps.table import StepTable, tables_of
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import Entity, EntityKind, Evidence, Verdict
from trainwarden.settings import option
from trainwarden.topology import JobLayout

_KEPT_BLOCKS, _KEPT_BLOCKS_LARGE, _LARGE = 24, 16, 1000
_FRESH_NS = 6 * NS_PER_S
_CALM_NS = 12 * NS_PER_S
_NEW_NORMAL_NS = 600 * NS_PER_S
"""A job that has been slow for so long is slow by nature now."""


@dataclass(frozen=True)
class StragglerSettings:
    """Settings of `straggler`."""

    block_steps: int = option(4, "steps are judged in blocks: a block has at least so many")
    block_s: float = option(1.0, "and lasts at least so long")
    block_limit_s: float = option(3.0, "after so long a block is whole however few steps it has")
    skip_steps: int = option(10, "plain steps ignored after the start of an attempt")
    skip_s: float = option(30.0, "but no more than two once the attempt has made steps for so long")
    warm_blocks: int = option(10, "blocks to learn from before anybody can be blamed")
    forgetting: float = option(0.03, "weight of a block in the usual place of each rank, once that is learnt")
    alarm_score: float = option(12.0, "height of the change-point sum (in scales, after allowance) that blames")
    phase_alarm_score: float = option(
        15.0, "height of the sum that blames by one phase of the step alone: higher, because several are looked at"
    )
    allowance: float = option(1.25, "scales above its usual place that a rank may lie without adding to the sum")
    least_s: float = option(5.0, "a slow stretch shorter than this is a hiccup")
    least_blocks: int = option(4, "and so is one of fewer blocks")
    least_share: float = option(0.055, "share of the step of the job that the rank must cost before it matters")
    steady_share: float = option(
        0.7, "share of the blocks of the stretch that must show it: two bad ones around a calm are no slow rank"
    )
    order_risk: float = option(
        1e-5, "it must be the slowest of its peers in so many steps as chance gives any of them with this probability"
    )
    order_steps: int = option(12, "so many steps in a row are enough for that, however few the peers are")
    stall_window_s: float = option(
        24.0, "window for stalls: single steps far beyond what the ranks of the job show now and then"
    )
    stall_share: float = option(0.8, "one rank must have this share of all stalls")
    stall_risk: float = option(1e-6, "and so many that chance spreads them like this with at most this probability")
    data_bursts: int = option(
        3, "stalls in loading data must come in so many bursts with calm between, or twice as many lone ones"
    )
    compute_bursts: int = option(5, "the same for stalls in computing: more, because a node may be taken away for them")
    together_share: float = option(
        0.25,
        "three nodes or more, and more than this share of the peers, that become slow together have a shared cause",
    )
    together_s: float = option(15.0, "together is within so long")
    start_ratio: float = option(
        1.2,
        "a rank whose local time was so many times its peers' from the beginning is slow, where they do the same work",
    )
    start_deviations: float = option(8.0, "and where it lies so many robust deviations of the peers away from them")
    job_slow_ratio: float = option(
        2.5, "the whole job is slow when steps take so many times their usual time and no rank is blamed"
    )
    input_slow_ratio: float = option(
        1.3, "or so many times their usual time, most of it waiting for input on all ranks"
    )
    job_slow_s: float = option(20.0, "for so long")
    clear_blocks: int = option(5, "calm for so many blocks (of block_s) takes the opinion back")
    restate_s: float = option(10.0, "while a fault lasts, it is said again after so long")


class Blame(msgspec.Struct):
    """An open opinion about one rank (or about the job, rank -1); `phase` says in which phase alone it shows, -1 for none."""

    kind: str
    node: str
    rank: int
    onset_ns: int
    excess_ms: float
    stalling: bool
    said_ns: int = 0
    calm_since_ns: int = 0
    phase: int = -1


class JobState(msgspec.Struct):
    """What is known of one job."""

    assembly: Assembly
    usual: Usual
    keys: list[str] = []
    groups: list[Array] = []
    same_work: bool = False
    to_skip: int = 0
    first_step_ns: int = 0
    gathered: list[JointStep] = []
    blocks: list[Block] = []
    score: Array = msgspec.field(default_factory=lambda: nan_array(0))
    run_start_ns: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    run_blocks: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    stalls: list[Stall] = []
    spike_ms: Array = msgspec.field(default_factory=lambda: nan_array(0))
    slow_since_ns: int = 0
    blames: dict[str, Blame] = {}
    watch: PhaseWatch = msgspec.field(default_factory=PhaseWatch)


class State(msgspec.Struct):
    """State of the detector."""

    jobs: dict[str, JobState] = {}


class StragglerDetector(Detector):
    """Blames the rank with the longer local time and the shorter wait.

    Says `compute_slow` of a node, `data_slow` of a node or of a whole job, and `job_slow`.
    """

    name = "straggler"
    kinds = ("compute_slow", "data_slow", "job_slow")
    version: ClassVar[int] = 4
    false_alarms_per_node_day: ClassVar[float] = 0.02
    Settings = StragglerSettings
    settings: StragglerSettings

    def __init__(self, settings: StragglerSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()
        self._settled: dict[str, tuple[list[str], dict[str, str]]] = {}

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for job, table in tables_of(frame).items():
            state = self._state.jobs.setdefault(job, JobState(Assembly(job, rows=BACKWARD + 1), Usual()))
            self._take_in(state, table, frame.now_ns, is_pipelined(frame.topology.job(job)))
        for job, state in self._state.jobs.items():
            for step in state.assembly.close(frame.now_ns):
                verdicts += self._step(state, step, frame.topology.job(job))
        forget_silent(self._state.jobs, frame.now_ns, lambda state: state.assembly.last_heard_ns)
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """Rank 2 computes 40 ms longer from second 40 on."""
        frames = SyntheticCluster(seed=1).frames(
            60, lambda second: Scene(compute_ms={2: 40.0}) if second >= 40 else None
        )
        return Example(frames, "compute_slow", node_entity(2))

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Jobs whose usual blocks are known."""
        jobs = self._state.jobs.values()
        return {"jobs": (sum(job.usual.blocks >= self.settings.warm_blocks for job in jobs), len(jobs))}

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _take_in(self, state: JobState, table: StepTable, now_ns: int, pipelined: bool) -> None:
        if state.assembly.take(table, now_ns, pipelined):
            state.to_skip, state.first_step_ns = self.settings.skip_steps, 0
            state.gathered, state.blocks, state.stalls, state.blames, state.slow_since_ns = [], [], [], {}, 0

    def _step(self, state: JobState, step: JointStep, layout: JobLayout | None) -> list[Verdict]:
        if not step.usual or state.assembly.world < 2:
            state.to_skip = max(state.to_skip, 1)
            return []
        if self._skips(state, step) or not np.isfinite(step.values[0]).any():
            return []
        state.gathered.append(step)
        span_ns = step.started_at_ns - state.gathered[0].started_at_ns
        lasted_ns = span_ns + int(np.nan_to_num(np.nanmedian(step.values[DURATION])) * NS_PER_MS)
        whole = len(state.gathered) >= self.settings.block_steps and span_ns >= self.settings.block_s * NS_PER_S
        if not whole and lasted_ns < self.settings.block_limit_s * NS_PER_S:
            return []
        steps, state.gathered = state.gathered, []
        return self._block(state, steps, layout)

    def _skips(self, state: JobState, step: JointStep) -> bool:
        """The first steps of an attempt warm up; of slow steps two are enough."""
        if not state.to_skip:
            return False
        state.first_step_ns = state.first_step_ns or step.started_at_ns
        late = step.started_at_ns - state.first_step_ns > self.settings.skip_s * NS_PER_S
        enough = late and self.settings.skip_steps - state.to_skip >= 2
        state.to_skip = 0 if enough else state.to_skip - 1
        state.first_step_ns = state.first_step_ns if state.to_skip else 0
        return not enough

    def _block(self, state: JobState, steps: list[JointStep], layout: JobLayout | None) -> list[Verdict]:
        self._settle_ranks(state, layout)
        steps = [divided_by_work(step, state.groups) for step in steps]
        block, excess, phases = fold(steps, state.groups)
        if not np.isfinite(block.step_ms):
            return []
        kept = _KEPT_BLOCKS if len(state.keys) <= _LARGE else _KEPT_BLOCKS_LARGE
        state.blocks = [*state.blocks[1 - kept :], block]
        if state.usual.blocks < self.settings.warm_blocks:
            state.usual.learn(block, np.zeros(len(state.keys), dtype=np.bool_), self.settings.forgetting)
            self._learn_phases(state, block)
            self._compare_with_peers(state)
            return []
        suspected = self._frozen(state)
        self._advance(state, block)
        block.slowest = slowest_of_peers(excess - state.usual.excess, suspected, state.groups)
        state.watch.count_slowest(block, phases, self._frozen_phases(state), state.groups)
        self._count_stalls(state, steps, excess)
        verdicts = self._blame_steady(state, block) + self._blame_phases(state, block)
        verdicts += self._blame_stalls(state, block) + self._blame_job(state, block) + self._review(state, block)
        slow_ns = block.end_ns - state.slow_since_ns if state.slow_since_ns else 0
        hold = 0 < slow_ns < _NEW_NORMAL_NS
        state.usual.learn(block, self._frozen(state), self.settings.forgetting, hold)
        self._learn_phases(state, block)
        return verdicts

    def _learn_phases(self, state: JobState, block: Block) -> None:
        step_ms = max(block.step_ms, state.usual.step_ms)
        state.watch.learn(block, self._frozen_phases(state), self.settings.forgetting, step_ms)

    def _settle_ranks(self, state: JobState, layout: JobLayout | None) -> None:
        """Carry each rank's usual place over to the numbers of this attempt: places belong to nodes, not to rank numbers."""
        known = layout if layout is not None and layout.attempt == state.assembly.attempt else None
        source = (state.assembly.nodes, known.attributes if known else {})
        if self._settled.get(state.assembly.job) == source and state.keys:
            return
        self._settled[state.assembly.job] = (list(source[0]), source[1])
        self._settle_groups(state, *peer_groups(known, state.assembly.nodes))
        keys = _rank_keys(state.assembly.nodes)
        if keys == state.keys:
            return
        old = {key: number for number, key in enumerate(state.keys)}
        places = [old.get(key, -1) for key in keys]
        state.usual = state.usual.resized(places) if state.usual.blocks else Usual()
        state.watch = state.watch.resized(places)
        spikes = np.append(state.spike_ms, np.median(state.spike_ms) if len(state.spike_ms) else 0.0)
        state.spike_ms = spikes[[place if place >= 0 else len(spikes) - 1 for place in places]]
        state.keys = keys
        self._reset_runs(state)

    def _settle_groups(self, state: JobState, groups: Groups, same_work: bool) -> None:
        """Other peers are other places: what was learnt among the former ones says nothing."""
        sizes = [len(members) for members in groups]
        if state.groups and (len(sizes) > 1 or len(state.groups) > 1 or same_work != state.same_work):
            same = len(state.groups) == len(groups) and all(map(np.array_equal, state.groups, groups))
            if not same or same_work != state.same_work:
                state.usual, state.watch, state.blocks, state.stalls = Usual(), PhaseWatch(), [], []
        state.groups, state.same_work = groups, same_work

    def _compare_with_peers(self, state: JobState) -> None:
        """At the end of the warm-up: a rank that was slow from the first step on has no healthy past, its peers have."""
        if state.usual.blocks != self.settings.warm_blocks or not state.same_work:
            return
        apart = state.usual.already_slow(state.groups, self.settings.start_ratio, self.settings.start_deviations)
        state.usual.expect_like_peers(apart, state.groups)
        state.score[apart] = self.settings.alarm_score
        state.run_start_ns[apart], state.run_blocks[apart] = state.blocks[0].start_ns, len(state.blocks)

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
        step_ms, limit = max(block.step_ms, state.usual.step_ms), 2.0 * self.settings.phase_alarm_score
        state.watch.advance(state.blocks, state.groups, step_ms, self.settings.allowance, limit)

    def _scale_now(self, state: JobState, block: Block) -> Array:
        """Own usual scale, or the spread that the *other* ranks show just now when the machine is restless."""
        recent = np.stack([kept.excess for kept in state.blocks[-6:]])
        own = state.usual.limit_scale(block.step_ms)
        if not np.isfinite(recent).all():
            return own
        spread = SCALE_OF_MAD * np.median(np.abs(recent - np.median(recent, axis=0)), axis=0)
        restless = spread - excess_in_groups(spread[None, :].astype(np.float64), state.groups)[0]
        return np.asarray(np.maximum(own, restless))

    def _run(self, state: JobState, rank: int, phase: int = -1) -> list[Block]:
        count = int(state.run_blocks[rank] if phase < 0 else state.watch.run_blocks[phase, rank])
        return state.blocks[-min(count, len(state.blocks)) :]

    def _blame_steady(self, state: JobState, block: Block) -> list[Verdict]:
        verdicts = []
        suspects = np.flatnonzero(state.score >= self.settings.alarm_score)
        guilty = [int(r) for r in suspects if self._is_guilty(state, block, int(r))]
        for rank in self._few_of_their_peers(state, guilty, state.run_start_ns):
            run = self._run(state, rank)
            if not self._is_no_chance(state, run, rank):
                continue
            excess = _mean_over(run, "excess", rank) - float(state.usual.excess[rank])
            data_ms = _mean_phase(run, PHASES.index(DATA), rank)
            kind = "data_slow" if data_ms > 0.5 * excess else "compute_slow"
            blame = Blame(kind, state.assembly.nodes[rank], rank, int(state.run_start_ns[rank]), excess, False)
            verdicts += self._open(state, blame, block)
        return verdicts

    def _blame_phases(self, state: JobState, block: Block) -> list[Verdict]:
        """One phase is steadily longer than it ever was beside the peers', and costs the job as much."""
        verdicts, watch = [], state.watch
        for phase, scores in enumerate(watch.score):
            suspects = np.flatnonzero(scores >= self.settings.phase_alarm_score).tolist()
            guilty = [rank for rank in suspects if self._is_guilty_in(state, block, phase, rank)]
            for rank in self._few_of_their_peers(state, guilty, watch.run_start_ns[phase]):
                longer = _mean_phase(self._run(state, rank, phase), phase, rank) - float(watch.excess[phase, rank])
                kind = "data_slow" if PHASES[phase] == DATA else "compute_slow"
                onset_ns, node = int(watch.run_start_ns[phase, rank]), state.assembly.nodes[rank]
                verdicts += self._open(state, Blame(kind, node, rank, onset_ns, longer, False, phase=phase), block)
        return verdicts

    def _is_guilty_in(self, state: JobState, block: Block, phase: int, rank: int) -> bool:
        settings, watch = self.settings, state.watch
        lasted_ns = block.end_ns - int(watch.run_start_ns[phase, rank])
        if lasted_ns < settings.least_s * NS_PER_S or watch.run_blocks[phase, rank] < settings.least_blocks:
            return False
        run, usual_ms = self._run(state, rank, phase), float(watch.excess[phase, rank])
        longer = _mean_phase(run, phase, rank) - usual_ms
        above = [kept.phases[phase, rank] - usual_ms > 0.3 * longer for kept in run]
        if np.mean(above) < settings.steady_share or not self._costs(state, run, rank, longer):
            return False
        excess = _mean_over(run, "excess", rank) - float(state.usual.excess[rank])
        step_ms = float(np.mean([kept.step_ms for kept in run]))
        return excess >= 0.5 * settings.least_share * step_ms and self._is_no_chance(state, run, rank, phase)

    def _few_of_their_peers(self, state: JobState, guilty: list[int], run_start_ns: Array) -> list[int]:
        """Where most peers are slower, or several nodes since the same moment, it is not for a reason of their own."""
        few: list[int] = []
        for members in state.groups if guilty else ():
            mine = np.intersect1d(guilty, members)
            nodes = {state.assembly.nodes[rank] for rank in members.tolist()}
            together = _at_once(state, mine.tolist(), run_start_ns, int(self.settings.together_s * NS_PER_S))
            shared = together >= 3 and together > self.settings.together_share * len(nodes)
            few += mine.tolist() if 2 * len(mine) <= len(members) and not shared else []
        return sorted(few)

    def _is_guilty(self, state: JobState, block: Block, rank: int) -> bool:
        settings, usual = self.settings, state.usual
        lasted_ns = block.end_ns - int(state.run_start_ns[rank])
        if state.score[rank] < settings.alarm_score or lasted_ns < settings.least_s * NS_PER_S:
            return False
        if state.run_blocks[rank] < settings.least_blocks:
            return False
        run = self._run(state, rank)
        excess = _mean_over(run, "excess", rank) - float(usual.excess[rank])
        above = [kept.excess[rank] - usual.excess[rank] > 0.3 * excess for kept in run]
        return bool(np.mean(above) >= settings.steady_share) and self._costs(state, run, rank, excess)

    def _costs(self, state: JobState, run: list[Block], rank: int, excess_ms: float) -> bool:
        """Whether so much more than usual is worth a word, is its own time rather than waiting, and is waited for."""
        usual, least = state.usual, 0.35 * excess_ms
        local_rise = _mean_over(run, "local_ms", rank) - float(usual.local_ms[rank])
        wait_fall = float(usual.wait_excess[rank]) - _mean_over(run, "wait_excess", rank)
        step_ms = float(np.mean([kept.step_ms for kept in run]))
        matters = excess_ms >= self.settings.least_share * step_ms and self._is_waited_for(state, run, rank)
        return matters and local_rise >= least and wait_fall >= least

    def _is_no_chance(self, state: JobState, run: list[Block], rank: int, phase: int = -1) -> bool:
        """Whether it was the slowest of its peers more often than drawing lots would make it.

        If nobody is slow for a reason of his own, each step is as likely to hit any peer, whatever its times are distributed like and
        however restless the job is just now: the count is binomial. Blocks of the warm-up count no steps. Phases share the risk.
        """
        size = next(len(members) for members in state.groups if rank in members)
        counted = [block for block in run if len(block.slowest)]
        steps = sum(block.steps for block in counted)
        slowest = [block.slowest if phase < 0 else block.phase_slowest[phase] for block in counted]
        hits = sum(int(count[rank]) for count in slowest)
        chance = float(bdtrc(hits - 1, steps, 1.0 / size)) if hits else 1.0
        looks = size if phase < 0 else size * len(PHASES)
        return bool(looks * chance <= max(self.settings.order_risk, size ** (1 - self.settings.order_steps)))

    def _is_waited_for(self, state: JobState, run: list[Block], rank: int) -> bool:
        """Whether it needs as long as the slowest of those that are as ever: a rank that still waits for others costs nothing."""
        calm = state.score < 0.5 * self.settings.alarm_score
        calm[[blame.rank for blame in state.blames.values() if blame.rank >= 0]] = False
        slowest = float(np.quantile(state.usual.local_ms[calm], 0.95)) if calm.any() else 0.0
        return _mean_over(run, "local_ms", rank) >= 0.95 * slowest

    def _count_stalls(self, state: JobState, steps: list[JointStep], excess: Floats) -> None:
        heard = singular.heard(steps)
        if not heard.any():
            return
        whole = [step for step, known in zip(steps, heard, strict=True) if known]
        above = excess[heard] - state.usual.excess
        state.stalls += singular.found_in(whole, above, state.usual, state.spike_ms)
        state.stalls = singular.recent(state.stalls, whole[-1].started_at_ns, self.settings.stall_window_s)
        state.spike_ms = singular.spike_level(state.spike_ms, above, state.usual.step_ms)

    def _blame_stalls(self, state: JobState, block: Block) -> list[Verdict]:
        if not state.stalls:
            return []
        rank = singular.singular_rank(
            state.stalls, len(state.keys), self.settings.stall_share, self.settings.stall_risk
        )
        mine = [stall for stall in state.stalls if stall.rank == rank]
        if not mine or block.end_ns - mine[-1].at_ns > _FRESH_NS:
            return []
        kind = "data_slow" if sum(stall.data for stall in mine) > 0.5 * len(mine) else "compute_slow"
        bursts = singular.bursts(mine)
        needed = self.settings.data_bursts if kind == "data_slow" else self.settings.compute_bursts
        if sum(len(burst) > 1 for burst in bursts) < needed and len(bursts) < 2 * needed:
            return []
        excess = float(np.median([stall.excess_ms for stall in mine]))
        onset_ns = next((burst[0].at_ns for burst in bursts if len(burst) > 1), mine[0].at_ns)
        return self._open(state, Blame(kind, state.assembly.nodes[rank], rank, onset_ns, excess, True), block)

    def _blame_job(self, state: JobState, block: Block) -> list[Verdict]:
        """All ranks are slower alike: much, for whatever reason, or noticeably because all wait for their input."""
        excess = block.step_ms - state.usual.step_ms
        kind = "data_slow" if block.data_ms - state.usual.data_ms > 0.5 * excess else "job_slow"
        if block.step_ms < self._slow_ratio(kind) * state.usual.step_ms:
            state.slow_since_ns = 0
            return []
        state.slow_since_ns = state.slow_since_ns or block.start_ns
        lasted_ns = block.end_ns - state.slow_since_ns
        if lasted_ns < self.settings.job_slow_s * NS_PER_S or any(b.rank >= 0 for b in state.blames.values()):
            return []
        return self._open(state, Blame(kind, "", -1, state.slow_since_ns, excess, False), block)

    def _slow_ratio(self, kind: str) -> float:
        return self.settings.job_slow_ratio if kind == "job_slow" else self.settings.input_slow_ratio

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
            ratio = 1.0 + 0.4 * (self._slow_ratio(blame.kind) - 1.0)
            return bool(block.step_ms < ratio * state.usual.step_ms)
        if blame.stalling:
            return sum(stall.rank == blame.rank and block.end_ns - stall.at_ns < _CALM_NS for stall in state.stalls) < 2
        if blame.phase >= 0:
            beyond = block.phases[blame.phase, blame.rank] - state.watch.excess[blame.phase, blame.rank]
        else:
            beyond = block.excess[blame.rank] - state.usual.excess[blame.rank]
        return bool(beyond < 0.35 * blame.excess_ms)

    def _goes_on(self, state: JobState, blame: Blame, block: Block) -> bool:
        """Whether this very block supports the opinion (a pause between bursts neither supports nor clears it)."""
        return not blame.stalling or any(
            stall.rank == blame.rank and block.end_ns - stall.at_ns < _FRESH_NS for stall in state.stalls
        )

    def _forget_run(self, state: JobState, blame: Blame) -> None:
        if blame.rank >= 0:
            state.score[blame.rank], state.run_blocks[blame.rank] = 0.0, 0
            state.watch.forget(blame.rank)
            state.stalls = [stall for stall in state.stalls if stall.rank != blame.rank]

    def _frozen(self, state: JobState) -> Array:
        """Ranks whose usual place must not be learnt now: blamed, or well on the way to it."""
        frozen = np.asarray(state.score > 0.5 * self.settings.alarm_score)
        for blame in state.blames.values():
            if blame.rank >= 0:
                frozen[blame.rank] = True
        return frozen

    def _frozen_phases(self, state: JobState) -> Array:
        """The same phase by phase."""
        frozen = np.asarray(state.watch.score > 0.5 * self.settings.phase_alarm_score)
        if frozen.shape[1]:
            frozen[:, [blame.rank for blame in state.blames.values() if blame.rank >= 0]] = True
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
            victims=tuple(dict.fromkeys(node for node in assembly.nodes if node and node != blame.node))[:MAX_VICTIMS],
        )  # fmt: skip


def _at_once(state: JobState, ranks: list[int], run_start_ns: Array, within_ns: int) -> int:
    """Most nodes of these ranks that became slow within a span of time."""
    starts: dict[str, int] = {}
    for rank in ranks:
        node, start = state.assembly.nodes[rank], int(run_start_ns[rank])
        starts[node] = min(start, starts.get(node, start))
    return max(
        (sum(0 <= other - start <= within_ns for other in starts.values()) for start in starts.values()), default=0
    )


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


def _mean_phase(run: list[Block], phase: int, rank: int) -> float:
    values = np.array([block.phases[phase, rank] for block in run])
    return float(np.mean(values[np.isfinite(values)])) if np.isfinite(values).any() else 0.0


def _score(state: JobState, blame: Blame) -> float:
    if blame.phase >= 0:
        return float(state.watch.score[blame.phase, blame.rank])
    return float(state.score[blame.rank]) if blame.rank >= 0 else blame.excess_ms


def _value(state: JobState, blame: Blame, block: Block) -> float:
    return float(block.local_ms[blame.rank]) if blame.rank >= 0 else block.step_ms


def _text(state: JobState, blame: Blame, block: Block, clears: bool) -> str:
    if blame.rank < 0:
        if clears:
            return f"steps of job {state.assembly.job} are back to normal"
        why = "all of them wait for their input" if blame.kind == "data_slow" else "nobody's own time stands out"
        return f"steps of job {state.assembly.job} take {block.step_ms:.0f} ms on every rank (usual {state.usual.step_ms:.0f} ms): {why}"
    who = f"rank {blame.rank} on {blame.node}"
    if clears:
        return f"{who} keeps up with its peers again"
    what = "waits for its input" if blame.kind == "data_slow" else "computes"
    if blame.stalling:
        return f"{who} {what} {blame.excess_ms:.0f} ms too long in bursts of single steps, alone among its peers"
    if blame.phase >= 0:
        return (f"{who} spends {blame.excess_ms:.0f} ms more than its peers in {NAMES[blame.phase]}, steadily, and waits "
                f"{-block.wait_excess[blame.rank]:.0f} ms less than they do")  # fmt: skip
    others = next(members[members != blame.rank] for members in state.groups if blame.rank in members)
    peers = float(np.nanmedian(block.local_ms[others]))
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
    if blame.phase < 0:
        return (local, wait, steps)
    phase = series_evidence(f"time of rank {rank} in {NAMES[blame.phase]} above its peers", "ms", times,
                            [b.phases[blame.phase, rank] for b in state.blocks], limit=24)  # fmt: skip
    return (phase, local, wait, steps)
