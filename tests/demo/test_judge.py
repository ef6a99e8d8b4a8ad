"""The judgement of a demonstration cannot be fooled: each wrong outcome is a failure with its sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwarden.demo.faults.base import Expectation
from trainwarden.demo.judge import Injection, finished, judge
from trainwarden.demo.observer import Observed
from trainwarden.records import (
    ActionResult,
    ActionStatus,
    Entity,
    EntityKind,
    Incident,
    IncidentStatus,
    Reach,
    StepReport,
    StepRow,
    Timeline,
)

S = 1_000_000_000
AT = 1000 * S
INJECTION = Injection("kill", "n1", 1, AT, step=100, attempt=1, sentence="SIGKILL")
KILL = Expectation(kinds=("rank_killed",), executed=("restart",))
LEAVE = Expectation(kinds=("compute_slow",), executed=("checkpoint", "isolate", "restart"), leaves=True)
TELL = Expectation(kinds=("data_slow",), recommended=("rebalance",))


def steps(attempt: int, first: int, last: int, nodes: tuple[str, ...], at_s: float) -> list[StepReport]:
    """Reports of all ranks of an attempt."""
    rows = tuple(StepRow(step, "train", int((at_s + 0.06 * (step - first)) * S), 60.0) for step in (first, last))
    return [
        StepReport(job="j", node=node, attempt=attempt, rank=rank, world=len(nodes), rows=rows)
        for rank, node in enumerate(nodes)
    ]


def incident(
    kind: str = "rank_killed", node: str = "n1", status: IncidentStatus = IncidentStatus.RECOVERED
) -> Incident:
    """An incident that blames `node`, a second after the fault."""
    return Incident(
        incident_id="i", revision=3, kind=kind, status=status, reach=Reach.ACT,
        culprits=(Entity(EntityKind.NODE, node, node),),
        timeline=Timeline(first_signal_at_ns=AT + S // 2, verdict_at_ns=AT + S),
    )  # fmt: skip


def row(verb: str, status: ActionStatus) -> ActionResult:
    """A ledger row."""
    return ActionResult(incident_id="i", verb=verb, status=status, started_at_ns=AT + 2 * S, finished_at_ns=AT + 3 * S)


def healed(*verbs: str, nodes: tuple[str, ...] = ("n0", "n1"), said: Incident | None = None) -> Observed:
    """A run in which `verbs` were done and the job stepped on with `nodes`."""
    observed = Observed()
    for report in [*steps(1, 0, 103, ("n0", "n1"), 990.0), *steps(2, 100, 140, nodes, 1004.0)]:
        observed.add(report)
    observed.add(said or incident())
    for verb in verbs:
        observed.add(row(verb, ActionStatus.STARTED))
        observed.add(row(verb, ActionStatus.DONE))
    observed.add(row("", ActionStatus.VERIFIED))
    return observed


def test_a_healed_job_is_right_and_measured() -> None:
    outcome = judge(healed("restart"), KILL, INJECTION)
    assert outcome.passed
    assert outcome.seconds["verdict"] == 1.0
    assert outcome.seconds["resumed"] == 4.0
    assert outcome.steps_lost == 4


def test_finished_waits_for_the_incident_to_say_so() -> None:
    assert finished(healed("restart"), KILL, INJECTION, 1.0, AT + 9 * S)
    acting = healed("restart", said=incident(status=IncidentStatus.ACTING))
    assert not finished(acting, KILL, INJECTION, 1.0, AT + 9 * S)
    assert not finished(Observed(), KILL, INJECTION, 1.0, AT + 9 * S)


@pytest.mark.parametrize(
    ("observed", "expectation", "sentence"),
    [
        (healed("restart", said=incident(node="n0")), KILL, "named node:n0, the fault was on n1"),
        (healed("restart", said=incident(kind="job_hang")), KILL, "called it job_hang"),
        (healed(), KILL, "did nothing"),
        (healed("isolate", "restart"), KILL, "expected .'restart'"),
        (healed("restart", nodes=("n0",)), KILL, "n1 was left out"),
        (
            healed("isolate", "restart", said=incident("compute_slow")),
            LEAVE,
            "expected .'checkpoint', 'isolate', 'restart'",
        ),
        (healed("checkpoint", "isolate", "restart", said=incident("compute_slow")), LEAVE, "n1 still takes part"),
        (healed(said=incident("data_slow")), TELL, "rebalance was not recommended"),
        (healed(said=incident("data_slow")), TELL, "the job was restarted although"),
        (Observed(), KILL, "no incident was opened"),
    ],
)
def test_each_wrong_outcome_is_a_failure(observed: Observed, expectation: Expectation, sentence: str) -> None:
    failures = judge(observed, expectation, INJECTION).failures
    assert any(part in failure for failure in failures for part in [sentence.replace(".'", "['")]), failures


def test_a_job_that_never_went_on_is_a_failure() -> None:
    observed = Observed()
    for report in steps(1, 0, 100, ("n0", "n1"), 990.0):
        observed.add(report)
    observed.add(incident())
    assert any("did not go past step 100" in failure for failure in judge(observed, KILL, INJECTION).failures)


def test_an_incident_before_the_fault_is_a_false_alarm() -> None:
    early = replace_timeline(incident(), AT - S)
    assert judge(healed("restart", said=early), KILL, INJECTION).failures == [
        "false alarm before the fault: rank_killed on node:n1", "no incident was opened",
    ]  # fmt: skip


def test_nobody_else_may_be_accused() -> None:
    import msgspec

    observed = healed("restart")
    other = msgspec.structs.replace(
        incident(node="n0"), incident_id="other", timeline=Timeline(verdict_at_ns=AT + 2 * S)
    )
    observed.add(other)
    assert judge(observed, KILL, INJECTION).failures == ["accused node:n0 of rank_killed too"]


def test_a_milder_mode_expects_recommendations() -> None:
    milder = LEAVE.under("recommend")
    assert milder.executed == ()
    assert milder.recommended == ("checkpoint", "isolate", "restart")
    assert LEAVE.under("auto") == LEAVE


def replace_timeline(given: Incident, verdict_at_ns: int) -> Incident:
    """`given` with another time of verdict."""
    import msgspec

    return msgspec.structs.replace(given, timeline=Timeline(verdict_at_ns=verdict_at_ns))


def test_a_quiet_run_tolerates_nothing() -> None:
    quiet = Expectation()
    healthy = Observed()
    for report in steps(1, 0, 103, ("n0", "n1"), 990.0):
        healthy.add(report)
    assert judge(healthy, quiet, INJECTION).passed
    alarmed = healed("restart")
    failures = judge(alarmed, quiet, INJECTION).failures
    assert [failure.split(":")[0] for failure in failures] == [
        "false alarm", "something was done although nothing was wrong", "the job was restarted although nothing was wrong",
    ]  # fmt: skip


def test_a_save_may_be_missing_only_where_it_is_impossible() -> None:
    link = replace(LEAVE, kinds=("compute_slow",), optional=("checkpoint",))
    observed = healed("isolate", "restart", nodes=("n0",), said=incident("compute_slow"))
    assert judge(observed, link, INJECTION).passed
    assert not judge(observed, LEAVE, INJECTION).passed
