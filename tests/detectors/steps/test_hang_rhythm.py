"""Limits follow the job: steps of a fifth of a second to three minutes, with all their pauses, and collectors that report rarely."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from detectors.base import AlignedTick, FamilyMatrix, Frame
from detectors.steps.hang import HangDetector
from detectors.steps.processes import STATE_NONE, STATE_STOPPED
from tests.detectors.steps.jobs import JOB, START_NS, topology_of
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import StepReport, StepRow, Verdict

RANKS = 4
PHASES = {"first": 1.0, "train": 2.0, "eval": 3.0}
METRICS = ("alive", "state", "cpu_cores", "last_step", "step_age_s", "phase")
NODES = tuple(f"n{rank}" for rank in range(RANKS))
Span = tuple[str, float]


@dataclass
class Job:
    """A job made of spans (what, seconds), then it stands: `first`, `train`, `eval`, a `save` within a step, an unannounced `pause`.

    `every` is how many seconds pass between two reports of a node, `silent` and `states` say what is odd in which second.
    """

    spans: Sequence[Span]
    stands_s: int = 0
    every: int = 1
    tick_s: int = 1
    silent: dict[str, range] = field(default_factory=dict)
    states: dict[int, tuple[range, int]] = field(default_factory=dict)

    def frames(self) -> Iterator[Frame]:
        """One frame a tick."""
        rows, topology = list(self._rows()), topology_of(RANKS)
        total_s = int(sum(length_s for _, length_s in self.spans)) + self.stands_s
        for second in range(self.tick_s, total_s, self.tick_s):
            ended = [row for row in rows if second - self.tick_s < _end_s(row) <= second]
            now_ns = START_NS + second * NS_PER_S
            reports = tuple(_report(rank, second, ended) for rank in range(RANKS)) if ended else ()
            yield Frame(now_ns + 300 * NS_PER_MS, (self._tick(second, rows, now_ns),), reports, (), topology)

    def _rows(self) -> Iterator[StepRow]:
        at_s, step = 0.0, 0
        for what, length_s in self.spans:
            if what != "pause":
                step += what != "eval"
                saved_ms = 1000.0 * length_s / 2 if what == "save" else math.nan
                phase = "checkpoint" if what == "save" else what
                yield StepRow(
                    step=step,
                    phase=phase,
                    started_at_ns=START_NS + int(at_s * NS_PER_S),
                    duration_ms=1000 * length_s,
                    checkpoint_ms=saved_ms,
                )
            at_s += length_s

    def _tick(self, second: int, rows: Sequence[StepRow], now_ns: int) -> AlignedTick:
        here = [n for n in NODES if second not in self.silent.get(n, ()) and (second + int(n[1:])) % self.every == 0]
        past = [row for row in rows if _end_s(row) <= second]
        last, phase = (float(past[-1].step), "train") if past else (np.nan, "first")
        if any(
            row.phase == "eval" and _end_s(row) > second >= (row.started_at_ns - START_NS) / NS_PER_S for row in rows
        ):
            phase = "eval"
        age_s = second - _end_s(past[-1]) if past else np.nan
        values = []
        for node in here:
            when, state = self.states.get(int(node[1:]), (range(0), 0))
            values.append([1.0, float(state) if second in when else 2.0, 0.5, last, age_s, PHASES[phase]])
        family = FamilyMatrix(
            "process", tuple((n, f"rank{n[1:]}") for n in here), METRICS, np.array(values, np.float32).reshape(-1, 6)
        )
        return AlignedTick(now_ns, 1000 * self.tick_s, NODES, np.array([n in here for n in NODES]), {"process": family})


def _report(rank: int, second: int, rows: Sequence[StepRow]) -> StepReport:
    at_ns = START_NS + second * NS_PER_S
    return StepReport(node=NODES[rank], seq=second, observed_at_ns=at_ns, boot_id="b", job=JOB, rank=rank, world=RANKS,
                      rows=tuple(rows))  # fmt: skip


def _end_s(row: StepRow) -> float:
    return (row.started_at_ns - START_NS) / NS_PER_S + row.duration_ms / 1000


def said(job: Job) -> list[Verdict]:
    detector = HangDetector()
    return [v for frame in job.frames() for v in detector.update(frame) if not v.clears]


def spoken(job: Job) -> set[tuple[str, str]]:
    return {(v.kind, v.entity.name) for v in said(job)}


def steady(step_s: float, steps: int = 8) -> list[Span]:
    rng = np.random.default_rng(int(10 * step_s))
    return [("train", step_s * float(rng.uniform(0.95, 1.1))) for _ in range(steps)]


def busy(step_s: float) -> list[Span]:
    """Warm-up, steps, an evaluation, saves, an announced and an unannounced rest."""
    slow = [("first", max(30.0, 2 * step_s)), ("train", 1.5 * step_s), ("train", 1.3 * step_s)]
    few = steady(step_s, max(4, int(20 / step_s)))
    return [
        *slow,
        *few,
        ("eval", max(90.0, step_s)),
        *few,
        ("save", step_s + 12.0),
        *few,
        ("pause", 12.0),
        *few,
        ("save", step_s + 12.0),
        *few,
    ]


@pytest.mark.parametrize(("step_s", "within_s"), [(0.2, 40), (6.0, 61), (45.0, 300), (180.0, 1200)])
def test_a_job_with_all_its_pauses_does_not_hang_and_one_that_stands_is_named(step_s: float, within_s: int) -> None:
    assert said(Job(busy(step_s))) == []
    found = said(Job(busy(step_s), stands_s=within_s + 2))
    assert {(v.kind, v.entity.name) for v in found} == {("job_hang", JOB)}
    assert 15 <= found[0].value <= within_s


def test_a_hang_of_steps_of_three_minutes_is_named_within_four_of_them_once_many_are_known() -> None:
    found = said(Job([("first", 200.0), *steady(180.0, 24)], stands_s=725))
    assert [(v.kind, v.value <= 720) for v in found] == [("job_hang", True)]


@pytest.mark.parametrize("step_s", [6.0, 45.0])
def test_telemetry_that_is_lost_within_a_long_step_is_no_lost_node(step_s: float) -> None:
    job = Job([("first", 20.0), *steady(step_s, 6)])
    start = int(20 + 3.2 * step_s)
    job.silent = {"n2": range(start, start + min(12, int(step_s) - 1))}
    assert ("node_lost", "n2") not in spoken(job)


@pytest.mark.parametrize("step_s", [0.2, 45.0])
def test_a_node_that_is_silent_when_its_job_is_late_is_lost(step_s: float) -> None:
    job = Job([("first", 20.0), *steady(step_s, 20)], stands_s=int(2 * step_s) + 20)
    gone = int(sum(length_s for _, length_s in job.spans))
    job.silent = {"n2": range(gone, 10**6)}
    found = said(job)
    assert (found[0].kind, found[0].entity.name) == ("node_lost", "n2")
    assert found[0].value <= max(5.0, 1.6 * step_s)


def test_a_node_silent_during_an_evaluation_is_not_lost_until_it_has_lasted_too_long() -> None:
    spans = [("first", 20.0), *steady(0.5, 40), ("eval", 30.0), *steady(0.5, 40), ("eval", 33.0), *steady(0.5, 10)]
    assert spoken(Job(spans, silent={"n1": range(100, 118)})) == set()


@pytest.mark.parametrize("every", [5, 10])
def test_collectors_that_report_rarely_are_not_silent(every: int) -> None:
    job = Job([("first", 20.0), *steady(0.5, 300)], every=every)
    found = said(job)
    assert {v.kind for v in found} <= {"telemetry_lost"}
    assert all(v.window_end_ns < START_NS + 60 * NS_PER_S for v in found)


def test_a_grid_of_ten_seconds_makes_no_job_stand() -> None:
    spans = [("first", 20.0), *steady(0.5, 400)]
    assert said(Job(spans, tick_s=10)) == []
    assert spoken(Job(spans, stands_s=60, tick_s=10)) == {("job_hang", JOB)}


@pytest.mark.parametrize(("state", "kind"), [(STATE_STOPPED, "rank_frozen"), (STATE_NONE, "rank_killed")])
def test_a_process_that_is_odd_for_two_seconds_of_a_long_step_is_a_hiccup_and_for_four_a_fault(
    state: int, kind: str
) -> None:
    spans = [("first", 60.0), *steady(45.0, 4)]
    assert spoken(Job(spans, states={2: (range(130, 132), state)})) == set()
    found = said(Job(spans, states={2: (range(130, 200), state)}))
    assert {(v.kind, v.entity.name) for v in found} == {(kind, "n2")}
    assert found[0].window_end_ns <= START_NS + 135 * NS_PER_S


def test_reports_that_come_every_fifty_seconds_are_the_pace_of_the_job() -> None:
    """A line of a log for each hundred steps: the duration is that of one step."""
    spans = [span for _ in range(8) for span in (("pause", 49.5), ("train", 0.5))]
    assert said(Job([("first", 50.0), *spans])) == []
    assert spoken(Job([("first", 50.0), *spans], stands_s=130)) == {("job_hang", JOB)}


def test_a_job_of_long_steps_is_not_forgotten_while_its_processes_are_heard_of() -> None:
    detector = HangDetector()
    frames = Job([("first", 900.0), ("train", 900.0), ("train", 900.0)], stands_s=2400, tick_s=10).frames()
    assert [v for frame in frames for v in detector.update(frame)] == []
    assert JOB in detector._state.jobs
