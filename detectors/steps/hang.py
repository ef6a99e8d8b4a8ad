"""A job that stands, and who made it stand: killed, frozen, lost with its node, or nobody in particular.

No single signal is believed. A killed rank needs the report of its end (or its absence) before the others'; a frozen one needs a stopped
process *and* a job without steps; a lost node needs silence *and* a job without steps. Silence alone says something of telemetry only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from detectors.base import AlignedTick, Detector, Frame, series_evidence
from detectors.state import decode_state, encode_state
from detectors.steps.exits import Exit, culprit_of, parse_exit
from detectors.steps.progress import STATE_DISK, STATE_NONE, STATE_STOPPED, STATE_ZOMBIE, JobProgress, Opinion, Process
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, EntityKind, Evidence, LogEvent, StepReport, Verdict
from trainwarden.settings import option
from trainwarden.topology import Topology

_JOB_SILENCE_NS = 3600 * NS_PER_S
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
    frozen_s: float = option(3.0, "and its job has made no step for so long")
    silent_ticks: int = option(3, "a node is silent after so many closed ticks without it")
    lost_s: float = option(4.0, "a silent node is lost when its job has made no step for so long")
    telemetry_ticks: int = option(
        6, "a node that is silent for so many ticks while its job goes on has lost its telemetry only"
    )
    hang_s: float = option(15.0, "when nobody stands out, a job is said to hang after so long without a step")
    hang_steps: float = option(
        30.0, "but not before so many usual steps would have fitted: the larger of the two counts"
    )
    long_phase_s: float = option(180.0, "the least patience while the job evaluates or saves")
    first_phase_s: float = option(600.0, "the least patience before the first step of an attempt")
    relapse_s: float = option(
        120.0, "processes that fail again before the first step, so soon after a failure, are still that failure"
    )
    restate_s: float = option(10.0, "while a fault lasts, it is said again after so long")


class Silence(msgspec.Struct):
    """A node's absence from closed ticks."""

    ticks: int = 0
    since_ns: int = 0
    said: bool = False


class State(msgspec.Struct):
    """State of the detector. `event_ns` is the newest tick's time: what has not been heard of is not late before its tick closed."""

    event_ns: int = 0
    jobs: dict[str, JobProgress] = {}
    present: dict[str, Silence] = {}


class HangDetector(Detector):
    """Says `rank_killed`, `rank_frozen`, `node_lost`, `job_hang` or `telemetry_lost`."""

    name = "hang"
    kinds = ("rank_killed", "rank_frozen", "node_lost", "job_hang", "telemetry_lost")
    Settings = HangSettings
    settings: HangSettings

    def __init__(self, settings: HangSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()

    def update(self, frame: Frame) -> list[Verdict]:
        self._follow(frame)
        verdicts = self._telemetry(frame)
        for name in sorted(self._state.jobs):
            verdicts += self._judge(self._state.jobs[name], frame)
        silent = [name for name, job in self._state.jobs.items() if frame.now_ns - job.heard_ns > _JOB_SILENCE_NS]
        for name in silent:
            del self._state.jobs[name]
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """The process of rank 1 is stopped from second 20 on; all ranks stand."""
        stopped = Scene(states={1: STATE_STOPPED}, standing=True)
        frames = SyntheticCluster(seed=1).frames(30, lambda second: stopped if second >= 20 else None)
        return Example(frames, "rank_frozen", node_entity(1))

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    # --- what happened -------------------------------------------------------------------------------------------------------

    def _follow(self, frame: Frame) -> None:
        for layout in frame.topology.jobs():
            if layout.job in self._state.jobs:
                self._attempt(layout.job, layout.attempt, frame.now_ns)
        for tick in frame.ticks:
            self._state.event_ns = max(self._state.event_ns, tick.at_ns)
            self._follow_presence(tick)
            self._follow_processes(tick, frame)
        event_ns = self._state.event_ns or frame.now_ns
        for report in frame.steps:
            self._follow_steps(report, event_ns, frame.now_ns)
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
                job.failed_ns = job.exits[0].heard_ns
            job.begin(attempt, self._state.event_ns or now_ns)
        return job

    def _follow_steps(self, report: StepReport, event_ns: int, now_ns: int) -> None:
        job = self._attempt(report.job, report.attempt, now_ns)
        job.heard_ns = now_ns
        if report.attempt == job.attempt:
            job.take_in(report, event_ns)

    def _follow_exit(self, name: str, attempt: int, end: Exit) -> None:
        job = self._state.jobs.get(name) or self._attempt(name, attempt, end.heard_ns)
        job.heard_ns = max(job.heard_ns, end.heard_ns)
        if attempt < job.attempt or any(known.rank == end.rank for known in job.exits):
            return
        if attempt > job.attempt:
            job = self._attempt(name, attempt, end.heard_ns)
        job.exits.append(end)
        job.ending |= end.code == 0

    def _follow_goodbye(self, event: LogEvent) -> None:
        """A rank that finished its work: the job ends, it does not hang. Other goodbyes (an exception's, a restart's) mean nothing here."""
        job = self._state.jobs.get(event.job)
        if job is not None and event.attempt >= job.attempt:
            job.ending = True

    def _follow_presence(self, tick: AlignedTick) -> None:
        here = set(tick.nodes)
        for node in [known for known in self._state.present if known not in here]:
            del self._state.present[node]
        for node, present in zip(tick.nodes, tick.present.tolist(), strict=True):
            if present:
                known = self._state.present.setdefault(node, Silence())
                known.ticks = 0
            elif node in self._state.present:
                known = self._state.present[node]
                known.since_ns = known.since_ns if known.ticks else tick.at_ns
                known.ticks += 1

    def _follow_processes(self, tick: AlignedTick, frame: Frame) -> None:
        matrix = tick.family("process")
        if matrix is None:
            return
        states, cpus, phases = matrix.column("state"), matrix.column("cpu_cores"), matrix.column("phase")
        steps, ages = matrix.column("last_step"), matrix.column("step_age_s")
        for row, (node, device) in enumerate(matrix.entities):
            job, rank = self._rank_at(node, device, frame.topology)
            if job is None:
                continue
            process = job.processes.setdefault(rank, Process(node))
            process.note(node, tick.at_ns, float(states[row]), float(cpus[row]), float(phases[row]))
            if steps[row] > job.rank_steps.get(rank, -1) and math.isfinite(ages[row]):
                job.rank_steps[rank] = int(steps[row])
                job.moved(tick.at_ns - int(float(ages[row]) * NS_PER_S), tick.at_ns)

    def _rank_at(self, node: str, device: str, topology: Topology) -> tuple[JobProgress | None, int]:
        number = device.removeprefix("rank")
        rank = int(number) if number.isdigit() else -1
        for layout in topology.jobs():
            if layout.ranks.get(rank, ("", ""))[0] == node:
                job = self._state.jobs.get(layout.job)
                return (job, rank) if job is not None and job.attempt == layout.attempt else (None, rank)
        return None, rank

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
        if not job.opinions and standing_s >= self._patience_s(job):
            verdicts += self._stuck(job, standing_s, at_ns)
        return verdicts

    def _reference_ns(self, now_ns: int) -> int:
        """The present, unless the input lags far behind it: a backlog is no hang."""
        event_ns = self._state.event_ns
        return now_ns if not event_ns or 0 <= now_ns - event_ns < _FRESH_EVENT_NS else event_ns

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
        culprit = None if job.decided or job.ending else culprit_of(job.exits)
        if (
            culprit is None
            or frame.now_ns - min(end.heard_ns for end in job.exits) < self._settle_s(culprit) * NS_PER_S
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
        if not culprit.killed and len(lost) == 1 and not any(end.node == lost[0] for end in job.exits):
            return self._open(job, "node_lost", lost[0], _rank_on(job, lost[0]), self._state.present[lost[0]].since_ns, at_ns, 0.9,
                              f"node {lost[0]} is silent, and the other ranks of job {job.job} failed after it")  # fmt: skip
        others = sorted(end.rank for end in job.exits if end.rank != culprit.rank)
        tail = f"; rank(s) {', '.join(map(str, others))} followed" if others else " before any other"
        text = f"rank {culprit.rank} on {culprit.node} {culprit.describe()}{tail}"
        return self._open(
            job, "rank_killed", culprit.node, culprit.rank, culprit.at_ns, at_ns, 0.97 if culprit.killed else 0.8, text
        )

    def _settle_s(self, culprit: Exit) -> float:
        if culprit.ordered:
            return self.settings.order_settle_s
        return self.settings.settle_s if culprit.killed or culprit.code > 255 else self.settings.failure_settle_s

    def _stopped(self, job: JobProgress, standing_s: float, at_ns: int) -> list[Verdict]:
        verdicts = []
        for rank, process in sorted(job.processes.items()):
            run = process.run_of(STATE_STOPPED)
            if run < self.settings.frozen_ticks or standing_s < self.settings.frozen_s:
                continue
            onset_ns = min(process.since_ns(run), max(job.progress_ns, process.since_ns(run) - NS_PER_S))
            text = f"rank {rank} on {process.node} is stopped (process state T) and job {job.job} has made no step for {standing_s:.1f} s"
            verdicts += self._open(job, "rank_frozen", process.node, rank, onset_ns, at_ns, 0.97, text)
        return verdicts

    def _vanished(self, job: JobProgress, at_ns: int) -> list[Verdict]:
        """A process that is no more, without anybody reporting its end."""
        runs = [(rank, process, process.run_of(STATE_NONE, STATE_ZOMBIE)) for rank, process in job.processes.items()]
        first_ns = {rank: process.since_ns(run) for rank, process, run in runs if 2 <= run < len(process.states)}
        if not first_ns:
            return []
        rank = min(first_ns, key=lambda number: (first_ns[number], number))
        alone = sum(at == first_ns[rank] for at in first_ns.values()) == 1
        text = f"the process of rank {rank} on {job.processes[rank].node} is gone, no launcher reported its end, and job {job.job} stands"
        return self._open(
            job, "rank_killed", job.processes[rank].node, rank, first_ns[rank], at_ns, 0.85 if alone else 0.4, text
        )

    def _lost(self, job: JobProgress, frame: Frame, standing_s: float, at_ns: int) -> list[Verdict]:
        silent = self._silent_nodes(job)
        nodes = set(job.nodes.values())
        if not silent or 2 * len(silent) > max(len(nodes), 2) or standing_s < self.settings.lost_s:
            return []
        verdicts = []
        for node in silent:
            since_ns = self._state.present[node].since_ns
            if job.progress_ns <= since_ns + 2 * NS_PER_S:
                text = f"node {node} is silent and job {job.job} has made no step for {standing_s:.1f} s"
                verdicts += self._open(job, "node_lost", node, _rank_on(job, node), since_ns, at_ns, 0.9, text)
        return verdicts

    def _silent_nodes(self, job: JobProgress) -> list[str]:
        nodes = sorted(set(job.nodes.values()))
        return [
            n for n in nodes if n in self._state.present and self._state.present[n].ticks >= self.settings.silent_ticks
        ]

    def _patience_s(self, job: JobProgress) -> float:
        usual_s = job.usual_step_ms() / 1000
        usual_s = usual_s if math.isfinite(usual_s) else 0.0
        plain = max(self.settings.hang_s, self.settings.hang_steps * usual_s)
        phase = job.phase_now()
        if phase == "first":
            return max(plain, self.settings.first_phase_s, 3.0 * job.longest_ms / 1000)
        return plain if phase in ("train", "") else max(plain, self.settings.long_phase_s, 3.0 * job.longest_ms / 1000)

    def _stuck(self, job: JobProgress, standing_s: float, at_ns: int) -> list[Verdict]:
        if 2 * len(self._silent_nodes(job)) > len(set(job.nodes.values())):
            return []
        if job.processes and all(p.run_of(STATE_NONE, STATE_ZOMBIE) for p in job.processes.values()):
            return []
        rank, why = _odd_process(job)
        if rank is not None:
            node = job.processes[rank].node
            text = f"job {job.job} has made no step for {standing_s:.0f} s and rank {rank} on {node} {why}, unlike the others"
            return self._open(job, "rank_frozen", node, rank, job.progress_ns, at_ns, 0.7, text)
        text = f"job {job.job} has made no step for {standing_s:.0f} s (usual step {job.usual_step_ms():.0f} ms) and no rank stands out"
        return self._open(job, "job_hang", "", -1, job.progress_ns, at_ns, 0.6, text)

    def _telemetry(self, frame: Frame) -> list[Verdict]:
        silences = self._state.present
        missing = sum(silence.ticks > 0 for silence in silences.values())
        verdicts = []
        for node in sorted(silences):
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
        if silence.ticks < self.settings.telemetry_ticks:
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
        victims = tuple(sorted({node for node in job.nodes.values() if node != opinion.node}))
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
    generation = event.attributes.get("generation", "")
    return event.attempt or (int(generation) if generation.isdigit() else 0)


def _rank_on(job: JobProgress, node: str) -> int:
    return min((rank for rank, where in job.nodes.items() if where == node), default=-1)


def _odd_process(job: JobProgress) -> tuple[int | None, str]:
    """The one rank whose process is unlike the others': in the kernel without processor time, or idle (or busy) alone."""
    waiting = [
        rank
        for rank, process in job.processes.items()
        if process.run_of(STATE_DISK) >= 5 and process.recent_cpu() < 0.02
    ]
    if len(waiting) == 1:
        return waiting[0], "waits in the kernel (process state D)"
    use = {rank: process.recent_cpu() for rank, process in job.processes.items()}
    if len(use) < 3 or not all(math.isfinite(value) for value in use.values()):
        return None, ""
    ranks, values = list(use), np.array(list(use.values()))
    away = np.abs(values - np.median(values))
    odd = int(np.argmax(away))
    if away[odd] > 0.5 and np.delete(away, odd).max() < 0.2:
        return ranks[odd], f"uses {values[odd]:.1f} cores"
    return None, ""


def _evidence(job: JobProgress, opinion: Opinion) -> tuple[Evidence, ...]:
    found: list[Evidence] = []
    process = job.processes.get(opinion.rank)
    if process is not None and process.at_ns:
        note = "1 R, 2 S, 3 D, 4 T (stopped), 5 Z, 0 gone"
        found.append(
            series_evidence(f"process state of rank {opinion.rank}", "state", process.at_ns, process.states, note=note)
        )
        found.append(
            series_evidence(f"processor use of rank {opinion.rank}", "cores", process.at_ns, process.cpu_cores)
        )
    if job.exits:
        ends = sorted(job.exits, key=lambda end: end.at_ns)
        note = ", ".join(f"rank {end.rank} {end.describe()}" for end in ends[:8])
        found.append(
            series_evidence(
                "ends of processes", "exit code", [e.at_ns for e in ends], [float(e.code) for e in ends], note=note
            )
        )
    ranks = sorted(job.rank_steps)
    note = "one value per rank, in order of rank"
    found.append(
        series_evidence(
            "last step", "step", [job.progress_ns] * len(ranks), [job.rank_steps[r] for r in ranks], note=note
        )
    )
    return tuple(found)
