"""Every kind of fault moves the signals that the taxonomy names, and nothing of those it does not concern."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from collectors.simulated.families import columns
from collectors.simulated.faults import kinds
from collectors.simulated.faults.base import Drive, FaultClass, Show
from collectors.simulated.incidents import Incident, places
from collectors.simulated.layout import Layout
from collectors.simulated.noise import F64, Ints
from collectors.simulated.spec import Spec
from collectors.simulated.state import Steps
from collectors.simulated.target import Scope
from tests.collectors.simulated.kit import (
    LASTS_S,
    SPEC,
    START_S,
    TARGETS,
    Run,
    healthy,
    simulated,
    stops,
    struck,
    struck_ranks,
)

KINDS = sorted(kinds())
WINDOW = slice(START_S + LASTS_S * 3 // 4, START_S + LASTS_S - 2)
WHOLE = slice(START_S, START_S + LASTS_S)


def test_there_are_at_least_forty_kinds_and_each_class_has_several() -> None:
    found = list(kinds().values())
    assert len(found) >= 40
    for cls in FaultClass:
        assert sum(kind.cls is cls for kind in found) >= 3, cls


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> tuple[Run, Incident]:
    """One run per kind, for all tests that look at it."""
    return struck(kinds()[request.param])


def test_a_kind_moves_its_signals(case: tuple[Run, Incident]) -> None:
    run, incident = case
    assert incident.kind.signals
    for signal in incident.kind.signals:
        if signal != "steps.checkpoint+":  # saves are minutes apart: see the test of its own
            assert moved(signal, run, healthy(), incident), f"{incident.kind.name}: {signal} did not move"


def test_a_kind_leaves_bystanders_alone(case: tuple[Run, Incident]) -> None:
    run, incident = case
    bystanders = np.setdiff1d(np.arange(SPEC.nodes), concerned(run, incident))
    if incident.target.scope not in (Scope.ZONE, Scope.RAIL, Scope.SPINE, Scope.FABRIC):
        assert len(bystanders) > 0
    for ours, theirs in zip(run.intervals, healthy().intervals, strict=True):
        for family in ("host", "gpu", "nic", "port", "process", "board"):
            same = np.array_equal(ours.family(family)[bystanders], theirs.family(family)[bystanders], equal_nan=True)
            assert same, f"{incident.kind.name} changed {family} of nodes that it does not concern"
        assert np.array_equal(ours.heard[bystanders], theirs.heard[bystanders])


def concerned(run: Run, incident: Incident) -> Ints:
    """Nodes that may look different: those struck, and those of their jobs when the fault reaches the job."""
    kind, nodes = incident.kind, [incident.target.nodes]
    if stops(kind) or any(isinstance(effect, Drive) for effect in kind.effects):
        nodes += [np.arange(SPEC.nodes)[run.simulator.placement.grids[job].span] for job in incident.target.jobs]
    return np.unique(np.concatenate(nodes))


# --- what "moved" means ----------------------------------------------------------------------------------------------------


def moved(signal: str, run: Run, twin: Run, incident: Incident) -> bool:
    if signal.startswith("log:"):
        code = signal[4:]
        if code == "hung_task":  # speaks after two minutes only
            return any(say.code == code and say.after_s == 120 for say in incident.kind.says)
        return code in run.codes(incident.target.nodes.tolist()) and code not in twin.codes(range(SPEC.nodes))
    subject, sign = signal[:-1], 1.0 if signal[-1] == "+" else -1.0
    if subject in WORDS:
        return WORDS[subject](run, twin, incident)
    if subject.startswith("steps."):
        return step_signal(subject[6:], run, twin, incident) * sign > 0
    family, _, column = subject.partition(".")
    if column == "absent":
        return absent(family, run, incident) > absent(family, twin, incident)
    return change(family, column, run, twin, incident) * sign > 0


def rows(family: str, column: str, run: Run, incident: Incident) -> F64:
    """[time, struck row] of a column."""
    _, _, index = places(Show(f"{family}.{column}", "set", 0), incident.target)
    return run.column(family, columns(family)[column])[(slice(None), *index)]


def change(family: str, column: str, run: Run, twin: Run, incident: Incident) -> float:
    ours, theirs = rows(family, column, run, incident), rows(family, column, twin, incident)
    window = WHOLE if incident.kind.course.shape == "pulses" or stops(incident.kind) else WINDOW
    return float(np.nanmean(ours[window]) - np.nanmean(theirs[window]))


def absent(family: str, run: Run, incident: Incident) -> int:
    column = "power_w" if family == "gpu" else "rx_bytes_per_s"
    return int(np.isnan(rows(family, column, run, incident)[WHOLE]).sum())


def step_signal(name: str, run: Run, twin: Run, incident: Incident) -> float:
    read = STEPS[name]
    job = incident.target.jobs[0]
    if incident.target.scope is Scope.SPINE:
        job = incident.target.jobs[-1]
    ranks = struck_ranks(incident, run, job)
    end = START_S + LASTS_S
    ours, theirs = run.steps(job, START_S + 5, end), twin.steps(job, START_S + 5, end)
    assert len(ours) >= 2
    return float(np.mean([read(s, ranks) for s in ours]) - np.mean([read(s, ranks) for s in theirs]))


def _stage(steps: Steps, _: object) -> float:
    own = steps.past.outcome.own
    return float(own[-1].mean() / own[0].mean())


STEPS: dict[str, Callable[[Steps, Ints], float]] = {
    "local": lambda s, ranks: float(s.past.outcome.own.ravel()[ranks].mean()),
    "duration": lambda s, _: s.past.finish - s.past.begin,
    "data": lambda s, ranks: float(s.past.outcome.data.ravel()[ranks].mean()),
    "stage": _stage,
    "spread": lambda s, _: float(np.std(s.past.outcome.own.mean(axis=(0, 2)))),
    "loss": lambda s, _: s.loss,
    "finite": lambda s, _: float(s.finite),
    "grad_norm_local": lambda s, ranks: float(s.grad_norm_local[ranks].mean()),
}


def silent(run: Run, twin: Run, incident: Incident) -> bool:
    nodes = incident.target.nodes
    inside = [interval.heard[nodes].any() for interval in run.intervals[START_S + 1 : START_S + LASTS_S]]
    return not any(inside) and any(interval.heard[nodes].any() for interval in twin.intervals)


def repeats(run: Run, twin: Run, incident: Incident) -> bool:
    ours, theirs = rows("host", "cpu_busy_ratio", run, incident), rows("host", "cpu_busy_ratio", twin, incident)
    return np.unique(ours[WINDOW]).size == 1 < np.unique(theirs[WINDOW]).size


WORDS: dict[str, Callable[[Run, Run, Incident], bool]] = {
    "ticks": silent,
    "stuck": repeats,
    "late": lambda run, twin, i: bool(np.all(run.intervals[START_S + 9].late_s[i.target.nodes] > 0)),
    "stamps": lambda run, twin, i: bool(
        np.all(
            run.intervals[START_S + 9].offset_ms[i.target.nodes]
            > twin.intervals[START_S + 9].offset_ms[i.target.nodes] + 50
        )
    ),
}


# --- kinds that need a closer look -----------------------------------------------------------------------------------------


def test_checkpoints_stall() -> None:
    spec = Spec(nodes=4, seed=2, jobs="2:ddp", light_share=0.0, idle_share=0.0)
    usual, stalled = healthy(spec, 1300), simulated(spec, "checkpoint_stall@job-000:10+1280x6", 1300)
    saves = [
        [s.past.end - s.past.finish for s in run.steps(0, 0, 1300) if s.past.phase == "checkpoint"]
        for run in (usual, stalled)
    ]
    assert saves[0]
    assert np.mean(saves[1]) > 4 * np.mean(saves[0])


@pytest.mark.parametrize("name", ["weak_gpu", "gpu_thermal", "clock_stuck_low", "cpu_contention"])
def test_a_slow_rank_waits_less_and_its_peers_wait_more(name: str) -> None:
    kind = kinds()[name]
    run, incident = struck(kind)
    ranks = struck_ranks(incident, run, 0)
    others = np.setdiff1d(np.arange(64), ranks)
    window = (0, START_S + 5, START_S + LASTS_S)
    wait = [np.mean([s.past.outcome.wait.ravel() for s in r.steps(*window)], axis=0) for r in (run, healthy())]
    own = [np.mean([s.past.outcome.own.ravel() for s in r.steps(*window)], axis=0) for r in (run, healthy())]
    assert wait[0][ranks].mean() < wait[1][ranks].mean()
    assert np.median(wait[0][others]) > 1.3 * np.median(wait[1][others])
    assert np.median(own[0][others] / own[1][others]) == pytest.approx(1.0, abs=0.02)


def test_a_network_fault_slows_the_job_and_leaves_computing_alone() -> None:
    run, incident = struck(kinds()["port_slow"])
    assert step_signal("duration", run, healthy(), incident) > 0
    usual = np.mean([s.past.outcome.own.mean() for s in healthy().steps(0, START_S + 5, START_S + LASTS_S)])
    assert abs(step_signal("local", run, healthy(), incident)) < 0.02 * usual


def test_peers_of_a_dead_rank_spin_at_low_power_until_the_restart() -> None:
    run, _ = struck(kinds()["rank_killed"])
    gpu, at = columns("gpu"), START_S + 30
    peer = run.intervals[at].family("gpu")[5, 1]
    before = healthy().intervals[at].family("gpu")[5, 1]
    assert peer[gpu["gpu_util_ratio"]] > 0.8
    assert peer[gpu["tensor_active_ratio"]] < 0.1 * before[gpu["tensor_active_ratio"]]
    assert peer[gpu["power_w"]] < 0.6 * before[gpu["power_w"]]
    assert not run.steps(0, START_S + 3, START_S + LASTS_S), "nobody reports a step while the job stands"


def test_after_a_halt_the_job_comes_back_as_a_new_attempt() -> None:
    run = simulated(SPEC, "rank_killed@n00003/gpu2:20+15", 110)
    assert run.intervals[-1].attempts[0] == 1
    after = run.steps(0, 40, 110, ("first", "train"))
    assert after
    assert after[0].past.phase == "first"
    codes = run.codes(range(8))
    assert {"worker_exit:-9", "worker_exit:-15"} <= codes


def test_two_faults_at_once_both_show() -> None:
    run = simulated(SPEC, "gpu_thermal@n00003/gpu2:20+60,ecc_storm@n00009/gpu1:25+60")
    at = columns("gpu")
    last = run.intervals[60].family("gpu")
    assert last[3, 2, at["thermal_violation_ratio"]] > 0
    assert last[9, 1, at["ecc_correctable_per_s"]] > 0
    assert last[9, 2, at["ecc_correctable_per_s"]] == 0


@pytest.mark.parametrize("name", ["leaf_congestion", "leaf_degraded"])
def test_a_leaf_is_seen_by_its_whole_pod_and_nobody_else(name: str) -> None:
    run, incident = struck(kinds()[name])
    trip = columns("mesh")["rtt_ms"]
    ours, theirs = run.column("mesh", trip)[WINDOW], healthy().column("mesh", trip)[WINDOW]
    ratio = np.nanmedian(ours, axis=0) / np.nanmedian(theirs, axis=0)
    layout = Layout(SPEC)
    over = np.zeros(layout.peers.shape, dtype=bool)
    over[incident.target.probes] = True
    assert over[:32, 2].all()
    assert ratio[over].min() > 2.0
    assert ratio[~over].max() < 1.5
    assert TARGETS["leaf"] == incident.target.name


def test_a_spine_slows_only_jobs_that_reach_over_several_pods() -> None:
    run, incident = struck(kinds()["spine_degraded"])
    assert incident.target.jobs == (3,)
    window = (START_S + 5, START_S + LASTS_S)
    for job in range(3):
        ours, theirs = (r.steps(job, *window) for r in (run, healthy()))
        assert [s.past.finish for s in ours] == [s.past.finish for s in theirs]
    assert run.steps(3, *window)[0].past.finish > healthy().steps(3, *window)[0].past.finish
