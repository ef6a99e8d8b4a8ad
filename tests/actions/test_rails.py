from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actions.ledger import Ledger, Row, step_row
from actions.rails.base import RAILS, Rail, Refusal
from actions.rails.breaker import LATCH
from actions.service import make_rails
from tests.actions.builders import NODES, incident, job, leading, node, plan, world
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.config import from_table
from trainwarden.errors import ConfigError
from trainwarden.records import ActionStatus, Entity, EntityKind, IncidentStatus, Mode, Plan, Timeline, Verb


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def ledger(tmp_path: Path, clock: SimulatedClock) -> Iterator[Ledger]:
    with leading(tmp_path / "ledger.sqlite", clock) as opened:
        yield opened


def rail(name: str, **settings: Any) -> Rail:
    kind = RAILS.get(name)
    return kind(kind.Settings(**settings))


def begun(ledger: Ledger, made: Plan, ended: ActionStatus | None = None) -> Plan:
    """`made` as a plan whose steps have all begun."""
    ledger.add_plan(made, "s", [replace(Row.of(made, ActionStatus.STARTED), key=made.plan_id)])
    for step in made.steps:
        ledger.add(step_row(made, step, ActionStatus.STARTED))
    if ended is not None:
        ledger.add(Row.of(made, ended))
    return made


def undo(clock: SimulatedClock) -> Plan:
    return plan(clock, (Verb.RETURN_NODE, "n2"), (Verb.RESTART, "demo"), incident_id="operator-1")


def expect(refusal: Refusal | None, text: str, **over: Any) -> Refusal:
    assert refusal is not None
    assert text in refusal.reason
    for name, value in over.items():
        assert getattr(refusal, name) == value, name
    return refusal


def test_all_rails_let_a_sound_plan_pass(clock: SimulatedClock, ledger: Ledger) -> None:
    rails = make_rails(from_table({}))
    assert [r.name for r in rails] == [
        "kill_switch", "expiry", "precondition", "one_plan", "cool_down", "budget", "breaker", "shared_cause", "capacity",
    ]  # fmt: skip
    for one in rails:
        assert one.check(plan(clock), world(clock, ledger)) is None, one.name


def test_rails_are_configured_and_switched_off_by_name() -> None:
    rails = make_rails(
        from_table({"rails": {"budget": {"restarts": 7, "window_s": "2h"}, "shared_cause": {"enabled": False}}})
    )
    budget = next(one for one in rails if one.name == "budget")
    assert (budget.settings.restarts, budget.settings.window_s) == (7, 7200.0)
    assert "shared_cause" not in [one.name for one in rails]
    with pytest.raises(ConfigError, match=r"rails\.budget\.restart: unknown key, did you mean 'restarts'"):
        make_rails(from_table({"rails": {"budget": {"restart": 7}}}))


def test_kill_switch_stops_undo_too(clock: SimulatedClock, ledger: Ledger) -> None:
    stopped = world(clock, ledger, kill_switch="ann: storage is down")
    expect(rail("kill_switch").check(plan(clock), stopped), "ann: storage is down", page=True)
    expect(rail("kill_switch").check(undo(clock), stopped), "ann: storage is down")


def test_expiry_of_the_plan(clock: SimulatedClock, ledger: Ledger) -> None:
    made, news = plan(clock), incident(clock)
    clock.advance_ns(59 * NS_PER_S)
    assert rail("expiry").check(made, world(clock, ledger, incident=news)) is None
    clock.advance_ns(1 * NS_PER_S)
    expect(rail("expiry").check(made, world(clock, ledger, incident=news)), "expired 0.0 s ago")


def test_expiry_of_the_event_but_not_for_a_person(clock: SimulatedClock, ledger: Ledger) -> None:
    news = incident(clock)
    clock.advance_ns(301 * NS_PER_S)
    expect(rail("expiry").check(plan(clock), world(clock, ledger, incident=news)), "last news is 301.0 s old")
    assert rail("expiry").check(plan(clock, mode=Mode.APPROVE), world(clock, ledger, incident=news)) is None


@pytest.mark.parametrize(
    ("over", "text"),
    [
        ({"incident": None}, "not known any more"),
        ({"incident": incident(status=IncidentStatus.CLOSED, revision=3)}, "is closed since revision 3"),
        ({"incident": incident(status=IncidentStatus.RECOVERED)}, "is recovered"),
        ({"incident": incident(superseded_by="i2")}, "has become part of i2"),
        ({"incident": incident(revision=2, culprits=(Entity(EntityKind.NODE, "n1"),))}, "does not blame n2 any more"),
        ({"job": job(*(node(name, generation=2) for name in NODES))}, "is at attempt 2 now"),
        ({"job": job(*(node(name, reachable=False) for name in NODES))}, "may be the one cut off"),
    ],
)  # fmt: skip
def test_precondition_is_read_again(clock: SimulatedClock, ledger: Ledger, over: dict[str, Any], text: str) -> None:
    expect(rail("precondition").check(plan(clock), world(clock, ledger, **over)), text)


def test_an_incident_that_is_ahead_of_our_picture_is_looked_at_again(clock: SimulatedClock, ledger: Ledger) -> None:
    refusal = rail("precondition").check(plan(clock, attempt=2), world(clock, ledger))
    expect(refusal, "the wardens are at attempt 1", retry_at_ns=clock.now_ns() + NS_PER_S // 2)


def test_a_job_that_heals_itself_is_given_time_for_it(clock: SimulatedClock, ledger: Ledger) -> None:
    """Nothing is ordered on top, until it has taken too long or one of the launchers has given up."""
    now_ns = clock.now_ns()

    def ask(age_s: float, kind: str = "rank_killed", *verbs: tuple[Verb, str], **last: Any) -> Refusal | None:
        nodes = [node(name, heals_s=20.0) for name in NODES[:3]] + [node("n3", **({"heals_s": 20.0} | last))]
        at = Timeline(fault_at_ns=now_ns - int(age_s * NS_PER_S))
        news = incident(clock, kind=kind, timeline=at)
        made = plan(clock, *(verbs or ((Verb.RESTART, "demo"),)), kind=kind)
        return rail("precondition").check(made, world(clock, ledger, incident=news, job=job(*nodes)))

    expect(ask(0.3), "put the world together in the process", retry_at_ns=now_ns + NS_PER_S // 2)
    assert ask(20.5) is None
    assert ask(0.3, heals_s=0.0, state="failed") is None
    assert ask(0.3, "node_lost") is None, "no launcher puts a node back"
    expect(ask(0.3, "rank_killed", reachable=False), "in the process")


def test_precondition_without_any_node(clock: SimulatedClock, ledger: Ledger) -> None:
    nothing = replace(world(clock, ledger), job=replace(job(), nodes={}))
    expect(rail("precondition").check(plan(clock), nothing), "no node of job demo is known", page=True)


def test_a_newer_revision_that_blames_the_same_is_no_obstacle(clock: SimulatedClock, ledger: Ledger) -> None:
    assert rail("precondition").check(plan(clock), world(clock, ledger, incident=incident(clock, revision=7))) is None


def test_one_plan_per_job_and_node(clock: SimulatedClock, ledger: Ledger) -> None:
    begun(ledger, plan(clock, incident_id="i0"))
    refusal = rail("one_plan").check(plan(clock), world(clock, ledger))
    expect(refusal, "plan p-i0-1 is at work on job demo", retry_at_ns=clock.now_ns() + NS_PER_S)
    other_job = plan(clock, job="other")
    expect(rail("one_plan").check(other_job, world(clock, ledger)), "at work on node n2")
    apart = plan(clock, (Verb.ISOLATE, "n9"), (Verb.RESTART, "other"), job="other")
    assert rail("one_plan").check(apart, world(clock, ledger)) is None


def test_a_plan_that_waits_for_approval_holds_nothing(clock: SimulatedClock, ledger: Ledger) -> None:
    waiting = plan(clock, incident_id="i0", mode=Mode.APPROVE)
    ledger.add_plan(waiting, "s", [Row.of(waiting, ActionStatus.WAITING)])
    assert rail("one_plan").check(plan(clock), world(clock, ledger)) is None


def test_an_ended_plan_holds_nothing(clock: SimulatedClock, ledger: Ledger) -> None:
    begun(ledger, plan(clock, incident_id="i0"), ActionStatus.VERIFIED)
    assert rail("one_plan").check(plan(clock), world(clock, ledger)) is None


def test_cool_down_of_a_job_says_when_to_ask_again(clock: SimulatedClock, ledger: Ledger) -> None:
    begun(ledger, plan(clock, (Verb.RESTART, "demo"), incident_id="i0"), ActionStatus.VERIFIED)
    began_ns = clock.now_ns()
    clock.advance_ns(4 * NS_PER_S)
    made = plan(clock, (Verb.RESTART, "demo"))
    expect(
        rail("cool_down").check(made, world(clock, ledger)), "restarted 4.0 s ago", retry_at_ns=began_ns + 10 * NS_PER_S
    )
    assert rail("cool_down").check(undo(clock), world(clock, ledger)) is None
    clock.advance_ns(7 * NS_PER_S)
    assert rail("cool_down").check(made, world(clock, ledger)) is None


def test_cool_down_of_a_node_is_for_a_person(clock: SimulatedClock, ledger: Ledger) -> None:
    begun(ledger, plan(clock, incident_id="i0"), ActionStatus.VERIFIED)
    clock.advance_ns(1800 * NS_PER_S)
    expect(
        rail("cool_down").check(plan(clock), world(clock, ledger)),
        "n2 was isolated 1800 s ago",
        page=True,
        retry_at_ns=0,
    )
    clock.advance_ns(1801 * NS_PER_S)
    assert rail("cool_down").check(plan(clock), world(clock, ledger)) is None


def test_cool_down_survives_a_restart(clock: SimulatedClock, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with leading(path, clock) as first:
        begun(first, plan(clock, incident_id="i0"), ActionStatus.VERIFIED)
        first.release_lease()
    with leading(path, clock) as second:
        expect(rail("cool_down").check(plan(clock), world(clock, second)), "n2 was isolated")


def test_budget_counts_restarts_and_holds(clock: SimulatedClock, ledger: Ledger) -> None:
    for number in range(3):
        assert rail("budget").check(plan(clock), world(clock, ledger)) is None
        begun(ledger, plan(clock, (Verb.RESTART, "demo"), incident_id=f"i{number + 10}"), ActionStatus.FAILED)
        clock.advance_ns(60 * NS_PER_S)
    expect(rail("budget").check(plan(clock), world(clock, ledger)), "restarted 3 times within 3600 s: held", page=True)
    assert rail("budget").check(plan(clock, job="other"), world(clock, ledger)) is None
    assert rail("budget").check(undo(clock), world(clock, ledger)) is None
    clock.advance_ns(3500 * NS_PER_S)
    assert rail("budget").check(plan(clock), world(clock, ledger)) is None


def cluster(count: int, out: int = 0) -> dict[str, Any]:
    return {f"n{i}": node(f"n{i}", excluded=i >= count - out) for i in range(count)}


@pytest.mark.parametrize(
    ("count", "out", "passes"),
    [(2, 0, True), (4, 0, True), (4, 1, False), (8, 1, True), (8, 2, False), (100, 3, True), (100, 4, False)],
)
def test_breaker_has_a_share_and_a_number(
    clock: SimulatedClock, ledger: Ledger, count: int, out: int, passes: bool
) -> None:
    refusal = rail("breaker").check(
        plan(clock, (Verb.ISOLATE, "n0")), world(clock, ledger, cluster=cluster(count, out))
    )
    assert (refusal is None) is passes
    if refusal is not None:
        expect(refusal, f"{out + 1} of {count} nodes would be out", latch=True, page=True)


def test_breaker_counts_what_was_isolated_lately(clock: SimulatedClock, ledger: Ledger) -> None:
    begun(ledger, plan(clock, (Verb.ISOLATE, "n3"), incident_id="i0"), ActionStatus.VERIFIED)
    expect(
        rail("breaker").check(plan(clock), world(clock, ledger)), "2 of 4 nodes would be out (n2, n3), 1 are allowed"
    )


def test_breaker_stays_open_until_it_is_reset_and_never_holds_up_undo(clock: SimulatedClock, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with leading(path, clock) as ledger:
        ledger.note(LATCH, "5 of 8 nodes would be out", "rail")
        ledger.release_lease()
    with leading(path, clock) as ledger:
        old = incident(clock)
        expect(
            rail("breaker").check(plan(clock, (Verb.RESTART, "demo")), world(clock, ledger)),
            "the breaker is open",
            page=True,
        )
        assert rail("breaker").check(undo(clock), world(clock, ledger)) is None
        clock.advance_ns(NS_PER_S)
        ledger.note(LATCH, "", "ann: it was the detector")
        clock.advance_ns(NS_PER_S)
        expect(
            rail("breaker").check(plan(clock), world(clock, ledger, incident=old)), "from before the breaker was reset"
        )
        assert rail("breaker").check(plan(clock), world(clock, ledger, incident=incident(clock))) is None


def alike(clock: SimulatedClock, *nodes: str, **over: Any) -> tuple[Any, ...]:
    return tuple(
        incident(clock, incident_id=f"i-{name}", culprits=(Entity(EntityKind.NODE, name),), **over) for name in nodes
    )


def test_shared_cause_stops_when_many_have_the_same(clock: SimulatedClock, ledger: Ledger) -> None:
    many = alike(clock, "n0", "n1", "n2")
    expect(
        rail("shared_cause").check(plan(clock), world(clock, ledger, incidents=many)),
        "compute_slow on 3 of 4 nodes at once",
        page=True,
    )
    assert rail("shared_cause").check(undo(clock), world(clock, ledger, incidents=many)) is None
    assert rail("shared_cause").check(plan(clock), world(clock, ledger, incidents=many[:2])) is None
    assert rail("shared_cause").check(plan(clock, kind="rank_killed"), world(clock, ledger, incidents=many)) is None
    big = world(clock, ledger, incidents=many, cluster=cluster(100))
    assert rail("shared_cause").check(plan(clock), big) is None
    closed = alike(clock, "n0", "n1", "n2", status=IncidentStatus.CLOSED)
    assert rail("shared_cause").check(plan(clock), world(clock, ledger, incidents=closed)) is None
    clock.advance_ns(301 * NS_PER_S)
    assert rail("shared_cause").check(plan(clock), world(clock, ledger, incidents=many)) is None


def test_capacity_is_checked_before_anything_is_done(clock: SimulatedClock, ledger: Ledger) -> None:
    expect(
        rail("capacity").check(plan(clock), world(clock, ledger, min_nodes=4)),
        "3 of at least 4 nodes without n2",
        page=True,
    )
    assert rail("capacity").check(plan(clock), world(clock, ledger, min_nodes=3)) is None
    assert rail("capacity").check(plan(clock, (Verb.RESTART, "demo")), world(clock, ledger, min_nodes=4)) is None
    assert rail("capacity").check(undo(clock), world(clock, ledger, min_nodes=9)) is None


def test_every_refusal_is_one_sentence(clock: SimulatedClock, ledger: Ledger) -> None:
    ledger.note(LATCH, "x", "rail")
    begun(ledger, plan(clock, incident_id="i0"))
    bad = world(clock, ledger, incident=None, kill_switch="x", incidents=alike(clock, *NODES), min_nodes=9)
    refused = [
        one.name
        for one in make_rails(from_table({}))
        if (r := one.check(plan(clock), bad)) and "\n" not in r.reason and r.rail == one.name
    ]
    assert set(refused) >= {
        "kill_switch",
        "precondition",
        "one_plan",
        "cool_down",
        "breaker",
        "shared_cause",
        "capacity",
    }
