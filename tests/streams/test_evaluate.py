from __future__ import annotations

import pytest

from streams.evaluate import RIGHT_KINDS, score
from streams.recordings.real_faults import Label
from tests.streams.synthetic import START_NS
from trainwarden.clock import NS_PER_S
from trainwarden.errors import UsageError
from trainwarden.records import Entity, EntityKind, Incident, Reach, Timeline

ABLE = frozenset(kind for kinds in RIGHT_KINDS.values() for kind in kinds)


def label(kind: str, *nodes: str, start_s: float = 30, end_s: float = 60) -> Label:
    return Label(kind, nodes, START_NS + int(start_s * NS_PER_S), START_NS + int(end_s * NS_PER_S))


def incident(kind: str, node: str = "", *, at_s: float = 33, closed_s: float = 0, act: bool = True) -> Incident:
    culprits = (Entity(EntityKind.NODE, node, node),) if node else ()
    times = Timeline(
        verdict_at_ns=START_NS + int(at_s * NS_PER_S),
        closed_at_ns=START_NS + int(closed_s * NS_PER_S) if closed_s else 0,
    )
    return Incident(incident_id=f"{kind}{node}{at_s}", kind=kind, culprits=culprits, reach=Reach.ACT if act else Reach.NOTIFY,
                    remedy=("isolate", "restart") if act else (), timeline=times, observed_at_ns=times.verdict_at_ns)  # fmt: skip


def test_right_culprit_and_kind_is_right_with_its_delay() -> None:
    result = score("r", [incident("compute_slow", "node2")], [label("cpu_throttle", "node2")], ABLE)
    assert result.right
    assert result.found == [("cpu_throttle", 3.0)]


@pytest.mark.parametrize(
    "said",
    [incident("compute_slow", "node1"), incident("link_slow", "node2"), incident("compute_slow", "node2", at_s=90)],
)
def test_wrong_node_wrong_kind_and_too_late_are_misses(said: Incident) -> None:
    assert score("r", [said], [label("cpu_throttle", "node2")], ABLE).missed == ["cpu_throttle"]


def test_an_innocent_node_that_would_be_removed_is_a_false_action_whatever_else_is_right() -> None:
    result = score(
        "r", [incident("compute_slow", "node2"), incident("link_slow", "node0")], [label("cpu_throttle", "node2")], ABLE
    )
    assert result.false_actions == ["link_slow on node0"]
    assert not result.right


def test_clean_runs_shared_causes_and_hard_negatives_must_not_isolate() -> None:
    assert not score("clean", [incident("compute_slow", "node1")], [], ABLE).right
    assert score("clean", [incident("job_slow", act=False)], [], ABLE).right
    fabric = [label("fabric_slow")]
    assert score("f", [incident("fabric_slow", act=False)], fabric, ABLE).right
    assert not score("f", [incident("fabric_slow", act=False), incident("link_slow", "node1")], fabric, ABLE).right
    mild = [label("cpu_throttle_mild", "node1")]
    assert score("m", [], mild, ABLE).right
    assert score("m", [incident("compute_slow", "node1")], mild, ABLE).right
    assert not score("m", [incident("compute_slow", "node3")], mild, ABLE).right


def test_a_fault_that_returns_while_its_incident_is_open_was_named() -> None:
    flaps = [label("link_flap", "node3", start_s=30, end_s=31), label("link_flap", "node3", start_s=40, end_s=41)]
    assert score("r", [incident("link_down", "node3", at_s=31, closed_s=80)], flaps, ABLE).right
    assert score("r", [incident("link_down", "node3", at_s=31, closed_s=35)], flaps, ABLE).missed == ["link_flap"]


def test_kinds_that_no_detector_can_say_are_told_apart_from_misses() -> None:
    result = score("r", [], [label("sdc_bitflip", "node2")], frozenset({"rank_killed"}))
    assert (result.skipped, result.missed) == (["sdc_bitflip"], [])


def test_a_label_nobody_knows_is_an_error_and_not_a_pass() -> None:
    with pytest.raises(UsageError, match="unknown kind 'gremlin'"):
        score("r", [], [label("gremlin", "node2")], ABLE)
