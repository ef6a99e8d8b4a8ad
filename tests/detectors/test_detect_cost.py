"""The cost benchmark on a small cluster: every detector is asked on real frames, and the sums are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import calibration, detect_cost
from benchmarks.calibration import Opinion, fits
from detectors.base import registry
from streams.recordings.real_faults import Label
from trainwarden.records import Entity, EntityKind, Reach, Verdict


def test_every_detector_of_the_families_is_measured_and_quiet_on_health() -> None:
    result = detect_cost.measure(nodes=12, ticks=6, warm_ticks=6)
    rows = result["detectors"]
    assert isinstance(rows, list)
    families = detect_cost.FAMILIES
    expected = {name for name, kind in registry().all().items() if kind.__module__.split(".")[1] in families}
    assert {row["name"] for row in rows} == expected
    assert result["total_ms"] == pytest.approx(sum(row["mean_ms"] for row in rows))
    assert not sum(row["spoken"] for row in rows)
    assert (result["metrics"], result["ranks"]) == (430, 96)
    text = detect_cost.table(result)
    assert all(row["name"] in text for row in rows)


def test_the_clusters_frames_are_what_the_pipeline_makes() -> None:
    frames = list(detect_cost.Cluster(nodes=10).frames(3))
    tick = frames[0].ticks[0]
    assert sum(m.values.size for m in tick.families.values()) == 10 * 430
    assert len(frames[0].steps) == 80
    assert not frames[1].steps
    assert {layout.job for layout in frames[0].topology.jobs()} == {"large", "small"}
    assert frames[0].topology.attributes("n00000")["probe_rails"].startswith("n00001=0 ")


def verdict(kind: str, node: str, at_ns: int, reach: Reach = Reach.ACT) -> Verdict:
    return Verdict(detector="d", kind=kind, entity=Entity(EntityKind.NODE, node, node), window_end_ns=at_ns, onset_at_ns=at_ns,
                   confidence=0.9, reach=reach)  # fmt: skip


def test_an_opinion_is_right_by_node_time_and_name() -> None:
    label = Label("kill9", ("node2",), 100_000_000_000, 160_000_000_000)
    assert fits(verdict("rank_killed", "node2", 101_000_000_000), label)
    assert not fits(verdict("rank_killed", "node1", 101_000_000_000), label)
    assert not fits(verdict("rank_killed", "node2", 10_000_000_000), label)
    assert not fits(verdict("compute_slow", "node2", 101_000_000_000), label)
    assert fits(verdict("threshold", "node2", 101_000_000_000, Reach.CORRELATE), label)


def test_restatements_count_once_and_the_table_shows_each_detector() -> None:
    label = Label("kill9", ("node2",), 100_000_000_000, 160_000_000_000)
    again = [verdict("rank_killed", "node2", 101_000_000_000)] * 3
    found = calibration.opinions(again, [label])
    assert found == [Opinion("d", "rank_killed", 0.9, True)]
    assert "rank_killed" in calibration.table(found)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        calibration.of_folder(tmp_path / "none")
