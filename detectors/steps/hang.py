"""A job that stands, and who made it stand: killed, frozen, lost with its node, or nobody in particular.

No single signal is believed. A killed rank needs the report of its end (or its absence) before the others'; a frozen one needs a stopped
process *and* a job without steps; a lost node needs silence *and* a job without steps. Silence alone says something of telemetry only.
Who saves or evaluates for longer than anybody knows is told of, and not accused: nothing is done to a rank for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from detectors.base import AlignedTick, Detector, Frame, series_evidence
from detectors.numbers import whole_number
from detectors.state import decode_state, encode_state
from detectors.steps.assembly import MAX_VICTIMS
from detectors.steps.exits import Exit, culprit_of, parse_exit
from detectors.steps.processes import KEPT, STATE_STOPPED, Processes
from detectors.steps.progress import SPECIAL_PHASES, JobProgress, Opinion
from detectors.steps.seats import Rows, Seats
from detectors.steps.sends import Sends, SendsState
from detectors.steps.silence import forget_silent
from detectors.steps.table import StepTable, tables_of
from detectors.steps.writes import Writes
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import Entity, EntityKind, Evidence, LogEvent, Verdict
from trainwarden.settings import option
from trainwarden.topology import JobLayout, Topology

_FRESH_EVENT_NS = 5 * NS_PER_S


@dataclass(frozen=True)
class HangSettings:
    """Settings of `hang`."""

    settle_s: float = option(
        0.3, "after the first report of a killed process: how long to see whether the end of another came earlier"
    )
    failure_settle_s: float = option(4.0, "the same for a process that failed by itself: a lost node may be behind it")
    order_settle_s: float = option(
        30.0, "the same for a process that was told to stop (SIGTERM, SIGINT): a restart may follow"
    )
    frozen_ticks: int = option(2, "a frozen process is stopped (state T) for so many ticks")
    frozen_s: float = option(3.0, "and its job has made no step for so long since")
    silent_ticks: int = option(
        3,
        "a node is silent after so many closed ticks without it, times the ticks that usually pass between its reports",
    )
    lost_s: float = option(4.0, "a silent node is lost when its job has made no step for so long")
    lost_steps: float = option(
        1.5,
        "but not before so many usual steps would have fitted (or evaluations, saves or pauses, where the job is at one)",
    )
    lost_phase_s: float = option(
        60.0, "a node that falls silent in a phase whose length nobody knows yet is lost after so long"
    )
    telemetry_ticks: int = option(
        6,
        "a node that is silent for so many ticks (times its usual ticks between reports) while its job goes on has lost its telemetry only",
    )
    hang_s: float = option(15.0, "when nobody stands out, a job is said to hang after so long without a step")
    hang_steps: float = option(
        30.0, "but not before so many usual steps would have fitted: the larger of the two counts"
    )
    hang_longest: float = option(
        3.0,
        "for jobs of long steps at most hang_s and so many times the longest of the last 200 steps, where that is less",
    )
    young_steps: int = option(3, "a job of fewer steps than this may stand for long_phase_s: its pace is not known yet")
    pause_factor: float = option(
        2.0, "a job that pauses between steps may stand for so many times its longest pause, and hang_s"
    )
    long_phase_s: float = option(180.0, "patience while the job evaluates or saves, before one was seen to end")
    first_phase_s: float = option(600.0, "patience before the first step of an attempt, before one was seen to come")
    phase_factor: float = option(4.0, "later, so many times the longest of the last eight of the kind, and hang_s")
    phase_least_s: float = option(60.0, "but no less than this (for a first step twice as long)")
    phase_most_s: float = option(1800.0, "and no more than this")
    relapse_s: float = option(
        120.0, "processes that fail again before the first step, so soon after a failure, are still that failure"
    )
    restate_s: float = option(10.0, "while a fault lasts, it is said again after so long")


class Silence(msgspec.Struct):
    """A node's absence from closed ticks; `gaps` are the last ticks from report to report, 1 where each has one."""

    ticks: int = 0
    since_ns: int = 0
    said: bool = False
    gaps: list[int] = []

    @property
    def reports(self) -> float:
        """How many reports are missing: a collector that was told to report every ten seconds is not silent after three."""
        return self.ticks / min(self.gaps, default=1)

    def heard(self) -> None:
        """The node is in this tick."""
        if self.ticks or self.gaps != [1, 1]:
            self.gaps = [*self.gaps[-1:], self.ticks + 1]
            self.ticks = 0


class State(msgspec.Struct):
    """State of the detector. `event_ns` is the newest tick's time: what has not been heard of is not late before its tick closed. `tick_ns`
    is the interval of the grid, `silent` whether some node does not report in each tick. `sends` is what network devices send."""

    event_ns: int = 0
    tick_ns: int = NS_PER_S
    jobs: dict[str, JobProgress] = {}
    present: dict[str, Silence] = {}
    nodes: tuple[str, ...] = ()
    silent: bool = False
    sends: SendsState = msgspec.field(default_factory=SendsState)


class HangDetector(Detector):
    """Says `rank_killed`, `rank_frozen`, `node_lost`, `job_hang`, `checkpoint_stall` (of a save that does not end) or `telemetry_lost`."""

    name = "hang"
    kinds = ("rank_killed", "rank_frozen", "node_lost", "job_hang", "checkpoint_stall", "telemetry_lost")
    version: ClassVar[int] = 5
    false_alarms_per_node_day: ClassVar[float] = 0.01
    Settings = HangSettings
    settings: HangSettings

    def __init__(self, settings: HangSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()
        self._late: set[str] = set()
        self._seats = Seats()
        self._places: list[Rows] = []
        self._settled: dict[str, tuple[Rows, Processes]] = {}
        self._writes = Writes()
        self._sends = Sends()
        self._job_of: tuple[tuple[JobLayout, ...], dict[str, str]] = ((), {})

    def update(self, frame: Frame) -> list[Verdict]:
        self._follow(frame)
        self._late = self._late_nodes()
        verdicts = self._telemetry(frame)
        for name in sorted(self._state.jobs):
            verdicts += self._judge(self._state.jobs[name], frame)
        forget_silent(self._state.jobs, frame.now_ns, lambda job: job.heard_ns)
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """The process of rank 1 is stopped from second 20 on; all ranks stand."""
        stopped = Scene(states={1: STATE_STOPPED}, standing=True)
        frames = SyntheticCluster(seed=1).frames(30, lambda second: stopped if second >= 20 else None)
        return Example(frames, "rank_frozen", node_entity(1))

    def snapshot(self) -> bytes:
        self._state.sends = self._sends.state
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)
        self._sends = Sends(self._state.sends)

    # --- what happened -------------------------------------------------------------------------------------------------------

    def _follow(self, frame: Frame) -> None:
        for layout in frame.topology.jobs():
            if layout.job in self._state.jobs:
                self._attempt(layout.job, layout.attempt, frame.now_ns)
        for tick in frame.ticks:
            self._state.event_ns = max(self._state.event_ns, tick.at_ns)
            self._state.tick_ns = tick.interval_ms * NS_PER_MS
            self._follow_presence(tick)
            self._follow_processes(tick, frame)
            self._follow_sends(tick, frame.topology)
        event_ns = self._state.event_ns or frame.now_ns
        for table in tables_of(frame).values():
            self._follow_steps(table, event_ns, frame.now_ns)
        for event in frame.logs:
            end = parse_exit(event, frame.now_ns)
            if end is not None and end.rank >= 0:
                self._follow_exit(_job_of(event, frame.topology), _attempt_of(event), end)
            elif event.code == "hook_bye" and event.attributes.get("reason") == "finished":
                self._follow_goodbye(event)

    def _attempt(self, name: str, attempt: int, now_ns: int) -> JobProgress:
        job = self._state.jobs.setdefault(name, JobProgress(name))
        if attempt > job.attempt:
            if job.exits and not job.decided:
                job.failed_ns = next(iter(job.exits.values())).heard_ns
            job.begin(attempt, self._state.event_ns or now_ns)
        return job

    def _follow_steps(self, table: StepTable, event_ns: int, now_ns: int) -> None:
        job = self._attempt(table.job, table.attempts[-1], now_ns)
        job.heard_ns, job.tick_ns = now_ns, self._state.tick_ns
        mine = table.of_attempt(job.attempt)
        if mine.reports:
            job.take_in(mine, event_ns)

    def _follow_exit(self, name: str, attempt: int, end: Exit) -> None:
        job = self._state.jobs.get(name) or self._attempt(name, attempt, end.heard_ns)
        job.heard_ns = max(job.heard_ns, end.heard_ns)
        if attempt < job.attempt or end.rank in job.exits:
            return
        if attempt > job.attempt:
            job = self._attempt(name, attempt, end.heard_ns)
        job.exits[end.rank] = end
        job.ending |= end.code == 0

    def _follow_goodbye(self, event: LogEvent) -> None:
        """A rank that finished its work: the job ends, it does not hang. Other goodbyes (an exception's, a restart's) mean nothing here."""
        job = self._state.jobs.get(event.job)
        if job is not None and event.attempt >= job.attempt:
            job.ending = True

    def _follow_presence(self, tick: AlignedTick) -> None:
        state = self._state
        # who was absent at first is not followed yet
        followed = tick.nodes == state.nodes and len(state.present) == len(tick.nodes)
        if followed and not state.silent and tick.present.all():
            return
        here = set(tick.nodes)
        for node in [known for known in state.present if known not in here]:
            del state.present[node]
        for node, present in zip(tick.nodes, tick.present.tolist(), strict=True):
            known = state.present.get(node)
            if present:
                if known is None:
                    known = state.present[node] = Silence()
                known.heard()
            elif known is not None:
                known.since_ns = known.since_ns if known.ticks else tick.at_ns
                known.ticks += 1
        state.nodes = tick.nodes
        state.silent = any(s.ticks or s.said or min(s.gaps, default=1) > 1 for s in state.present.values())

    def _follow_processes(self, tick: AlignedTick, frame: Frame) -> None:
        matrix = tick.family("process")
        if matrix is None:
            return
        states, cpus, phases = matrix.column("state"), matrix.column("cpu_cores"), matrix.column("phase")
        steps, ages = matrix.column("last_step"), matrix.column("step_age_s")
        for place in self._placed(matrix.entities, frame.topology):
            job = self._state.jobs.get(place.job)
            if job is None or job.attempt != place.attempt:
                continue
            known = self._settled.get(place.job)
            if known is None or known[0] is not place or known[1] is not job.processes:
                job.processes.settle(place.ranks, place.nodes)
                self._settled = {**self._settled, place.job: (place, job.processes)}
            rows, job.heard_ns, job.tick_ns = place.rows, max(job.heard_ns, frame.now_ns), self._state.tick_ns
            job.processes.note(place.ranks, tick.at_ns, states[rows], cpus[rows], phases[rows])
            job.processes_moved(place.ranks, steps[rows], ages[rows], tick.at_ns)
            writes = self._writes.of(place.job, matrix, rows, place.nodes, tick)
            job.processes.note_writes(place.ranks, tick.at_ns, writes, job.is_moving(tick.at_ns))

    def _follow_sends(self, tick: AlignedTick, topology: Topology) -> None:
        matrix = tick.family("nic")
        if matrix is None:
            return
        layouts = topology.jobs()
        if self._job_of[0] != layouts:
            self._job_of = layouts, {node: layout.job for layout in layouts for node in layout.nodes}
        self._sends.note(matrix, tick.at_ns, self._job_of[1], self._state.jobs)
        for job in self._state.jobs.values():
            moves = job.is_moving(tick.at_ns)
            job.senders = {} if moves else self._sends.senders(job.nodes, tick.at_ns)

    def _placed(self, entities: tuple[tuple[str, str], ...], topology: Topology) -> list[Rows]:
        places = self._seats.of(entities, topology.jobs())
        if places is not self._places:
            self._places, self._settled = places, {}
        return places

    # --- what it means -------------------------------------------------------------------------------------------------------

    def _judge(self, job: JobProgress, frame: Frame) -> list[Verdict]:
        at_ns = self._reference_ns(frame.now_ns)
        verdicts = self._take_back(job, at_ns)
        if job.exits:
            return verdicts + self._judge_exits(job, frame, at_ns)
        standing_s = (at_ns - job.progress_ns) / NS_PER_S
        if job.ending or standing_s < min(self.settings.frozen_s, self.settings.lost_s):
            return verdicts
        verdicts += (
            self._stopped(job, standing_s, at_ns)
            or self._vanished(job, at_ns)
            or self._lost(job, frame, standing_s, at_ns)
        )
        if self._is_open_question(job, standing_s) and standing_s >= self._patience_s(job):
            verdicts += self._stuck(job, standing_s, at_ns)
        return verdicts

    def _reference_ns(self, now_ns: int) -> int:
        """The present, unless the input lags far behind it: a backlog is no hang."""
        event_ns = self._state.event_ns
        fresh_ns = max(_FRESH_EVENT_NS, 2 * self._state.tick_ns + NS_PER_S)
        return now_ns if not event_ns or 0 <= now_ns - event_ns < fresh_ns else event_ns

    def _take_back(self, job: JobProgress, at_ns: int) -> list[Verdict]:
        verdicts = []
        for key, opinion in list(job.opinions.items()):
            moved_on = job.progress_ns > opinion.said_ns if opinion.attempt == job.attempt else job.steps_seen > 0
            if moved_on:
                del job.opinions[key]
                text = f"job {job.job} makes steps again" + (
                    "" if opinion.attempt == job.attempt else f" in attempt {job.attempt}"
                )
                opinion.attempt = job.attempt
                verdicts.append(self._say(job, opinion, at_ns, text, confidence=0.99, clears=True))
        return verdicts

    def _judge_exits(self, job: JobProgress, frame: Frame, at_ns: int) -> list[Verdict]:
        culprit = None if job.decided or job.ending else culprit_of(list(job.exits.values()))
        if (
            culprit is None
            or frame.now_ns - min(end.heard_ns for end in job.exits.values()) < self._settle_s(culprit) * NS_PER_S
        ):
            return []
        job.decided = True
        relapse = (
            job.steps_seen == 0 and job.failed_ns and frame.now_ns - job.failed_ns < self.settings.relapse_s * NS_PER_S
        )
        known = any(opinion.attempt == job.attempt for opinion in job.opinions.values())
        job.failed_ns = frame.now_ns
        if known or (relapse and not culprit.killed):
            return []
        lost = self._silent_nodes(job)
        if not culprit.killed and len(lost) == 1 and not any(end.node == lost[0] for end in job.exits.values()):
            return self._open(job, "node_lost", lost[0], _rank_on(job, lost[0]), self._state.present[lost[0]].since_ns, at_ns, 0.9,
                              f"node {lost[0]} is silent, and the other ranks of job {job.job} failed after it")  # fmt: skip
        others = sorted(rank for rank in job.exits if rank != culprit.rank)
        tail = f"; rank(s) {', '.join(map(str, others))} followed" if others else " before any other"
        text = f"rank {culprit.rank} on {culprit.node} {culprit.describe()}{tail}"
        return self._open(
            job, "rank_killed", culprit.node, culprit.rank, culprit.at_ns, at_ns, 0.97 if culprit.killed else 0.8, text
        )

    def _settle_s(self, culprit: Exit) -> float:
        if culprit.ordered:
            return self.settings.order_settle_s
        return self.settings.settle_s if culprit.killed or culprit.code > 255 else self.settings.failure_settle_s

    def _stands_since(self, job: JobProgress, since_ns: int, at_ns: int) -> bool:
        """Whether the job made no step for `frozen_s` since a sample, or the one before it: jobs of long steps always stand."""
        return at_ns - max(job.progress_ns, since_ns - self._state.tick_ns) >= self.settings.frozen_s * NS_PER_S

    def _stopped(self, job: JobProgress, standing_s: float, at_ns: int) -> list[Verdict]:
        processes = job.processes
        verdicts = []
        for rank in np.flatnonzero(processes.stopped_run >= self.settings.frozen_ticks).tolist():
            since_ns, node = processes.since_ns(rank, int(processes.stopped_run[rank])), processes.nodes[rank]
            if not self._stands_since(job, since_ns, at_ns):
                continue
            onset_ns = min(since_ns, max(job.progress_ns, since_ns - NS_PER_S))
            text = f"rank {rank} on {node} is stopped (process state T) and job {job.job} has made no step for {standing_s:.1f} s"
            verdicts += self._open(job, "rank_frozen", node, rank, onset_ns, at_ns, 0.97, text)
        return verdicts

    def _vanished(self, job: JobProgress, at_ns: int) -> list[Verdict]:
        """A process that is no more, without anybody reporting its end."""
        gone = job.processes.gone_run
        fresh = np.flatnonzero((gone >= 2) & (gone < np.minimum(job.processes.seen, KEPT)))
        first_ns = {rank: job.processes.since_ns(rank, int(gone[rank])) for rank in fresh.tolist()}
        if not first_ns:
            return []
        rank = min(first_ns, key=lambda number: (first_ns[number], number))
        if not self._stands_since(job, first_ns[rank], at_ns):
            return []
        node = job.processes.nodes[rank]
        alone = sum(at == first_ns[rank] for at in first_ns.values()) == 1
        text = f"the process of rank {rank} on {node} is gone, no launcher reported its end, and job {job.job} stands"
        return self._open(job, "rank_killed", node, rank, first_ns[rank], at_ns, 0.85 if alone else 0.4, text)

    def _lost(self, job: JobProgress, frame: Frame, standing_s: float, at_ns: int) -> list[Verdict]:
        silent = self._silent_nodes(job)
        nodes = {node for node in job.nodes if node} if silent else set()
        if not silent or 2 * len(silent) > max(len(nodes), 2) or standing_s < self.settings.lost_s:
            return []
        verdicts = []
        for node in silent:
            since_ns = self._state.present[node].since_ns
            if job.progress_ns <= since_ns + 2 * NS_PER_S and self._is_late(
                job, standing_s, (at_ns - since_ns) / NS_PER_S
            ):
                text = f"node {node} is silent and job {job.job} has made no step for {standing_s:.1f} s"
                verdicts += self._open(job, "node_lost", node, _rank_on(job, node), since_ns, at_ns, 0.9, text)
        return verdicts

    def _is_late(self, job: JobProgress, standing_s: float, silent_s: float) -> bool:
        """Whether the job stands longer than what it is at explains; who sends no telemetry within a long step need not be lost."""
        phase = job.phase_now()
        if phase not in SPECIAL_PHASES:
            usual_ms = max(float(np.nan_to_num(job.usual_step_ms())), job.longest_pause_ms())
        else:
            usual_ms = job.longest_ms(phase)
        if not math.isfinite(usual_ms):
            return silent_s >= self.settings.lost_phase_s
        return standing_s >= self.settings.lost_steps * usual_ms / 1000

    def _late_nodes(self) -> set[str]:
        """Nodes whose silence is more than a report or two that came late."""
        if not self._state.silent:
            return set()
        least = self.settings.silent_ticks
        return {node for node, silence in self._state.present.items() if silence.ticks and silence.reports >= least}

    def _silent_nodes(self, job: JobProgress) -> list[str]:
        return sorted(self._late.intersection(job.nodes)) if self._late else []

    def _patience_s(self, job: JobProgress) -> float:
        """How long the job may stand, by what it is at: learnt from how long that took before, within the bounds of the settings."""
        settings, phase = self.settings, job.phase_now()
        plain = self._plain_patience_s(job)
        if phase not in SPECIAL_PHASES:
            return plain
        longest_s = job.longest_ms(phase) / 1000
        if not math.isfinite(longest_s) or (phase == "checkpoint" and not job.is_learnt(phase)):
            return max(plain, settings.first_phase_s if phase == "first" else settings.long_phase_s)
        least_s = settings.phase_least_s * (2 if phase == "first" else 1)
        learnt_s = settings.phase_factor * longest_s + settings.hang_s
        return max(plain, min(max(learnt_s, least_s), settings.phase_most_s))

    def _plain_patience_s(self, job: JobProgress) -> float:
        """How long it may stand between plain steps: by how long they take, and by its pauses."""
        settings, known = self.settings, len(job.durations_ms)
        by_pause_s = min(settings.pause_factor * job.longest_pause_ms() / 1000 + settings.hang_s, settings.phase_most_s)
        patience_s = max(settings.hang_s, by_pause_s)
        if known < settings.young_steps:
            first_s = float(np.nan_to_num(job.longest_ms("first"))) / 1000
            patience_s = max(patience_s, settings.long_phase_s, settings.phase_factor * first_s + settings.hang_s)
        if not known:
            return patience_s
        by_usual_s = settings.hang_steps * job.usual_step_ms() / 1000
        by_longest_s = settings.hang_s + settings.hang_longest * job.longest_step_ms() / 1000
        return max(patience_s, min(by_usual_s, max(by_longest_s, settings.phase_least_s)))

    def _is_open_question(self, job: JobProgress, standing_s: float) -> bool:
        """Whether nothing was said yet, or only that a save does not end, which is no excuse for ever."""
        told = {opinion.kind for opinion in job.opinions.values()}
        return not told or (told == {"checkpoint_stall"} and standing_s >= self.settings.phase_most_s)

    def _is_excused(self, job: JobProgress, phase: str, standing_s: float) -> bool:
        """Whether the job is at something that may take as long as this, for all that is known: then no rank is accused."""
        if phase not in ("eval", "checkpoint") or standing_s >= self.settings.phase_most_s:
            return False
        return not job.is_learnt(phase) or bool(job.writers().size) or job.sends_a_save()

    def _stuck(self, job: JobProgress, standing_s: float, at_ns: int) -> list[Verdict]:
        if 2 * len(self._silent_nodes(job)) > len({node for node in job.nodes if node}):
            return []
        heard = job.processes.ranks
        if heard.size and (job.processes.gone_run[heard] > 0).all():
            return []
        phase = job.phase_now()
        if self._is_excused(job, phase, standing_s):
            kind = "checkpoint_stall" if phase == "checkpoint" else "job_hang"
            text = f"{_at_length(job, phase)}, and has made no step for {standing_s:.0f} s"
            return self._open(job, kind, "", -1, job.progress_ns, at_ns, 0.6, text)
        rank, why = job.processes.odd()
        if rank is not None:
            node = job.processes.nodes[rank]
            text = f"job {job.job} has made no step for {standing_s:.0f} s and rank {rank} on {node} {why}, unlike the others"
            return self._open(job, "rank_frozen", node, rank, job.progress_ns, at_ns, 0.7, text)
        text = f"job {job.job} has made no step for {standing_s:.0f} s (usual step {job.usual_step_ms():.0f} ms) and no rank stands out"
        return self._open(job, "job_hang", "", -1, job.progress_ns, at_ns, 0.6, text)

    def _telemetry(self, frame: Frame) -> list[Verdict]:
        silences = self._state.present
        if not self._state.silent:
            return []
        missing = sum(silence.ticks > 0 for silence in silences.values())
        verdicts = []
        for node in sorted(node for node, silence in silences.items() if silence.ticks or silence.said):
            silence = silences[node]
            if silence.said and not silence.ticks:
                silence.said = False
                verdicts.append(self._say_telemetry(node, silence, frame, "telemetry is back", clears=True))
            elif (
                not silence.said
                and 2 * missing <= len(silences)
                and self._goes_on_without(node, silence, frame.topology)
            ):
                silence.said = True
                what = "sends no telemetry while work goes on; its health is unknown"
                verdicts.append(self._say_telemetry(node, silence, frame, what))
        return verdicts

    def _goes_on_without(self, node: str, silence: Silence, topology: Topology) -> bool:
        if silence.reports < self.settings.telemetry_ticks:
            return False
        jobs = [
            self._state.jobs[layout.job]
            for layout in topology.jobs()
            if node in layout.nodes and layout.job in self._state.jobs
        ]
        return all(job.progress_ns > silence.since_ns + 2 * NS_PER_S for job in jobs)

    # --- saying it -----------------------------------------------------------------------------------------------------------

    def _open(self, job: JobProgress, kind: str, node: str, rank: int, onset_ns: int, at_ns: int, confidence: float,
              text: str) -> list[Verdict]:  # fmt: skip
        known = job.opinions.get(f"{kind}/{node}")
        if known is not None and at_ns - known.said_ns < self.settings.restate_s * NS_PER_S:
            return []
        opinion = known or Opinion(kind, node, rank, job.attempt, onset_ns, at_ns)
        opinion.said_ns = at_ns
        job.opinions[f"{kind}/{node}"] = opinion
        return [self._say(job, opinion, at_ns, text, confidence)]

    def _say(
        self, job: JobProgress, opinion: Opinion, at_ns: int, text: str, confidence: float, clears: bool = False
    ) -> Verdict:
        entity = (
            Entity(EntityKind.NODE, opinion.node, opinion.node) if opinion.node else Entity(EntityKind.JOB, job.job)
        )
        standing_s = (at_ns - job.progress_ns) / NS_PER_S
        victims = tuple(sorted({node for node in job.nodes if node and node != opinion.node}))[:MAX_VICTIMS]
        return self.verdict(
            kind=opinion.kind, entity=entity, window=(min(opinion.onset_ns, at_ns), at_ns), onset_at_ns=opinion.onset_ns, job=job.job,
            attempt=opinion.attempt, rank=opinion.rank, score=standing_s, value=standing_s, high=job.usual_step_ms() / 1000,
            confidence=confidence, text=text, clears=clears, victims=victims, evidence=_evidence(job, opinion),
        )  # fmt: skip

    def _say_telemetry(self, node: str, silence: Silence, frame: Frame, what: str, clears: bool = False) -> Verdict:
        layout = frame.topology.job_of(node)
        at_ns = max(self._state.event_ns, silence.since_ns)
        return self.verdict(
            kind="telemetry_lost", entity=Entity(EntityKind.TELEMETRY, node, node), window=(silence.since_ns, at_ns),
            job=layout.job if layout else "", attempt=layout.attempt if layout else 0, score=float(silence.ticks),
            confidence=0.9, text=f"node {node}: {what}" if clears else f"node {node} {what}", clears=clears,
        )  # fmt: skip


def _job_of(event: LogEvent, topology: Topology) -> str:
    layout = None if event.job else topology.job_of(event.node)
    return layout.job if layout else event.job


def _attempt_of(event: LogEvent) -> int:
    return event.attempt or max(0, whole_number(event.attributes.get("generation", ""), 0))


def _rank_on(job: JobProgress, node: str) -> int:
    return job.nodes.index(node) if node in job.nodes else -1


def _at_length(job: JobProgress, phase: str) -> str:
    """What a job is at that does not end, and who."""
    longest_ms, said = job.longest_ms(phase), job.at_phase(phase)
    writers = job.writers() if phase == "checkpoint" else said[:0]
    ranks = ", ".join(map(str, (writers if writers.size else said)[:8].tolist()))
    who = f" (rank(s) {ranks})" if ranks else _sending(job) if phase == "checkpoint" else ""
    what = "saves" if phase == "checkpoint" else "evaluates"
    how = ", which nobody announced" if phase == "checkpoint" and not said.size else ""
    before = f"the longest before took {longest_ms / 1000:.1f} s" if math.isfinite(longest_ms) else "for the first time"
    return f"job {job.job} {what}{who}{how}, {before}"


def _sending(job: JobProgress) -> str:
    most = sorted(job.senders, key=lambda node: (-job.senders[node], node))[:4]
    told = ", ".join(f"{node} sends {job.senders[node] / 1e6:.0f} MB/s" for node in most)
    return f" to a store elsewhere ({told})" if told else ""


def _evidence(job: JobProgress, opinion: Opinion) -> tuple[Evidence, ...]:
    found: list[Evidence] = []
    at_ns, states, cpu_cores = job.processes.history(opinion.rank)
    if at_ns:
        note = "1 R, 2 S, 3 D, 4 T (stopped), 5 Z, 0 gone"
        found.append(series_evidence(f"process state of rank {opinion.rank}", "state", at_ns, states, note=note))
        found.append(series_evidence(f"processor use of rank {opinion.rank}", "cores", at_ns, cpu_cores))
    if job.exits:
        ends = sorted(job.exits.values(), key=lambda end: end.at_ns)
        note = ", ".join(f"rank {end.rank} {end.describe()}" for end in ends[:8])
        found.append(
            series_evidence(
                "ends of processes", "exit code", [e.at_ns for e in ends], [float(e.code) for e in ends], note=note
            )
        )
    ranks = _around(opinion.rank, len(job.rank_steps))
    steps = [float(job.rank_steps[rank]) for rank in ranks]
    note = f"one value per rank, in order of rank, from rank {ranks[0] if ranks else 0}"
    found.append(series_evidence("last step", "step", [job.progress_ns] * len(ranks), steps, note=note))
    return tuple(found)


def _around(rank: int, world: int, limit: int = 40) -> list[int]:
    """At most `limit` ranks, `rank` among them."""
    first = max(0, min(rank - limit // 2, world - limit))
    return list(range(first, min(world, first + limit)))
