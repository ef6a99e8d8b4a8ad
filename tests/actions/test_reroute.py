"""An operator may have slow links answered by `reroute`: the culprit's node is told, once, and nothing is restarted."""

from __future__ import annotations

from pathlib import Path

from tests.actions.harness import rig
from trainwarden.records import ActionStatus

POLICY = {"mode": "auto", "kinds": {"link_slow": {"remedy": ["reroute"]}}}


def test_the_culprits_node_moves_its_traffic_and_nobody_restarts(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.start(policy=POLICY)
        made.report(kind="link_slow")
        end = made.end()
        assert end.status is ActionStatus.VERIFIED, end.reason
        assert made.steps("done") == ["reroute n2"]
        assert made.effects(of=("reroute", "world", "stop")) == [("n2", "reroute")]
        (args,) = [args for verb, _, args in made.wardens["n2"].effects if verb == "reroute"]
        assert (args["rail"], args["undo"], args["dry_run"]) == ("", False, False)


def test_a_warden_without_links_ends_the_plan_with_its_reason(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.wardens["n2"].has_links = False
        made.start(policy=POLICY)
        made.report(kind="link_slow")
        end = made.end()
        assert end.status is ActionStatus.FAILED
        assert "no links file" in end.reason
