from __future__ import annotations

import json
from pathlib import Path

import pytest

from streams.evaluate import evaluate, find_runs, summarise
from streams.recording import Recorder
from streams.recordings.real_faults import Label
from streams.scoring import RIGHT_KINDS, score
from tests.streams.synthetic import START_NS, Cluster
from trainwarden.bus import Message
from trainwarden.clock import NS_PER_S
from trainwarden.config import from_table
from trainwarden.errors import UsageError
from trainwarden.records import Entity, EntityKind, Incident, Reach, Timeline, encode

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
    assert [(f.kind, f.delay_s, f.said) for f in result.found] == [("cpu_throttle", 3.0, "compute_slow")]


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
    assert not score("clean", [incident("job_slow", act=False)], [], ABLE).right
    fabric = [label("fabric_slow")]
    assert score("f", [incident("fabric_slow", act=False)], fabric, ABLE).right
    assert not score("f", [incident("fabric_slow", act=False), incident("link_slow", "node1")], fabric, ABLE).right
    mild = [label("cpu_throttle_mild", "node1")]
    assert score("m", [], mild, ABLE).right
    assert score("m", [incident("compute_slow", "node1", act=False)], mild, ABLE).right
    assert not score("m", [incident("compute_slow", "node1")], mild, ABLE).right
    assert not score("m", [incident("compute_slow", "node3", act=False)], mild, ABLE).right


def test_a_fault_that_returns_while_its_incident_is_open_was_named() -> None:
    flaps = [label("link_flap", "node3", start_s=30, end_s=31), label("link_flap", "node3", start_s=40, end_s=41)]
    assert score("r", [incident("link_down", "node3", at_s=31, closed_s=80)], flaps, ABLE).right
    assert score("r", [incident("link_down", "node3", at_s=31, closed_s=35)], flaps, ABLE).missed == ["link_flap"]


def test_of_two_faults_at_once_what_is_said_of_one_is_no_wrong_culprit_of_the_other() -> None:
    both = [label("cpu_throttle", "node2"), label("slow_loader", "node0", start_s=31)]
    said = [incident("data_slow", "node0", at_s=36), incident("compute_slow", "node2", at_s=40)]
    result = score("r", said, both, ABLE)
    assert result.right
    assert result.first_accused_right == 2
    innocent = score("r", [incident("data_slow", "node1", at_s=35), *said], both, ABLE)
    assert not innocent.right
    assert innocent.first_accused_right == 0


def test_kinds_that_no_detector_can_say_are_told_apart_from_misses() -> None:
    result = score("r", [], [label("sdc_bitflip", "node2")], frozenset({"rank_killed"}))
    assert (result.skipped, result.missed) == (["sdc_bitflip"], [])


def test_a_label_nobody_knows_is_judged_by_its_node() -> None:
    assert score("r", [incident("suspect_code", "node2")], [label("gremlin", "node2")], ABLE).right
    wrong = score("r", [incident("suspect_code", "node1")], [label("gremlin", "node2")], ABLE)
    assert wrong.missed == ["gremlin"]
    assert not score("r", [], [label("gremlin", "node2")], ABLE).right


def test_the_summary_counts_events_and_delays() -> None:
    good = score("a", [incident("compute_slow", "node2")], [label("cpu_throttle", "node2")], ABLE, 0.5)
    stray = score("b", [incident("suspect_code", "node1", act=False)], [], ABLE, 0.5)
    summary = summarise([good, stray])
    assert (summary["runs_right"], summary["event_precision"], summary["event_recall"]) == (1, 0.5, 1.0)
    assert (summary["false_incidents_per_node_day"], summary["delay_p50_s"], summary["culprit_first_right"]) == (
        1.0,
        3.0,
        1.0,
    )


def test_own_recordings_with_labels_are_found_and_scored(tmp_path: Path) -> None:
    cluster = Cluster()
    with Recorder(tmp_path / "quiet") as recorder:
        for topic, partition, record in cluster.announcements():
            recorder.write(Message(topic, partition, 0, b"", encode(record), 0))
        for second in range(30):
            for topic, partition, record in cluster.second(second):
                recorder.write(Message(topic, partition, 0, record.node.encode(), encode(record), 0))
    (tmp_path / "quiet" / "labels.json").write_text('{"labels": []}')
    lines: list[str] = []
    assert evaluate(tmp_path, from_table({}), lines.append, as_json=True)
    run, summary = map(json.loads, lines)
    assert (run["run"], run["right"], run["clean"]) == ("quiet", True, True)
    assert summary["summary"]["node_days"] > 0


BAD_LABELS = ("[]", "{", '{"labels": [{"kind": "x"}]}', '{"labels": [{"kind": "x", "nodes": 3, "start": 1, "end": 2}]}')


@pytest.mark.parametrize("text", BAD_LABELS)
def test_labels_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    Recorder(tmp_path / "run").close()
    (tmp_path / "run" / "labels.json").write_text(text)
    with pytest.raises(UsageError, match=r"labels\.json"):
        find_runs(tmp_path)


def test_a_run_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    Recorder(tmp_path / "run").close()
    (tmp_path / "run" / "labels.json").write_text('{"labels": []}')
    with pytest.raises(UsageError, match=r"'other': there are run"):
        find_runs(tmp_path, ["other"])
    with pytest.raises(UsageError, match="no recordings with labels"):
        find_runs(tmp_path / "run" / "below")
