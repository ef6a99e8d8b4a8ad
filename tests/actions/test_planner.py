from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actions.capacity import Hold, choose_members
from actions.planner import PlannerSettings, plan, return_plan, signature
from tests.actions.builders import NODES, incident, job, node
from trainwarden.clock import NS_PER_S
from trainwarden.errors import UsageError
from trainwarden.policy import KINDS, Policy
from trainwarden.records import Entity, EntityKind, Mode, Plan, Reach, Verb

NOW_NS = 1000 * NS_PER_S
AUTO = Policy(Mode.AUTO)
SETTINGS = PlannerSettings()
MOVING = job(advanced_at_ns=NOW_NS - NS_PER_S)
STANDING = job(advanced_at_ns=NOW_NS - 60 * NS_PER_S)


def verbs(made: Plan | None) -> list[str]:
    return [f"{step.verb.value} {step.target}" for step in made.steps] if made else []


def make(
    policy: Policy = AUTO, state: Any = MOVING, recurred: bool = False, number: int = 1, **over: Any
) -> Plan | None:
    return plan(incident(**over), policy, state, NOW_NS, number, SETTINGS, recurred)


@pytest.mark.parametrize(
    ("kind", "first", "again"),
    [
        ("rank_killed", ["restart demo"], ["isolate n2", "restart demo"]),
        ("rank_frozen", ["restart demo"], ["isolate n2", "restart demo"]),
        ("node_lost", ["isolate n2", "restart demo"], ["isolate n2", "restart demo"]),
        ("job_hang", ["restart demo"], ["restart demo"]),
        ("fatal_code", ["checkpoint demo", "isolate n2", "restart demo"], ["checkpoint demo", "isolate n2", "restart demo"]),
        ("link_down", ["checkpoint demo", "isolate n2", "restart demo"], ["checkpoint demo", "isolate n2", "restart demo"]),
        ("link_slow", ["checkpoint demo", "isolate n2", "restart demo"], ["checkpoint demo", "isolate n2", "restart demo"]),
        ("compute_slow", ["checkpoint demo", "isolate n2", "restart demo"], ["checkpoint demo", "isolate n2", "restart demo"]),
        ("data_slow", ["rebalance demo"], ["rebalance demo"]),
        ("non_finite", ["restart demo"], ["isolate n2", "restart demo"]),
        ("silent_corruption", ["isolate n2", "restart demo"], ["isolate n2", "restart demo"]),
        ("fabric_slow", [], []),
        ("job_slow", [], []),
        ("save_failed", [], []),
        ("telemetry_lost", [], []),
        ("a_kind_of_a_newer_detector", [], []),
    ],
)  # fmt: skip
def test_verbs_per_kind(kind: str, first: list[str], again: list[str]) -> None:
    assert verbs(make(kind=kind)) == first
    assert verbs(make(kind=kind, recurrence=1)) == again
    assert verbs(make(kind=kind, recurred=True)) == again


@pytest.mark.parametrize("kind", ["fatal_code", "link_slow", "compute_slow"])
def test_a_job_that_stands_is_not_asked_to_save(kind: str) -> None:
    assert verbs(make(kind=kind, state=STANDING)) == ["isolate n2", "restart demo"]


def test_a_corrupt_job_is_never_saved_even_when_asked_to() -> None:
    assert verbs(make(kind="non_finite", remedy=("checkpoint", "restart"))) == ["restart demo"]


def test_the_order_of_verbs_is_ours_whatever_the_incident_says() -> None:
    assert verbs(make(remedy=("restart", "isolate", "checkpoint", "isolate"))) == [
        "checkpoint demo",
        "isolate n2",
        "restart demo",
    ]


def test_every_culprit_is_isolated_once() -> None:
    culprits = (Entity(EntityKind.NODE, "n1"), Entity(EntityKind.RANK, "demo/1", "n1"), Entity(EntityKind.NODE, "n3"))
    assert verbs(make(kind="node_lost", culprits=culprits)) == ["isolate n1", "isolate n3", "restart demo"]


def test_keys_depend_on_incident_number_verb_and_target_only() -> None:
    made, later = make(), plan(incident(revision=9), AUTO, MOVING, NOW_NS + 1, 1, SETTINGS)
    assert made is not None
    assert later is not None
    assert [step.key for step in made.steps] == [step.key for step in later.steps]
    assert made.steps[1].key == "i1.1.isolate.n2"
    second = make(number=2)
    assert second is not None
    assert not {step.key for step in made.steps} & {step.key for step in second.steps}


@pytest.mark.parametrize(
    ("policy", "reach", "mode"),
    [
        (Policy(), Reach.ACT, Mode.RECOMMEND),
        (Policy(Mode.OBSERVE), Reach.ACT, Mode.OBSERVE),
        (AUTO, Reach.ACT, Mode.AUTO),
        (AUTO, Reach.NOTIFY, Mode.RECOMMEND),
        (AUTO, Reach.STORE, Mode.RECOMMEND),
        (Policy(Mode.AUTO, {Verb.ISOLATE: Mode.APPROVE}), Reach.ACT, Mode.APPROVE),
        (Policy(Mode.AUTO, {Verb.REROUTE: Mode.OBSERVE}), Reach.ACT, Mode.AUTO),
        (Policy(Mode.AUTO, {}, {"demo": Mode.OBSERVE}), Reach.ACT, Mode.OBSERVE),
        (Policy(Mode.AUTO, {}, {"another": Mode.OBSERVE}), Reach.ACT, Mode.AUTO),
    ],
)
def test_the_strictest_mode_wins(policy: Policy, reach: Reach, mode: Mode) -> None:
    made = make(policy, reach=reach)
    assert made is not None
    assert made.mode is mode
    assert made.policy_revision == policy.revision


def test_a_person_gets_longer_than_the_service() -> None:
    auto, waiting = make(), make(Policy(Mode.APPROVE))
    assert auto is not None
    assert waiting is not None
    assert auto.expires_at_ns == NOW_NS + 60 * NS_PER_S
    assert waiting.expires_at_ns == NOW_NS + 1800 * NS_PER_S


def test_what_no_plan_can_be_made_of_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"remedy \['explode'\] has an unknown verb"):
        make(remedy=("explode",))
    with pytest.raises(UsageError, match="isolate needs a culprit with a node, found nobody"):
        make(culprits=())
    with pytest.raises(UsageError, match="found leaf:l1"):
        make(culprits=(Entity(EntityKind.LEAF, "l1"),))


def test_a_signature_is_what_a_plan_does() -> None:
    made, standing, other = make(), make(state=STANDING, number=2), make(culprits=(Entity(EntityKind.NODE, "n1"),))
    assert made is not None
    assert standing is not None
    assert other is not None
    assert signature(made) == signature(standing), "whether the job can save changes from moment to moment"
    assert signature(made) != signature(other)


def test_returning_a_node_is_save_admit_restart() -> None:
    made = return_plan("c", MOVING, "n2", "repaired", "ann", NOW_NS, SETTINGS)
    assert verbs(made) == ["checkpoint demo", "return_node n2", "restart demo"]
    assert made.reason == "ann: repaired"


def test_every_kind_that_isolates_may_act_or_says_why_not() -> None:
    for kind in KINDS.values():
        if Verb.ISOLATE in kind.remedy:
            assert kind.reach is Reach.ACT, kind.name


# --- members -------------------------------------------------------------------------------------------------------------


def test_without_a_spare_the_job_shrinks() -> None:
    assert choose_members(job(), ("n2",), 2, 1) == ("n0", "n1", "n3")


def test_a_spare_takes_the_place() -> None:
    spare = node("n4", state="stopped", generation=0, members=())
    state = job(*(node(name) for name in NODES), spare)
    assert choose_members(state, ("n2",), 2, 1) == ("n0", "n1", "n3", "n4")
    assert choose_members(state, (), 2, 1) == NODES


@pytest.mark.parametrize("over", [{"excluded": True}, {"reachable": False}, {"state": "running"}])
def test_a_node_that_is_out_or_busy_is_no_spare(over: dict[str, Any]) -> None:
    spare = replace(node("n4", state="stopped", generation=0, members=()), **over)
    assert choose_members(job(*(node(name) for name in NODES), spare), ("n2",), 2, 1) == ("n0", "n1", "n3")


def test_whole_units_only() -> None:
    assert choose_members(job(), ("n2",), 2, 2) == ("n0", "n1")


def test_below_the_minimum_the_job_is_held() -> None:
    held = choose_members(job(), ("n1", "n2", "n3"), 2, 1)
    assert isinstance(held, Hold)
    assert "1 of at least 2 nodes without n1, n2, n3" in held.reason


def test_a_job_that_is_small_already_may_be_restarted_in_place() -> None:
    alone = job(node("n0", members=("n0",)))
    assert choose_members(alone, (), 2, 1) == ("n0",)


def test_somebody_elses_exclusion_is_respected() -> None:
    state = job(*(node(name, excluded=name == "n1") for name in NODES))
    assert choose_members(state, ("n2",), 2, 1) == ("n0", "n3")


def test_a_returned_node_is_named() -> None:
    members = ("n0", "n1", "n3")
    state = job(*(node(name, members=members) for name in members), node("n2", excluded=True, members=members))
    assert choose_members(state, (), 2, 1, ("n2",)) == ("n0", "n1", "n3", "n2")


def test_what_an_incident_claims_beyond_the_policy_is_a_recommendation_at_most() -> None:
    """Whoever can write to the bus can write an incident; what is done about a kind is the operator's."""
    beyond = make(kind="data_slow", remedy=("isolate", "restart"), reach=Reach.ACT)
    assert beyond is not None
    assert beyond.mode is Mode.RECOMMEND
    within = make(kind="compute_slow", remedy=("checkpoint", "isolate", "restart"))
    assert within is not None
    assert within.mode is Mode.AUTO


def test_a_fault_that_comes_back_without_a_known_cause_is_recommended_to_be_restarted() -> None:
    job_wide = (Entity(EntityKind.JOB, "demo"),)
    made = make(kind="non_finite", recurrence=1, culprits=job_wide)
    assert verbs(made) == ["restart demo"]
    assert made is not None
    assert made.mode is Mode.RECOMMEND
    first = make(kind="non_finite", culprits=job_wide)
    assert first is not None
    assert first.mode is Mode.AUTO


def test_replicas_that_differ_while_nobody_can_say_which_is_wrong_are_restarted() -> None:
    found = plan(
        incident(kind="silent_corruption", culprits=()), Policy(mode=Mode.AUTO), job(), 0, 1, PlannerSettings()
    )
    assert found is not None
    assert [step.verb for step in found.steps] == [Verb.RESTART]
