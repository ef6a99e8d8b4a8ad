"""How far each rank of a job is, how long a step usually takes, and what its processes look like."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from detectors.steps.exits import Exit
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import StepReport

STATE_DISK, STATE_STOPPED, STATE_ZOMBIE, STATE_NONE = 3, 4, 5, 0
PHASE_NAMES = ("", "first", "train", "eval", "checkpoint")
_KEPT_DURATIONS = 200
_KEPT_SAMPLES = 16
_TRUSTED_CLOCK_NS = 10 * NS_PER_S


class Process(msgspec.Struct):
    """What the collector says of one rank's process, over the last ticks."""

    node: str
    at_ns: list[int] = []
    states: list[int] = []
    cpu_cores: list[float] = []
    phase: int = 0

    def note(self, node: str, at_ns: int, state: float, cpu_cores: float, phase: float) -> None:
        """One tick."""
        if node != self.node:
            self.node, self.at_ns, self.states, self.cpu_cores = node, [], [], []
        keep = 1 - _KEPT_SAMPLES
        self.at_ns = [*self.at_ns[keep:], at_ns]
        self.states = [*self.states[keep:], int(state) if math.isfinite(state) else -1]
        self.cpu_cores = [*self.cpu_cores[keep:], cpu_cores]
        self.phase = int(phase) if math.isfinite(phase) else self.phase

    def run_of(self, *wanted: int) -> int:
        """How many of the newest samples in a row are in one of these states."""
        count = 0
        for state in reversed(self.states):
            if state not in wanted:
                break
            count += 1
        return count

    def since_ns(self, run: int) -> int:
        """When the newest `run` samples began."""
        return self.at_ns[-run] if run else 0

    def recent_cpu(self, samples: int = 3) -> float:
        """Mean processor use of the newest samples; NaN when too few are known."""
        known = [value for value in self.cpu_cores[-samples:] if math.isfinite(value)]
        return float(np.mean(known)) if len(known) >= samples else math.nan


class Opinion(msgspec.Struct):
    """Something said and not yet taken back."""

    kind: str
    node: str
    rank: int
    attempt: int
    onset_ns: int
    said_ns: int


class JobProgress(msgspec.Struct):
    """One job's attempt, as far as this worker heard of it.

    `rank_steps` is the newest step of each rank by any source, `reported` by its own step reports.
    """

    job: str
    attempt: int = -1
    started_ns: int = 0
    progress_ns: int = 0
    heard_ns: int = 0
    steps_seen: int = 0
    newest_step: int = -1
    nodes: dict[int, str] = {}
    rank_steps: dict[int, int] = {}
    reported: dict[int, int] = {}
    durations_ms: list[float] = []
    longest_ms: float = 0.0
    last_phase: str = ""
    processes: dict[int, Process] = {}
    exits: list[Exit] = []
    decided: bool = False
    ending: bool = False
    failed_ns: int = 0
    opinions: dict[str, Opinion] = {}

    def begin(self, attempt: int, event_ns: int) -> None:
        """A newer attempt: what was learnt of step times stays, all else starts again."""
        self.attempt, self.started_ns, self.progress_ns = attempt, event_ns, event_ns
        self.nodes, self.rank_steps, self.reported, self.processes, self.exits = {}, {}, {}, {}, []
        self.steps_seen, self.newest_step, self.last_phase, self.decided, self.ending = 0, -1, "", False, False

    def take_in(self, report: StepReport, event_ns: int) -> None:
        """Rows of one rank; only a step further than any reported by this rank is progress."""
        self.nodes[report.rank] = report.node
        known = self.reported.get(report.rank, -1)
        fresh = [row for row in report.rows if row.step > known]
        if not fresh:
            return
        last = max(fresh, key=lambda row: row.step)
        self.reported[report.rank] = last.step
        self.rank_steps[report.rank] = max(last.step, self.rank_steps.get(report.rank, -1))
        self.steps_seen += len(fresh)
        for row in fresh:
            if row.step > self.newest_step:
                self._learn(row.phase, row.duration_ms)
        if last.step >= self.newest_step:
            self.newest_step, self.last_phase = last.step, last.phase
        self.moved(last.started_at_ns + int(last.duration_ms * NS_PER_MS), event_ns)

    def moved(self, at_ns: int, event_ns: int) -> None:
        """Progress was made at `at_ns` by the rank's clock; a clock far from the grid's is not believed."""
        believed = at_ns if abs(at_ns - event_ns) < _TRUSTED_CLOCK_NS else event_ns
        self.progress_ns = max(self.progress_ns, min(believed, event_ns + 3 * NS_PER_S))

    def usual_step_ms(self) -> float:
        """Median duration of the last plain steps; NaN before the first."""
        return float(np.median(self.durations_ms)) if self.durations_ms else math.nan

    def phase_now(self) -> str:
        """What the job is at, as far as its processes or its last rows say."""
        phases = [process.phase for process in self.processes.values() if 0 < process.phase < len(PHASE_NAMES)]
        unusual = next((PHASE_NAMES[phase] for phase in phases if phase != 2), "")
        return unusual or (self.last_phase if self.steps_seen else "first")

    def _learn(self, phase: str, duration_ms: float) -> None:
        if not math.isfinite(duration_ms):
            return
        if phase in ("train", ""):
            self.durations_ms = [*self.durations_ms[1 - _KEPT_DURATIONS :], duration_ms]
        else:
            self.longest_ms = max(self.longest_ms * 0.999, duration_ms)
