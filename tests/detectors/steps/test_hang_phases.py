"""How long a job may stand depends on what it is at, and is learnt within bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from detectors.steps.hang import HangDetector, HangSettings
from detectors.steps.processes import KEPT, STATE_NONE, STATE_STOPPED, Processes
from detectors.steps.progress import JobProgress, Opinion
from detectors.steps.table import PHASES
from detectors.synthetic import Scene, SyntheticCluster
from trainwarden.clock import NS_PER_S
from trainwarden.records import Verdict

RANKS = np.array([0, 1])


def patience_s(phase: str, **learnt_ms: float) -> float:
    job = JobProgress("j", steps_seen=100, last_phase=phase, durations_ms=[100.0] * 20)
    job.phase_ms = {name: [value] for name, value in learnt_ms.items()}
    job.steps_seen = 0 if phase == "first" else 100
    job.processes.phase = np.array([PHASES[phase]])
    return HangDetector()._patience_s(job)


@pytest.mark.parametrize(
    ("phase", "learnt_s", "expected_s"),
    [
        ("train", math.nan, 15.0),
        ("eval", math.nan, 180.0),
        ("checkpoint", math.nan, 180.0),
        ("first", math.nan, 600.0),
        ("eval", 1.0, 60.0),
        ("checkpoint", 50.0, 4 * 50.0 + 15.0),
        ("checkpoint", 4000.0, 1800.0),
        ("first", 1.0, 120.0),
        ("first", 100.0, 4 * 100.0 + 15.0),
    ],
)
def test_patience_is_learnt_within_bounds(phase: str, learnt_s: float, expected_s: float) -> None:
    known = {phase: learnt_s * 1000} if math.isfinite(learnt_s) else {}
    assert patience_s(phase, **known) == pytest.approx(expected_s)


def test_steps_that_are_slow_by_nature_get_more_time_than_any_setting() -> None:
    job = JobProgress("j", steps_seen=9, last_phase="eval", durations_ms=[46_000.0], phase_ms={"eval": [1000.0]})
    assert HangDetector()._patience_s(job) == pytest.approx(15 + 3 * 46.0 * (1 + 4))
    job.durations_ms = [46_000.0] * 200
    assert HangDetector()._patience_s(job) == pytest.approx(15 + 3 * 46.0 * (1 + 4 / 200))


@pytest.mark.parametrize(("step_ms", "expected_s"), [(200.0, 15.0), (1000.0, 30.0), (6000.0, 60.0)])
def test_jobs_of_short_steps_have_the_usual_patience(step_ms: float, expected_s: float) -> None:
    job = JobProgress("j", steps_seen=9, last_phase="train", durations_ms=[step_ms] * 100)
    assert HangDetector()._patience_s(job) == pytest.approx(expected_s)


def test_a_pause_is_learnt_unless_somebody_holds_the_job_up() -> None:
    job = JobProgress("j", steps_seen=9, last_phase="train", durations_ms=[200.0] * 100, rows_end_ns=NS_PER_S)
    at_ns = np.array([41 * NS_PER_S])
    job.opinions = {"rank_frozen/n1": Opinion("rank_frozen", "n1", 1, 0, 0, 0)}
    job._keep_pause(at_ns, at_ns, 41 * NS_PER_S)
    assert HangDetector()._patience_s(job) == 15.0
    job.opinions, later_ns = {}, at_ns + 40 * NS_PER_S
    job._keep_pause(later_ns, later_ns, 81 * NS_PER_S)
    assert HangDetector()._patience_s(job) == pytest.approx(2 * 40.0 + 15)


def test_only_the_last_durations_of_a_phase_count() -> None:
    job = JobProgress("j")
    for duration_ms in (90_000.0, *[7000.0] * 8, *[1000.0] * 9):
        job._keep_phase("eval", duration_ms)
    assert job.longest_ms("eval") == 7000.0, "brief ones do not push out long ones"


def evaluated(seconds: int, stands_s: int) -> list[Verdict]:
    """Evaluations of a second each, then one that does not end."""
    detector = HangDetector(HangSettings(phase_least_s=30.0))
    until = seconds + stands_s

    def script(now: int) -> Scene | None:
        return Scene(standing=True, phase="eval") if now >= seconds else None

    cluster = SyntheticCluster(4, seed=2, evaluate_every=60)
    return [v for frame in cluster.frames(until, script) for v in detector.update(frame)]


def test_an_evaluation_that_never_ends_is_a_hang_once_others_were_short() -> None:
    verdicts = evaluated(40, 45)
    assert [v.kind for v in verdicts if not v.clears][:1] == ["job_hang"]
    assert 30 <= verdicts[0].value < 36
    assert evaluated(40, 25) == []


def test_runs_of_states_end_with_another_state_and_begin_anew_on_another_node() -> None:
    processes, ranks = Processes(), RANKS
    processes.settle(ranks, ["a", "b"])
    samples: list[list[float]] = [[2, 4], [4, 4], [4, 2], [4, math.nan]]
    for second, states in enumerate(samples):
        processes.note(ranks, second * NS_PER_S, *_columns(states))
    assert processes.stopped_run.tolist() == [3, 0]
    assert processes.since_ns(0, 3) == NS_PER_S
    processes.settle(ranks, ["a", "c"])
    assert processes.seen.tolist() == [4, 0]
    assert processes.history(0)[1] == [2.0, float(STATE_STOPPED), float(STATE_STOPPED), float(STATE_STOPPED)]
    assert processes.history(7) == ([], [], [])


def test_a_ring_keeps_the_newest() -> None:
    processes, ranks = Processes(), RANKS
    processes.settle(ranks, ["a", "b"])
    for second in range(40):
        processes.note(ranks, second, *_columns([second % 2 * 2.0, float(STATE_NONE)]))
    times, states, _ = processes.history(0)
    assert times == list(range(40 - KEPT, 40))
    assert states[-1] == 2.0
    assert processes.gone_run.tolist() == [0, KEPT]


def _columns(states: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    return np.array(states), np.full(2, 0.5), np.full(2, 2.0)
