"""How far each rank of a job is, how long a step and each special phase usually take, and what its processes look like."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from detectors.state import Array
from detectors.steps.assembly import rows_by_step
from detectors.steps.exits import Exit
from detectors.steps.processes import Ints, Processes
from detectors.steps.table import PHASES, PLAIN_PHASES, StepTable
from trainwarden.clock import NS_PER_MS, NS_PER_S

PHASE_NAMES = tuple(PHASES)
SPECIAL_PHASES = ("first", "eval", "checkpoint")
_NOT_PLAIN = (PHASES["first"], PHASES["eval"], PHASES["checkpoint"])
BRIEF = "brief "
"""Before the name of a phase: its durations that are too short to say how long another one may take, copies to memory for example."""
_KEPT_DURATIONS = 200
_KEPT_PHASES = 8
_PAUSE_MS = 5000.0
"""Longer idle times between two steps are pauses: saves and evaluations that nobody announces, reports that come rarely."""
_ASKED = 64
_TRUSTED_CLOCK_NS, _AHEAD_NS = 10 * NS_PER_S, 3 * NS_PER_S


class Opinion(msgspec.Struct):
    """Something said and not yet taken back."""

    kind: str
    node: str
    rank: int
    attempt: int
    onset_ns: int
    said_ns: int


def _no_ranks() -> Array:
    return np.zeros(0, dtype=np.int64)


class JobProgress(msgspec.Struct):
    """One job's attempt, as far as this worker heard of it. Arrays are over ranks.

    `rank_steps` is the newest step of each rank by any source, `reported` by its own step reports, -1 for none; `phase_ms` holds the last
    durations of first steps, evaluations and saves, `pause_ms` the last pauses. `rows_end_ns` is the end of the newest step reported,
    `tick_ns` the interval of the grid: what is younger than that may just not have been sampled. `senders` are nodes that send visibly
    while the job stands (see `sends`), and their bytes per second.
    """

    job: str
    attempt: int = -1
    started_ns: int = 0
    progress_ns: int = 0
    heard_ns: int = 0
    steps_seen: int = 0
    newest_step: int = -1
    nodes: list[str] = []
    rank_steps: Array = msgspec.field(default_factory=_no_ranks)
    reported: Array = msgspec.field(default_factory=_no_ranks)
    durations_ms: list[float] = []
    phase_ms: dict[str, list[float]] = {}
    pause_ms: list[float] = []
    rows_end_ns: int = 0
    tick_ns: int = NS_PER_S
    last_phase: str = ""
    processes: Processes = msgspec.field(default_factory=Processes)
    exits: dict[int, Exit] = {}
    decided: bool = False
    ending: bool = False
    failed_ns: int = 0
    opinions: dict[str, Opinion] = {}
    senders: dict[str, float] = {}

    def begin(self, attempt: int, event_ns: int) -> None:
        """A newer attempt: what was learnt of durations stays, all else starts again."""
        self.attempt, self.started_ns, self.progress_ns = attempt, event_ns, event_ns
        self.nodes, self.rank_steps, self.reported = [], _no_ranks(), _no_ranks()
        self.processes, self.exits = Processes(), {}
        self.steps_seen, self.newest_step, self.last_phase, self.decided, self.ending = 0, -1, "", False, False
        self.rows_end_ns, self.senders = 0, {}

    def take_in(self, table: StepTable, event_ns: int) -> None:
        """Rows of this attempt; only a step further than any reported by its rank is progress."""
        self._note_nodes(table)
        self._take_in_evaluations(table, event_ns)
        fresh = (table.rank >= 0) & (table.step > self.reported[np.maximum(table.rank, 0)])
        if not fresh.any():
            return
        ranks, steps = table.rank[fresh], table.step[fresh]
        np.maximum.at(self.reported, ranks, steps)
        np.maximum.at(self.rank_steps, ranks, steps)
        durations = np.nan_to_num(table.number("duration_ms")[table.some])
        starts_ns = table.started_ns[fresh[table.some]]
        ends_ns = starts_ns + (durations * NS_PER_MS).astype(np.int64)[fresh[table.some]]
        ends_ns = ends_ns if ends_ns.size else np.array([event_ns])
        if not self.steps_seen:
            self._keep_phase("first", (int(ends_ns.min()) - self.started_ns) / NS_PER_MS)
        self._keep_pause(starts_ns, ends_ns, event_ns)
        self.steps_seen += int(fresh.sum())
        self._learn(table, fresh & (table.step > self.newest_step))
        last = int(np.flatnonzero(fresh)[np.argmax(steps)])
        if table.step[last] >= self.newest_step:
            self.newest_step, self.last_phase = int(table.step[last]), table.rows[last].phase
        self.moved(self._believed(ends_ns, event_ns), event_ns)

    def _take_in_evaluations(self, table: StepTable, event_ns: int) -> None:
        """Evaluations have the number of the step before them: they are progress, though no step is."""
        known = self.reported[np.maximum(table.rank, 0)]
        rows = np.flatnonzero((table.phase == PHASES["eval"]) & (table.rank >= 0) & (table.step <= known))[:_ASKED]
        if not rows.size:
            return
        durations_ms = np.nan_to_num(table.number("duration_ms")[rows])
        ends_ns = np.array([table.rows[row].started_at_ns for row in rows]) + (durations_ms * NS_PER_MS).astype(
            np.int64
        )
        newest_ns = int(ends_ns.max())
        if self.rows_end_ns < newest_ns < event_ns + self._trusted_ns:
            self._keep_phase("eval", float(durations_ms.max()))
            self.rows_end_ns, self.last_phase = newest_ns, "eval"
            self.moved(newest_ns, event_ns)

    def processes_moved(self, ranks: Ints, steps: Array, ages_s: Array, at_ns: int) -> None:
        """Steps that the collectors saw the ranks finish, `ages_s` before `at_ns`."""
        self._fit(int(ranks.max()) + 1 if ranks.size else 0)
        further = np.isfinite(ages_s) & (np.nan_to_num(steps, nan=-1.0) > self.rank_steps[ranks])
        if further.any():
            self.rank_steps[ranks[further]] = steps[further].astype(np.int64)
            ends_ns = at_ns - (ages_s[further].astype(np.float64) * NS_PER_S).astype(np.int64)
            self.moved(self._believed(ends_ns, at_ns), at_ns)

    def moved(self, at_ns: int, event_ns: int) -> None:
        """Progress was made at `at_ns`, which is not later than the grid's present by more than a lateness or two ticks."""
        self.progress_ns = max(self.progress_ns, min(at_ns, event_ns + max(_AHEAD_NS, 2 * self.tick_ns)))

    def _believed(self, ends_ns: Ints, event_ns: int) -> int:
        """The latest of some times; a clock far from the grid's is not believed, and counts as the grid's present."""
        near = np.abs(ends_ns - event_ns) < self._trusted_ns
        return int(np.where(near, ends_ns, event_ns).max())

    @property
    def _trusted_ns(self) -> int:
        return max(_TRUSTED_CLOCK_NS, 2 * self.tick_ns)

    def usual_step_ms(self) -> float:
        """Median duration of the last plain steps; NaN before the first."""
        if not self.durations_ms:
            return math.nan
        # of a short list of plain numbers this is four times as quick as an array's median
        ordered, half = sorted(self.durations_ms), len(self.durations_ms) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

    def longest_step_ms(self) -> float:
        """The longest of the last plain steps, drawn out while few are known; NaN before the first.

        Of few steps the longest says little: five times as much is allowed of one, twice of four, no more of many.
        """
        known = len(self.durations_ms)
        return max(self.durations_ms) * (1.0 + 4.0 / known) if known else math.nan

    def longest_pause_ms(self) -> float:
        """The longest of the last pauses between two steps; 0 when there was none."""
        return max(self.pause_ms, default=0.0)

    def longest_ms(self, phase: str) -> float:
        """The longest of the last durations of a special phase; NaN when none is known."""
        known = (*self.phase_ms.get(phase, ()), *self.phase_ms.get(BRIEF + phase, ()))
        return max(known, default=math.nan)

    def is_learnt(self, phase: str) -> bool:
        """Whether it is known how long a phase may take: copies to memory say nothing of the first save to a shared disk."""
        return bool(self.phase_ms.get(phase))

    def phase_now(self) -> str:
        """What the job is at, as far as its processes or its last rows say; who writes to disks, or sends, saves, whether or not anybody
        said so.

        A row of the phase checkpoint tells of a save that is over.
        """
        phases = self.processes.phase
        first, evaluation, save = _NOT_PLAIN
        unusual = phases[(phases == first) | (phases == evaluation) | (phases == save)]
        if unusual.size:
            return PHASE_NAMES[int(unusual[0])]
        if not self.steps_seen:
            return "first"
        if self.writers().size or self.sends_a_save():
            return "checkpoint"
        return "train" if self.last_phase == "checkpoint" else self.last_phase

    def is_moving(self, at_ns: int) -> bool:
        """Whether the newest step is no older than steps usually get."""
        usual_ms = self.usual_step_ms() if self.durations_ms else 0.0
        return self.steps_seen > 0 and at_ns - self.progress_ns < max(
            _AHEAD_NS, 2 * self.tick_ns, int(2 * usual_ms * NS_PER_MS)
        )

    def writers(self) -> Ints:
        """Ranks that have written visibly to disks since the last step."""
        return self.processes.writing_since(self.progress_ns)

    def sends_a_save(self) -> bool:
        """Whether a save to a store elsewhere explains that the job stands.

        All processes live, and who stands out sends; if nobody stands out, the first rank's node (it saves for all) or most nodes do.
        """
        heard = self.processes.ranks
        if not self.senders or (self.processes.stopped_run[heard] + self.processes.gone_run[heard]).any():
            return False
        rank, _ = self.processes.odd()
        if rank is not None:
            return self.processes.nodes[rank] in self.senders
        return self.nodes[0] in self.senders or 2 * len(self.senders) > len({node for node in self.nodes if node})

    def at_phase(self, phase: str) -> Ints:
        """Ranks whose processes say that they are at a phase."""
        return np.flatnonzero(self.processes.phase == PHASES[phase])

    def _note_nodes(self, table: StepTable) -> None:
        self._fit(int(table.report_ranks.max()) + 1)
        self.nodes = table.nodes_by_rank(self.nodes)

    def _fit(self, size: int) -> None:
        more = size - len(self.nodes)
        if more > 0:
            unheard = np.full(more, -1, dtype=np.int64)
            self.nodes = [*self.nodes, *[""] * more]
            self.rank_steps = np.concatenate([self.rank_steps, unheard])
            self.reported = np.concatenate([self.reported, unheard])

    def _learn(self, table: StepTable, fresh: Array) -> None:
        """Durations of steps that no rank reported before."""
        durations, saves = table.number("duration_ms"), table.number("checkpoint_ms")
        for _, rows in rows_by_step(table.step, fresh):
            row = int(rows[0])
            phase = int(table.phase[row])
            if not math.isfinite(durations[row]):
                continue
            saved_ms = float(np.nan_to_num(saves[rows]).max())
            if saved_ms > 0:
                self._keep_phase("checkpoint", saved_ms)
            elif phase in PLAIN_PHASES:
                self.durations_ms = [*self.durations_ms[1 - _KEPT_DURATIONS :], float(durations[row])]
            else:
                self._keep_phase(table.rows[row].phase, float(durations[row]))

    def _keep_pause(self, starts_ns: Ints, ends_ns: Ints, event_ns: int) -> None:
        """Idle time between the last step and these; none is learnt while somebody is said to hold the job up."""
        if not starts_ns.size or abs(int(ends_ns.max()) - event_ns) >= self._trusted_ns:
            return
        idle_ms = (int(starts_ns.min()) - self.rows_end_ns) / NS_PER_MS if self.rows_end_ns else 0.0
        if idle_ms > _PAUSE_MS and not any(opinion.node for opinion in self.opinions.values()):
            self.pause_ms = [*self.pause_ms[1 - _KEPT_PHASES :], idle_ms]
        self.rows_end_ns = max(self.rows_end_ns, int(ends_ns.max()))

    def _keep_phase(self, phase: str, duration_ms: float) -> None:
        if phase in SPECIAL_PHASES and math.isfinite(duration_ms):
            name = BRIEF + phase if phase != "first" and duration_ms < _PAUSE_MS else phase
            self.phase_ms[name] = [*self.phase_ms.get(name, [])[1 - _KEPT_PHASES :], max(0.0, duration_ms)]
