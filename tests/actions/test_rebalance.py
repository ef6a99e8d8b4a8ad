"""Less work for a slow rank: decided from costs, carried out once, verified by the step rate, given back when it is well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actions import rebalancing, shares
from actions.backends.base import Order
from actions.backends.client import Unreachable
from actions.backends.warden import parse_status
from actions.planner import PlannerSettings, plan
from actions.shares import RankShare, propose, stage_advice
from detectors.steps.imbalance import ImbalanceDetector
from tests.actions.builders import NODES, incident, job, node
from tests.actions.harness import Rig, rig, wait_for
from trainwarden.policy import Policy
from trainwarden.records import ActionStatus, Mode, Verb

WELL = RankShare(8, 32, 10.0, 5.0, 100.0)
SLOW = replace(WELL, micro_ms=20.0)


def four(second: RankShare = SLOW) -> dict[int, RankShare]:
    return {0: WELL, 1: WELL, 2: second, 3: WELL}


class TestShares:
    def test_a_rank_at_half_speed_gets_half_of_the_others(self) -> None:
        found = propose(four(), 4)
        assert found.shares == (10, 9, 4, 9)
        assert found.gain_ratio == pytest.approx(165 / 105 - 1)
        assert str(found) == "shares 10/9/4/9, 57% more steps a second expected"

    def test_no_division_is_better(self) -> None:
        ranks = {n: RankShare(2, 8, cost, 3.0, 1.0) for n, cost in enumerate((1.0, 2.5, 4.0, 1.5))}
        chosen = max(ranks[n].busy_ms(s) for n, s in enumerate(shares.fastest(list(ranks.values()))))
        divisions = [
            (a, b, c, 8 - a - b - c) for a in range(1, 6) for b in range(1, 6) for c in range(1, 6) if a + b + c < 8
        ]
        assert chosen == min(max(ranks[n].busy_ms(s) for n, s in enumerate(division)) for division in divisions)

    @pytest.mark.parametrize(
        ("ranks", "message"),
        [
            ({}, "divides no batch"),
            ({0: WELL, 1: WELL, 3: WELL}, "rank 2 has not said"),
            (four(replace(SLOW, recent_steps=3)), "only 3 steps since"),
            (four(replace(WELL, micro_ms=10.3)), "would gain"),
        ],
    )
    def test_when_there_is_nothing_to_change(self, ranks: dict[int, RankShare], message: str) -> None:
        assert message in propose(ranks, 4).why_not

    def test_stages_are_a_persons_work(self) -> None:
        assert "move 33% of its work" in stage_advice({0: 100.0, 1: 200.0, 2: 100.0})
        assert "nothing to move" in stage_advice({0: 100.0, 1: 101.0})

    def test_a_plan_for_an_unequal_pipeline_says_what_to_move(self) -> None:
        """From the detector's own verdict to the sentence a person reads in the plan."""
        example = ImbalanceDetector.example()
        detector = ImbalanceDetector()
        verdict = [said for frame in example.frames for said in detector.update(frame)][-1]
        news = incident(kind="imbalance", culprits=(), evidence=verdict.evidence, reach=verdict.reach)
        made = plan(news, Policy(mode=Mode.AUTO), job(), 0, 1, PlannerSettings())
        assert made is not None
        assert (made.mode, [step.verb for step in made.steps]) == (Mode.RECOMMEND, [Verb.REBALANCE])
        stages = shares.stages_of(verdict.evidence)
        assert stages[1] == pytest.approx(stages[0] * 1.5, rel=0.5)
        assert made.reason.startswith("imbalance (no culprit): rebalance: stage 1 takes")
        assert made.reason.endswith(f"first to stage 0 ({stages[0]:.0f} ms)")

    def test_what_a_warden_says(self) -> None:
        said = {"share": 8, "total": 32, "micro_ms": 10.0, "fixed_ms": 5.0, "recent_ms": 100.0, "recent_steps": 8}
        assert parse_status("n0", {"ranks": [{"rank": 0, "shares": said}]}).shares == {0: WELL}
        assert parse_status("n0", {"ranks": [{"rank": 0, "shares": {**said, "micro_ms": None}}]}).shares == {}
        with pytest.raises(Unreachable):
            parse_status("n0", {"ranks": [{"rank": 0, "shares": {"micro_ms": 1, "fixed_ms": 1, "recent_ms": "x"}}]})


class TestPlanner:
    def decide(self, second: RankShare, **over: Any) -> Any:
        ranks = four(second)
        state = job(*(replace(node(name), shares={n: ranks[n]}) for n, name in enumerate(NODES)))
        return plan(incident(**over), Policy(mode=Mode.AUTO), state, 0, 1, PlannerSettings())

    def test_a_mildly_slow_rank_is_given_less_instead_of_being_taken_out(self) -> None:
        found = self.decide(SLOW)
        assert [step.verb.value for step in found.steps] == ["rebalance"]
        assert found.mode is Mode.AUTO
        assert found.reason.endswith("rebalance: shares 10/9/4/9, 57% more steps a second expected")

    @pytest.mark.parametrize(
        ("second", "over"),
        [(replace(WELL, micro_ms=40.0), {}), (SLOW, {"recurrence": 1}), (WELL, {}), (SLOW, {"kind": "link_slow"})],
    )
    def test_one_that_is_far_slower_or_comes_back_is_taken_out(self, second: RankShare, over: dict[str, Any]) -> None:
        assert "isolate" in [step.verb.value for step in self.decide(second, **over).steps]


@pytest.fixture
def divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(rebalancing, "LOOK_S", 0.05)
    monkeypatch.setattr("actions.service.LOOK_S", 0.05)
    with rig(tmp_path) as made:
        for name, warden in made.wardens.items():
            warden.shares, warden.micro_ms = [8, 8, 8, 8], 20.0 if name == "n2" else 10.0
        yield made


def test_a_slow_rank_is_relieved_verified_and_given_its_share_back(divided: Rig) -> None:
    divided.start()
    divided.report()
    end = divided.end()
    assert (end.status, end.detail["speedup"]) == (ActionStatus.VERIFIED, "2.000"), end.reason
    assert divided.wardens["n0"].shares == [10, 9, 4, 9]
    assert divided.effects(of=("stop", "world")) == []
    prepared = [args for verb, _, args in divided.wardens["n3"].effects if verb == "shares"]
    assert [args["phase"] for args in prepared] == ["prepare"]
    gone = [args["phase"] for verb, _, args in divided.wardens["n0"].effects if verb == "shares"]
    assert gone == ["prepare", "go"]

    divided.wardens["n2"].micro_ms = 10.5
    wait_for("even shares", lambda: divided.wardens["n2"].shares == [8, 8, 8, 8])
    wait_for("the row", lambda: divided.steps("reverted"))
    assert divided.steps("reverted") == ["rebalance demo"]


def test_shares_that_do_not_help_are_taken_back(divided: Rig) -> None:
    for warden in divided.wardens.values():
        warden.change_helps = False
    divided.start()
    divided.report()
    end = divided.end()
    assert end.status is ActionStatus.REVERTED
    assert "1.00 times the step rate" in end.reason
    assert divided.wardens["n1"].shares == [8, 8, 8, 8]


def test_recommend_changes_nothing_and_says_what_it_would_do(divided: Rig) -> None:
    divided.start(mode="recommend")
    divided.report()
    end = divided.end()
    assert end.status is ActionStatus.RECOMMENDED
    assert "shares 10/9/4/9" in end.reason
    assert divided.effects(of=("shares",)) == []


def test_a_dry_run_asks_all_and_goes_with_nobody_and_an_old_leader_is_refused(divided: Rig) -> None:
    service = divided.start()
    backend, fence = service.backend, service.ledger.fence
    assert backend.rebalance(Order("dry", "demo", fence), (10, 9, 4, 9), dry_run=True).status == "done"
    assert {warden.applied for warden in divided.wardens.values()} == {""}
    assert backend.rebalance(Order("old", "demo", fence - 1), (10, 9, 4, 9)).status == "refused"
    assert {warden.applied for warden in divided.wardens.values()} == {""}
    divided.wardens["n3"].shares = []
    outcome = backend.rebalance(Order("odd", "demo", fence), (10, 9, 4, 9))
    assert "divides no batch" in outcome.reason
    phases = [args["phase"] for verb, key, args in divided.wardens["n0"].effects if verb == "shares" and "odd" in key]
    assert phases == ["prepare", "void"], "rank 0 is told that it is off"
