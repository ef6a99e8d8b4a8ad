"""The five reasons, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.notify.make_notices import START_NS, Desk, action, incident, plan
from trainwarden.clock import NS_PER_S
from trainwarden.records import ActionStatus, Entity, EntityKind, IncidentStatus, Reach


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def told(desk: Desk, *records: Any) -> list[str]:
    """Causes of the notices that these records bring about."""
    before = len(desk.sender.calls)
    desk.say(*records)
    desk.deliver()
    return desk.causes()[before:]


def test_a_new_incident_is_told_once(desk: Desk) -> None:
    assert told(desk, incident(1)) == ["first"]
    assert told(desk, incident(2, confidence=0.99, report="more text")) == []
    assert told(desk, incident(2)) == []


def test_a_redelivered_revision_is_told_once(desk: Desk) -> None:
    assert told(desk, incident(1), incident(1)) == ["first"]
    assert desk.metrics.value("tw_duplicates_total", topic="tw.incidents") == 1


def test_an_older_revision_changes_nothing(desk: Desk) -> None:
    assert told(desk, incident(5)) == ["first"]
    assert told(desk, incident(4, severity="warning")) == []


def test_another_culprit_or_severity_is_told(desk: Desk) -> None:
    told(desk, incident(1))
    assert told(desk, incident(2, culprits=(Entity(EntityKind.LEAF, "leaf-07"),))) == ["changed"]
    assert told(desk, incident(3, culprits=(Entity(EntityKind.LEAF, "leaf-07"),), severity="warning")) == ["changed"]


def test_below_notify_nobody_is_told_until_the_reach_rises(desk: Desk) -> None:
    assert told(desk, incident(1, reach=Reach.CORRELATE)) == []
    assert told(desk, incident(2, reach=Reach.NOTIFY)) == ["first"]


@pytest.mark.parametrize("status", [IncidentStatus.RECOVERED, IncidentStatus.CLOSED, IncidentStatus.SUPERSEDED])
def test_the_end_is_told_to_those_who_heard_of_the_beginning(desk: Desk, status: IncidentStatus) -> None:
    told(desk, incident(1))
    assert told(desk, incident(2, status)) == ["resolved"]
    body = json.loads(desk.sender.calls[-1].body)
    assert (body["status"], body["alerts"][0]["status"]) == ("resolved", "resolved")
    assert told(desk, incident(3, IncidentStatus.CLOSED)) == []


def test_an_end_without_a_beginning_is_not_told(desk: Desk) -> None:
    assert told(desk, incident(7, IncidentStatus.CLOSED)) == []


def test_ends_may_be_switched_off(tmp_path: Path) -> None:
    desk = Desk(tmp_path, {"send_resolved": False})
    told(desk, incident(1))
    assert told(desk, incident(2, IncidentStatus.CLOSED)) == []


def test_what_breaks_out_again_is_a_first_again_under_the_same_identity(desk: Desk) -> None:
    told(desk, incident(1), incident(2, IncidentStatus.RECOVERED))
    assert told(desk, incident(3, kind="rank_killed")) == ["first"]
    first, again = json.loads(desk.sender.calls[0].body), json.loads(desk.sender.calls[-1].body)
    assert first["alerts"][0]["labels"] == again["alerts"][0]["labels"]
    assert first["groupKey"] == again["groupKey"]
    assert first["trainwarden"]["notice_id"] != again["trainwarden"]["notice_id"]


def test_it_is_repeated_while_it_fires(tmp_path: Path) -> None:
    desk = Desk(tmp_path, {"repeat_s": "1h"})
    told(desk, incident(1))
    for hour in range(1, 4):
        desk.clock.advance_ns(1800 * NS_PER_S)
        desk.service.repeat()
        assert desk.deliver() == 0
        desk.clock.advance_ns(1801 * NS_PER_S)
        desk.service.repeat()
        assert desk.deliver() == 1, hour
    assert desk.causes() == ["first", "repeat", "repeat", "repeat"]
    assert len({call.headers["webhook-id"] for call in desk.sender.calls}) == 4
    told(desk, incident(2, IncidentStatus.CLOSED))
    desk.clock.advance_ns(7200 * NS_PER_S)
    desk.service.repeat()
    assert desk.deliver() == 0


@pytest.mark.parametrize(
    ("row", "causes"),
    [
        (action(ActionStatus.PLANNED), []),
        (action(ActionStatus.STARTED, "restart"), []),
        (action(ActionStatus.DONE, "restart"), []),
        (action(ActionStatus.FAILED, "restart"), ["action"]),
        (action(ActionStatus.VERIFIED), ["action"]),
        (action(ActionStatus.DENIED, rail="breaker", reason="half of the nodes are out"), ["action"]),
        (action(ActionStatus.WAITING), ["action"]),
        (action(ActionStatus.STARTED, "restart", detail={"page": "1"}), ["action"]),
    ],
)
def test_results_of_actions(desk: Desk, row: Any, causes: list[str]) -> None:
    told(desk, incident(1))
    assert told(desk, row) == causes
    assert told(desk, row) == [], "the same row again"


def test_what_was_done_before_the_first_notice_is_in_it(desk: Desk) -> None:
    assert told(desk, plan(), action(ActionStatus.VERIFIED), incident(1)) == ["first"]
    own = json.loads(desk.sender.calls[0].body)["trainwarden"]
    assert [row["status"] for row in own["actions"]] == ["verified"]
    assert own["plan"]["steps"] == [{"verb": "restart", "target": "job:llm"}]


def test_results_after_the_end_are_not_told(desk: Desk) -> None:
    told(desk, incident(1), incident(2, IncidentStatus.RECOVERED))
    assert told(desk, action(ActionStatus.VERIFIED)) == []


def test_identity_never_moves(desk: Desk) -> None:
    told(desk, incident(1))
    told(
        desk,
        incident(
            2,
            kind="node_lost",
            severity="warning",
            attempt=15,
            culprit_rank=3,
            culprits=(Entity(EntityKind.NODE, "n3"),),
        ),
    )
    told(desk, incident(3, IncidentStatus.CLOSED))
    bodies = [json.loads(call.body) for call in desk.sender.calls]
    assert [body["trainwarden"]["cause"] for body in bodies] == ["first", "changed", "resolved"]
    assert len({json.dumps([body["groupKey"], body["alerts"][0]["labels"], body["alerts"][0]["fingerprint"],
                            body["alerts"][0]["startsAt"]]) for body in bodies}) == 1  # fmt: skip
    assert bodies[1]["trainwarden"]["kind"] == "node_lost"
    assert bodies[0]["alerts"][0]["startsAt"] == "2025-11-29T07:06:40.000Z"
    assert START_NS % NS_PER_S == 0
