from __future__ import annotations

import http.client
import json
import time
from pathlib import Path
from typing import Any

import pytest

from actions.backends.base import Order
from actions.backends.warden import WardenBackend
from actions.http import TOKEN_HEADER, load_token
from actions.operator import OperatorClient
from actions.service import ActionService, make_parts
from tests.actions.builders import NODES
from tests.actions.fake_warden import FakeWarden
from tests.actions.harness import LEASE_S, Rig, rig, wait_for
from trainwarden.clock import SystemClock
from trainwarden.errors import BusError, UnavailableError, UsageError
from trainwarden.records import (
    ActionStatus,
    Entity,
    EntityKind,
    Incident,
    IncidentStatus,
    LogEvent,
    Mode,
    PolicyChange,
    Reach,
    TopologyEvent,
    encode,
)  # fmt: skip
from trainwarden.topics import INCIDENTS, POLICY, TOPOLOGY

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def rig4(tmp_path: Path) -> Any:
    with rig(tmp_path) as made:
        yield made


def test_a_slow_node_is_saved_isolated_and_left_behind(rig4: Rig) -> None:
    for warden in rig4.wardens.values():
        warden.step, warden.goes_back = (
            1000,
            200,
        )  # two seconds until these are done again: somebody has looked before that
    service = rig4.start()
    wait_for("progress to be seen", lambda: service.watch.job("demo").advanced_at_ns)
    rig4.report()
    end = rig4.end()
    assert (end.status, end.detail["generation"]) == (ActionStatus.VERIFIED, "2")
    assert rig4.steps("done") == ["checkpoint demo", "isolate n2", "restart demo"]
    assert rig4.effects(of=("stop",)) == [("n2", "stop")]
    assert [rig4.wardens[n].members for n in ("n0", "n1", "n3")] == [["n0", "n1", "n3"]] * 3
    assert rig4.wardens["n2"].excluded
    assert int(end.detail["resumed_at_ns"]) > 0
    assert int(end.detail["lost_steps"]) > 0
    assert [plan.mode for plan in rig4.plans] == [Mode.AUTO]
    assert all(row.fence == service.ledger.fence for row in rig4.results)


def test_a_killed_rank_is_restarted_in_place_and_isolated_when_it_happens_again(rig4: Rig) -> None:
    rig4.start()
    rig4.report(kind="rank_killed")
    assert rig4.end().status is ActionStatus.VERIFIED
    assert rig4.effects() == [(name, "world") for name in NODES]
    assert rig4.wardens["n2"].members == list(NODES)
    rig4.report(kind="rank_killed", incident_id="i2")
    assert rig4.end("i2").status is ActionStatus.VERIFIED
    assert rig4.effects(of=("stop",)) == [("n2", "stop")]
    assert rig4.wardens["n0"].members == ["n0", "n1", "n3"]
    assert rig4.wardens["n0"].generation == 3


def test_the_default_mode_only_recommends(rig4: Rig) -> None:
    rig4.start(mode="recommend")
    rig4.report()
    end = rig4.end()
    assert (end.status, end.mode) == (ActionStatus.RECOMMENDED, Mode.RECOMMEND)
    assert "isolate n2" in rig4.steps("recommended")
    rig4.report(revision=2)
    rig4.report(incident_id="i2", kind="rank_killed")
    rig4.end("i2")
    assert rig4.effects(of=("stop", "world", "admit", "kill", "save")) == []
    assert len(rig4.ends()) == 1, "the same advice is given once"


def test_the_default_of_the_configuration_is_recommend(rig4: Rig) -> None:
    assert rig4.config(policy={}).policy.mode is Mode.RECOMMEND


def test_observe_says_what_it_would_have_done(rig4: Rig) -> None:
    rig4.start(mode="observe")
    rig4.report()
    assert rig4.end().status is ActionStatus.SKIPPED
    assert rig4.effects() == []


@pytest.mark.parametrize("reach", [Reach.NOTIFY, Reach.CORRELATE])
def test_an_incident_that_may_not_act_is_advice(rig4: Rig, reach: Reach) -> None:
    rig4.start()
    rig4.report(kind="data_slow", reach=reach)
    assert rig4.end().status is ActionStatus.RECOMMENDED
    assert rig4.steps("recommended") == ["rebalance demo"]
    assert rig4.effects() == []


def test_what_the_backend_cannot_do_is_denied_not_pretended(rig4: Rig) -> None:
    rig4.start(policy={"mode": "auto", "kinds": {"data_slow": {"reach": "act"}}})
    rig4.report(kind="data_slow")
    end = rig4.end()
    assert (end.status, end.rail) == (ActionStatus.DENIED, "backend")
    assert "divides no batch" in end.reason


def test_replays_and_revisions_of_one_incident_are_one_plan(rig4: Rig) -> None:
    service = rig4.start()
    first = rig4.report(kind="rank_killed")
    rig4.publisher.publish(INCIDENTS.name, b"i1", encode(first))
    rig4.report(kind="rank_killed", revision=2, attempt=1)
    assert rig4.end().status is ActionStatus.VERIFIED
    rig4.report(kind="rank_killed", revision=3, attempt=1)
    rig4.publisher.publish(INCIDENTS.name, b"i1", encode(first))
    rig4.report(incident_id="barrier", kind="data_slow", reach=Reach.NOTIFY)
    rig4.end("barrier")
    assert service.ledger.next_number("i1") == 2
    assert rig4.effects() == [(name, "world") for name in NODES]


def test_malformed_and_foreign_records_are_dead_letters_and_the_service_goes_on(rig4: Rig) -> None:
    rig4.start()
    rig4.publisher.publish(INCIDENTS.name, b"x", b"\xff not a record")
    rig4.publisher.publish(INCIDENTS.name, b"x", encode(LogEvent(line="hello")))
    rig4.publisher.publish(POLICY.name, b"mode", encode(PolicyChange(key="mode", value="yolo")))
    rig4.publisher.publish(POLICY.name, b"x", encode(PolicyChange(key="kil_switch", value="on", author="bob")))
    rig4.report(incident_id="", kind="rank_killed")
    rig4.report(incident_id="i8", remedy=("explode",))
    rig4.report(incident_id="i9", culprits=(Entity(EntityKind.LEAF, "l1"),))
    rig4.report(incident_id="own", job="", kind="pipeline_late", reach=Reach.NOTIFY)
    rig4.report(kind="rank_killed")
    assert rig4.end().status is ActionStatus.VERIFIED
    wait_for("seven dead letters", lambda: len(rig4.read_dead()) >= 7)
    reasons = " | ".join(letter.reason for letter in rig4.dead)
    for text in (
        "not a record",
        "a LogEvent on tw.incidents",
        "policy mode 'yolo'",
        "'kil_switch': expected mode or kill_switch",
        "incident ''",
        "['explode']",
        "found leaf:l1",
    ):
        assert text in reasons
    assert len(rig4.dead) == 7


def test_old_incidents_read_at_a_start_are_history(rig4: Rig) -> None:
    rig4.report(observed_at_ns=time.time_ns() - 400 * 10**9)
    rig4.report(incident_id="i2", kind="rank_killed", observed_at_ns=time.time_ns() - 400 * 10**9)
    service = rig4.start()
    rig4.report(incident_id="i3", kind="rank_killed")
    assert rig4.end("i3").status is ActionStatus.VERIFIED
    assert rig4.ends("i1") == rig4.ends("i2") == []
    assert service.metrics.value("tw_rail_refusals_total", rail="expiry") == 2


def test_an_incident_that_is_over_when_read_is_not_acted_on(rig4: Rig) -> None:
    rig4.report()
    rig4.report(revision=2, status=IncidentStatus.CLOSED)
    rig4.start()
    rig4.report(incident_id="i2", kind="data_slow", reach=Reach.NOTIFY)
    rig4.end("i2")
    assert rig4.ends("i1") == []
    assert rig4.effects() == []


def test_a_stale_attempt_is_refused(rig4: Rig) -> None:
    rig4.start()
    rig4.report(attempt=0)
    end = rig4.end()
    assert (end.status, end.rail) == (ActionStatus.DENIED, "precondition")
    assert rig4.effects() == []


def test_the_world_is_read_again_before_the_first_effect(rig4: Rig) -> None:
    """The job is restarted by other means after the decision was made on the cached picture."""
    service = rig4.start()
    service.watch.refresh()
    refresh = service.watch.refresh

    def restarted_meanwhile() -> Any:
        for warden in rig4.wardens.values():
            warden.generation = 7
        return refresh()

    service._executor._watch.refresh = restarted_meanwhile  # type: ignore[method-assign]
    rig4.report(attempt=1)
    end = rig4.end()
    assert (end.status, end.rail) == (ActionStatus.DENIED, "precondition")
    assert rig4.effects() == []


def test_a_second_fault_during_the_first_plan_waits_and_is_healed_after_it(rig4: Rig) -> None:
    rig4.start(rails={"cool_down": {"job_s": 0.2, "node_s": 0}, "breaker": {"share_ratio": 0.5}})
    rig4.report()
    rig4.report(incident_id="i2", kind="rank_killed", culprits=(Entity(EntityKind.NODE, "n1"),), attempt=1)
    assert rig4.end("i1").status is ActionStatus.VERIFIED
    denied = rig4.end("i2")
    assert (denied.status, denied.rail) == (ActionStatus.DENIED, "one_plan")
    later = rig4.end("i2", 2)
    assert (later.status, later.rail) == (ActionStatus.DENIED, "precondition"), (
        "the restart for i1 has replaced that attempt"
    )
    rig4.report(incident_id="i2", revision=2, kind="rank_killed", culprits=(Entity(EntityKind.NODE, "n1"),))
    assert rig4.end("i2", 3).status is ActionStatus.VERIFIED
    assert rig4.wardens["n0"].generation == 3


def test_trouble_on_the_new_attempt_ends_the_wait(rig4: Rig) -> None:
    rig4.start(verify_s=600, rails={"cool_down": {"job_s": 0, "node_s": 0}, "breaker": {"share_ratio": 0.5}})
    for warden in rig4.wardens.values():
        warden.steps_per_s = 0.0
    rig4.report(kind="rank_killed")
    wait_for("the restart", lambda: "restart demo" in rig4.steps("done"))
    rig4.report(
        incident_id="i2",
        kind="rank_frozen",
        attempt=2,
        title="rank 1 is frozen",
        culprits=(Entity(EntityKind.NODE, "n1"),),
    )
    end = rig4.end("i1")
    assert (end.status, "in trouble again: rank 1 is frozen (i2)" in end.reason) == (ActionStatus.FAILED, True)
    wait_for("the next plan", lambda: rig4.steps("done").count("restart demo") == 2)


def test_a_restart_that_does_not_help_is_paged(rig4: Rig) -> None:
    rig4.start(verify_s=0.3)
    for warden in rig4.wardens.values():
        warden.steps_per_s = 0.0
    rig4.report(kind="rank_killed")
    end = rig4.end()
    assert (end.status, end.detail["page"]) == (ActionStatus.FAILED, "1")
    assert "the steps stand at" in end.reason


def test_a_new_world_that_breaks_gets_a_second_chance_and_no_third(rig4: Rig) -> None:
    rig4.start()
    rig4.wardens["n1"].broken_worlds = 1
    rig4.report(kind="rank_killed")
    end = rig4.end()
    assert (end.status, end.detail["generation"]) == (ActionStatus.VERIFIED, "3")
    rig4.wardens["n1"].broken_worlds = 5
    rig4.report(kind="rank_killed", incident_id="i2", culprits=(Entity(EntityKind.NODE, "n3"),))
    end = rig4.end("i2")
    assert (end.status, end.reason) == (ActionStatus.FAILED, "n1 failed in generation 5: its workers ended")
    assert rig4.wardens["n0"].did("world") == 4


def test_a_failure_of_the_old_world_is_no_news(rig4: Rig) -> None:
    rig4.start()
    for warden in rig4.wardens.values():
        warden.state = "failed"
    rig4.report(kind="rank_killed")
    assert rig4.end().status is ActionStatus.VERIFIED
    assert rig4.wardens["n0"].did("world") == 1


def test_an_unreachable_culprit_holds_nobody_up_and_is_fenced_when_it_is_back(tmp_path: Path) -> None:
    with rig(tmp_path, n2=NOBODY) as made:
        service = made.start()
        made.report(kind="node_lost")
        assert made.end().status is ActionStatus.VERIFIED
        assert made.steps("waiting") == ["isolate n2"]
        assert service.fences.nodes() == ("n2",)
        made.services.remove(service)
        service.stop()
        made.urls["n2"] = _serve_again(made)
        second = made.start("two")
        wait_for("the fence", lambda: "isolate n2" in made.steps("done"))
        assert made.wardens["n2"].excluded
        assert second.fences.nodes() == ()
        assert made.wardens["n2"].did("stop") == 1


def _serve_again(made: Rig) -> str:
    from tests.actions.fake_warden import serve

    context = serve(made.wardens["n2"])
    made.keep.append(context)
    return str(context.__enter__())


def test_a_silent_member_is_left_out_in_a_second_round(tmp_path: Path) -> None:
    with rig(tmp_path, n1=NOBODY) as made:
        made.start()
        made.report(kind="rank_killed")
        end = made.end()
        assert (end.status, end.detail["generation"]) == (ActionStatus.VERIFIED, "3")
        assert made.wardens["n0"].members == ["n0", "n2", "n3"]


def test_more_silent_members_than_the_breaker_allows_are_for_a_person(tmp_path: Path) -> None:
    with rig(tmp_path, n1=NOBODY, n3=NOBODY) as made:
        made.start()
        made.report(kind="rank_killed")
        end = made.end()
        assert (end.status, end.rail, end.detail["page"]) == (ActionStatus.FAILED, "breaker", "1")
        assert "n1, n3 did not answer" in end.reason


def test_too_few_nodes_hold_and_page_before_anything_is_done(rig4: Rig) -> None:
    rig4.start(actions={"min_nodes": 4})
    rig4.report()
    end = rig4.end()
    assert (end.status, end.rail, end.detail["page"]) == (ActionStatus.DENIED, "capacity", "1")
    assert rig4.effects() == []


def test_breaker_latches_and_is_reset_by_an_operator(rig4: Rig) -> None:
    service = rig4.start()
    rig4.wardens["n1"].excluded = "by hand"
    service.watch.refresh()
    rig4.report()
    end = rig4.end()
    assert (end.rail, "2 of 4 nodes would be out (n1, n2)" in end.reason) == ("breaker", True)
    rig4.wardens["n1"].excluded = ""
    rig4.report(revision=2)
    rig4.report(incident_id="i2", kind="rank_killed")
    assert rig4.end("i2").rail == "breaker"
    operator(service).reset_breaker("it was the detector")
    rig4.report(incident_id="i2", kind="rank_killed", revision=2)
    assert rig4.end("i2", 2).status is ActionStatus.VERIFIED


def operator(service: ActionService) -> OperatorClient:
    host, port = service.server.address
    from dataclasses import replace

    listening = replace(service.config.actions, listen=f"{host}:{port}")
    return OperatorClient(replace(service.config, actions=listening), "ann")


def test_approval_lets_a_plan_run(rig4: Rig) -> None:
    service = rig4.start(mode="approve")
    rig4.report()
    wait_for("the plan to wait", lambda: any(r.status is ActionStatus.WAITING for r in rig4.read()))
    assert rig4.effects() == []
    plan_id = rig4.plans[0].plan_id
    row = operator(service).approve(plan_id, "looks right")
    assert (row["status"], row["reason"]) == ("started", "approved by ann: looks right")
    assert rig4.end().status is ActionStatus.VERIFIED
    with pytest.raises(UsageError, match="is verified already"):
        operator(service).approve(plan_id, "again")
    with pytest.raises(UsageError, match="no plan 'nonsense' in the ledger"):
        operator(service).approve("nonsense", "x")


def test_rejection_is_final_for_the_same_plan(rig4: Rig) -> None:
    service = rig4.start(mode="approve")
    rig4.report()
    wait_for("the plan", lambda: rig4.read() and rig4.plans)
    operator(service).reject(rig4.plans[0].plan_id, "we know")
    end = rig4.end()
    assert (end.status, end.reason) == (ActionStatus.DENIED, "rejected by ann: we know")
    rig4.report(revision=2)
    rig4.report(incident_id="i2", kind="data_slow", reach=Reach.NOTIFY)
    rig4.end("i2")
    assert len(rig4.plans) == 2


def test_approval_after_the_incident_closed_is_too_late(rig4: Rig) -> None:
    service = rig4.start(mode="approve")
    rig4.report()
    wait_for("the plan", lambda: rig4.read() and rig4.plans)
    rig4.report(revision=2, status=IncidentStatus.CLOSED)
    assert rig4.end().status is ActionStatus.EXPIRED
    with pytest.raises(UsageError, match="is expired already: incident i1 is closed"):
        operator(service).approve(rig4.plans[0].plan_id, "late")
    assert rig4.effects() == []


def test_approval_asks_the_rails_again(rig4: Rig) -> None:
    service = rig4.start(mode="approve")
    rig4.report()
    wait_for("the plan", lambda: rig4.read() and rig4.plans)
    for warden in rig4.wardens.values():
        warden.generation = 5
    service.watch.refresh()
    row = operator(service).approve(rig4.plans[0].plan_id, "go")
    assert (row["status"], row["rail"]) == ("denied", "precondition")
    assert rig4.effects() == []


def test_kill_switch_by_file_by_api_and_by_record(rig4: Rig) -> None:
    service = rig4.start()
    switch = rig4.directory / "KILL_SWITCH"
    switch.write_text("storage maintenance")
    rig4.report(kind="rank_killed")
    end = rig4.end()
    assert (end.rail, end.reason) == ("kill_switch", "the kill switch is on: storage maintenance")
    operator(service).kill_switch(False, "done")
    assert not switch.exists()
    rig4.publisher.publish(
        POLICY.name, b"kill_switch", encode(PolicyChange(key="kill_switch", value="on", author="bob", comment="no"))
    )
    rig4.report(incident_id="i2", kind="rank_killed")
    assert rig4.end("i2").reason == "the kill switch is on: bob: no"
    rig4.publisher.publish(
        POLICY.name, b"kill_switch", encode(PolicyChange(key="kill_switch", value="off", author="bob"))
    )
    rig4.report(incident_id="i2", kind="rank_killed", revision=2)
    assert rig4.end("i2", 2).status is ActionStatus.VERIFIED
    operator(service).kill_switch(True, "enough")
    assert switch.read_text() == "ann: enough\n"
    assert operator(service).health()["kill_switch"] == "ann: enough"


def test_kill_switch_works_without_a_service(rig4: Rig) -> None:
    alone = OperatorClient(rig4.config(actions={"listen": "127.0.0.1:9"}), "ann")
    load_token(rig4.directory / "operator.token")
    assert alone.kill_switch(True, "the service hangs")["on"] is True
    assert (rig4.directory / "KILL_SWITCH").read_text() == "ann: the service hangs\n"
    alone.kill_switch(False, "fine again")
    assert not (rig4.directory / "KILL_SWITCH").exists()
    with pytest.raises(UnavailableError, match=r"no action service answers at 127\.0\.0\.1:9"):
        alone.plans()


def test_kill_switch_in_the_middle_of_a_plan_stops_it(rig4: Rig) -> None:
    rig4.start()

    def throw(warden: FakeWarden, verb: str) -> None:
        (rig4.directory / "KILL_SWITCH").write_text("stop")

    rig4.wardens["n2"].on_effect = throw
    rig4.report(kind="node_lost")
    end = rig4.end()
    assert (end.status, end.rail, end.detail["page"]) == (ActionStatus.FAILED, "kill_switch", "1")
    assert rig4.effects() == [("n2", "stop")]


def test_a_record_may_lower_the_mode_never_raise_it(rig4: Rig) -> None:
    rig4.start(mode="auto")
    rig4.publisher.publish(POLICY.name, b"mode", encode(PolicyChange(key="mode", value="recommend")))
    rig4.report()
    assert rig4.end().status is ActionStatus.RECOMMENDED
    rig4.services.pop().stop()
    rig4.publisher.publish(POLICY.name, b"mode", encode(PolicyChange(key="mode", value="auto")))
    rig4.start("two", mode="recommend")
    rig4.report(incident_id="i2")
    assert rig4.end("i2").status is ActionStatus.RECOMMENDED
    assert rig4.effects() == []


def test_an_operator_returns_a_node_and_the_job_grows(rig4: Rig) -> None:
    service = rig4.start()
    rig4.report()
    assert rig4.end().status is ActionStatus.VERIFIED
    service.watch.refresh()
    made = operator(service).return_node("n2", "new fan")
    ended = wait_for("the return", lambda: (s := service.ledger.plan(made["plan_id"])) and s.ended)
    assert (ended.status, rig4.wardens["n0"].members) == (ActionStatus.VERIFIED, ["n0", "n1", "n3", "n2"])
    assert not rig4.wardens["n2"].excluded
    assert "(probe: no node check is installed" in service.ledger.rows_of(made["plan_id"])[0].reason
    with pytest.raises(UsageError, match="node n9 is not known"):
        operator(service).return_node("n9", "x")
    rig4.wardens["n3"].mute = True
    service.watch.refresh()
    with pytest.raises(UsageError, match="node n3 does not answer"):
        operator(service).return_node("n3", "x")


def test_two_services_and_only_one_acts(rig4: Rig) -> None:
    first = rig4.start()
    second = rig4.start("two", wait=False)
    wait_for("the second to stand by", lambda: second.state.startswith("standby") and second.caught_up)
    assert f"leads with fence {first.ledger.fence}" in second.state
    rig4.report(kind="rank_killed")
    assert rig4.end().status is ActionStatus.VERIFIED
    assert rig4.effects() == [(name, "world") for name in NODES]
    with pytest.raises(UsageError, match="does not lead"):
        operator(second).reset_breaker("x")
    rig4.services.remove(first)
    first.stop()
    wait_for("the second to lead", lambda: second.leading)
    assert second.ledger.fence == first.ledger.fence + 1
    rig4.report(kind="rank_killed", incident_id="i2", culprits=(Entity(EntityKind.NODE, "n1"),))
    assert rig4.end("i2").status is ActionStatus.VERIFIED


def test_the_wardens_hear_of_a_new_leader_at_once(rig4: Rig) -> None:
    service = rig4.start()
    wait_for("the fence", lambda: all(w.fence == service.ledger.fence for w in rig4.wardens.values()))
    assert rig4.effects(of=("stop", "world", "save", "status")) == []


def test_a_lost_ledger_is_refused_by_the_wardens_until_an_operator_raises_the_fence(rig4: Rig) -> None:
    for warden in rig4.wardens.values():
        warden.fence = 40
    service = rig4.start()
    rig4.report(kind="rank_killed")
    end = rig4.end()
    assert (end.status, "fence 1 is lower than 40" in end.reason) == (ActionStatus.FAILED, True)
    assert rig4.effects() == []
    operator(service).raise_fence(40, "the old ledger is gone")
    rig4.report(kind="rank_killed", incident_id="i2", culprits=(Entity(EntityKind.NODE, "n1"),))
    assert rig4.end("i2").status is ActionStatus.VERIFIED


def test_a_ledger_that_cannot_be_written_means_nothing_is_done_and_said(rig4: Rig) -> None:
    service = rig4.start()
    pages = service.ledger._db.execute("PRAGMA page_count").fetchone()[0]
    service.ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    rig4.report(kind="rank_killed", culprits=(Entity(EntityKind.RANK, "demo/2" + "x" * 500_000, "n2"),))
    held = wait_for("the sentence", lambda: next((r for r in rig4.read() if r.rail == "ledger"), None))
    assert (held.status, held.detail["page"]) == (ActionStatus.WAITING, "1")
    assert "free space on its disk" in held.reason
    assert rig4.effects() == []
    service.ledger._db.execute("PRAGMA max_page_count = 1000000")
    assert rig4.end().status is ActionStatus.VERIFIED, "it goes on by itself once there is space"
    assert len([r for r in rig4.results if r.rail == "ledger"]) == 1


def test_rows_that_were_not_delivered_are_sent_again(rig4: Rig) -> None:
    service = rig4.start()
    rig4.bus.available = True  # type: ignore[attr-defined]

    def broker_goes(warden: FakeWarden, verb: str) -> None:
        rig4.bus.available = False  # type: ignore[attr-defined]

    rig4.wardens["n0"].on_effect = broker_goes
    rig4.report(kind="rank_killed")
    wait_for("the plan to end", lambda: (p := service.ledger.newest_plan("i1")) and p.ended)
    rig4.bus.available = True  # type: ignore[attr-defined]
    assert rig4.end().status is ActionStatus.VERIFIED

    def all_told() -> bool:
        rig4.read()
        return sorted({r.seq for r in rig4.results}) == [row.seq for row in service.ledger.rows_after(0)]

    wait_for("every row of the ledger to be told, the lost one too", all_told)


def test_the_api_shows_ledger_nodes_and_incidents(rig4: Rig) -> None:
    service = rig4.start()
    rig4.report(kind="rank_killed")
    rig4.end()
    ask = operator(service)
    assert ask.health()["state"] == "leading"
    (plan,) = ask.plans()
    assert (plan["status"], plan["kind"], plan["steps"][0]["verb"]) == ("verified", "rank_killed", "restart")
    assert [node["node"] for node in ask.nodes()] == list(NODES)
    assert len(ask._ask("GET", "/v1/ledger?after=1")) == len(service.ledger.rows_after(1))
    assert ask._ask("GET", "/v1/incidents")[0]["culprits"][0]["name"] == "demo/2"
    assert "tw_actions_total" in _get(service, "/metrics")
    with pytest.raises(UsageError, match="limit = 'x'"):
        ask._ask("GET", "/v1/plans?limit=x")
    with pytest.raises(UsageError, match="author and reason are needed"):
        ask.reset_breaker("  ")


def _get(service: ActionService, path: str, **headers: str) -> str:
    connection = http.client.HTTPConnection(*service.server.address, timeout=60)
    connection.request("GET", path, headers=headers)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def test_without_the_token_nothing_changes(rig4: Rig) -> None:
    service = rig4.start()
    connection = http.client.HTTPConnection(*service.server.address, timeout=60)
    body = json.dumps({"on": True, "author": "eve", "reason": "x"})
    connection.request("POST", "/v1/kill-switch", body, {TOKEN_HEADER: "guess"})
    assert connection.getresponse().status == 401
    assert not (rig4.directory / "KILL_SWITCH").exists()


def test_a_taken_port_is_said_before_anything_starts(rig4: Rig) -> None:
    service = rig4.start()
    host, port = service.server.address
    with pytest.raises(UnavailableError, match="choose a free port"):
        ActionService(make_parts(rig4.config(actions={"listen": f"{host}:{port}"}), SystemClock()))


def test_a_decision_takes_milliseconds(rig4: Rig) -> None:
    """No bound on time: the decision must be made without asking any warden."""
    service = rig4.start()
    for warden in rig4.wardens.values():
        warden.mute = True
    rig4.report(kind="rank_killed")
    wait_for("the decision", lambda: rig4.read() and rig4.plans)
    wait_for("the decision to be measured", lambda: service.metrics.value("tw_decision_ms_count") == 1)


def test_wardens_that_are_slow_to_hear_of_a_new_leader_do_not_cost_it_the_lease(
    rig4: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = WardenBackend.announce

    def slow(backend: WardenBackend, order: Order) -> dict[str, int]:
        time.sleep(2 * LEASE_S)
        return plain(backend, order)

    monkeypatch.setattr(WardenBackend, "announce", slow)
    services = [rig4.start(name, wait=False) for name in ("one", "two")]
    wait_for("a leader", lambda: any(service.leading for service in services))
    assert sorted(service.ledger.fence for service in services) == [0, 1], "the other one took the lease meanwhile"


def test_a_node_whose_name_makes_no_address_is_a_dead_letter_and_the_next_one_is_learnt(rig4: Rig) -> None:
    for name in ("evil@127.0.0.1:1#", "a/b", "n9"):
        event = TopologyEvent(entity=f"node:{name}")
        rig4.publisher.publish(TOPOLOGY.name, name.encode(), encode(event))
    config = rig4.config()
    config.plugins["backends"]["warden"]["url_template"] = "http://{node}:9470"
    service = ActionService(make_parts(config, SystemClock()), None, "one", LEASE_S, catch_up_s=0.05)
    rig4.services.append(service)
    for message in service._subscriber.poll(0.0):
        service._take(message)
    assert sorted(service.watch.refresh()) == [*NODES, "n9"]
    assert len(rig4.read_dead()) == 2
    assert "evil@127.0.0.1:1#" in rig4.dead[0].reason


def test_an_incident_that_breaks_the_decision_does_not_take_others_along(rig4: Rig) -> None:
    service = ActionService(make_parts(rig4.config(), SystemClock()), None, "one", LEASE_S, catch_up_s=0.05)
    rig4.services.append(service)
    asked: list[str] = []

    def consider(incident: Incident) -> None:
        asked.append(incident.incident_id)
        if incident.incident_id == "i1":
            raise KeyError("nobody thought of this")
        if incident.incident_id == "i2":
            raise BusError("the broker is away")

    service.desk.consider = consider  # type: ignore[method-assign]
    for name in ("i1", "i2", "i3"):
        rig4.report(incident_id=name)
    for message in service._subscriber.poll(0.0):
        service._take(message)
    service._decide_pending()
    assert asked == ["i1", "i2", "i3"]
    (letter,) = rig4.read_dead()
    assert "nobody thought of this" in letter.reason
    assert list(service._pending) == ["i2"], "what may pass is asked again"
