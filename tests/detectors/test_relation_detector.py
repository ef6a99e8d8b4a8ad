"""The relation detector on frames: what it says, how far it reaches, and what it does without a model."""

from __future__ import annotations

import logging
from functools import cache

import pytest

from benchmarks.detect import steps_data, steps_real
from detectors.base import Frame
from detectors.contract import run
from detectors.relation.relation import RelationDetector, RelationSettings
from detectors.synthetic import Scene, SyntheticCluster
from models.relation import weights
from streams.detect import Pipeline
from trainwarden.config import from_table
from trainwarden.errors import ConfigError, UsageError
from trainwarden.records import Entity, EntityKind, Reach, Verdict

FAULT_S, LENGTH_S = 80, 125
SLOW_RACK = {4: 28.0, 5: 30.0, 6: 32.0, 7: 30.0}


@cache
def frames() -> tuple[Frame, ...]:
    racks = {node: f"rack-{node // 4}" for node in range(16)}

    def script(second: int) -> Scene:
        return Scene(racks=racks, compute_ms=SLOW_RACK if second >= FAULT_S else {})

    return tuple(SyntheticCluster(nodes=16, seed=2).frames(LENGTH_S, script))


@cache
def said() -> tuple[Verdict, ...]:
    return tuple(run(RelationDetector(), frames()))


def test_a_rack_that_slows_down_is_one_shared_cause() -> None:
    assert {(v.kind, v.entity) for v in said() if not v.clears} == {("shared_slow", Entity(EntityKind.LEAF, "rack-1"))}
    first = said()[0]
    assert first.victims == ("n4", "n5", "n6", "n7")
    assert 0 <= first.window_end_ns - frames()[0].now_ns - FAULT_S * 10**9 <= 35 * 10**9
    assert "rack-1" in first.text
    assert "none of them" in first.text


def test_it_adds_to_what_others_open_and_opens_nothing_unless_asked() -> None:
    pipeline = Pipeline(from_table({}))
    worker_says = [v for frame in frames() for v in pipeline.run(frame) if v.detector == "relation"]
    assert {v.reach for v in said()} == {v.reach for v in worker_says} == {Reach.CORRELATE}
    with pytest.raises(ConfigError, match="act"):
        RelationSettings(reach="act")


def test_what_suffices_to_isolate_opens_an_incident_and_what_is_only_named_does_not() -> None:
    slow = SyntheticCluster(nodes=12, seed=3).frames(
        FAULT_S + 70, lambda second: Scene(data_ms={5: 40.0} if second >= FAULT_S else {})
    )
    verdicts = [v for v in run(RelationDetector(RelationSettings(reach="notify")), slow) if not v.clears]
    assert {(v.kind, v.entity) for v in verdicts} == {("data_slow", Entity(EntityKind.NODE, "n5", "n5"))}
    assert verdicts[0].reach == Reach.CORRELATE
    assert verdicts[-1].reach == Reach.NOTIFY
    assert verdicts[-1].confidence > verdicts[0].confidence
    assert "enough to isolate it" in verdicts[-1].text


def test_evidence_shows_with_whom_it_was_compared_and_the_groups_around_it() -> None:
    own, gains, groups = said()[0].evidence
    assert "n5 (rack)" in own.note
    assert own.values[-1] > 0.05
    assert len(gains.values) >= 2
    assert "rack rack-1" in groups.note


def test_without_a_model_it_is_off_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> weights.Trained:
        raise UsageError("w: no such file, expected model weights")

    monkeypatch.setattr(weights, "load", missing)
    with caplog.at_level(logging.WARNING):
        assert run(RelationDetector(), frames()[:20]) == []
    assert [record.getMessage() for record in caplog.records] == [
        "detector relation is off, all others run: w: no such file, expected model weights"
    ]


def test_a_job_of_few_nodes_is_left_to_others() -> None:
    detector = RelationDetector()
    slow = SyntheticCluster(nodes=4, seed=2).frames(100, lambda s: Scene(compute_ms={1: 60.0} if s > 70 else {}))
    assert run(detector, slow) == []


@pytest.mark.parametrize(("name", "expected"), [("AR", {("compute_slow", "dp0-stage0")}), ("ST", set())])
def test_real_traces_get_the_known_answer(name: str, expected: set[tuple[str, str]]) -> None:
    """ByteDance's slow worker was slow from the first step; the uneven stages of the other job have no bad node."""
    job = next(job for job in steps_data.known_jobs() if job.name == name)
    verdicts = run(RelationDetector(), list(steps_real.frames_of(job)))
    assert {(v.kind, v.entity.name) for v in verdicts if not v.clears} == expected
