"""A worker that is behind leaves out the right thing, says so, and a successor and a replay leave out the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from detectors.base import Frame
from detectors.base import registry as installed
from streams import detect
from streams import replay as replaying
from streams.detect import Pipeline
from streams.evaluate import evaluate
from streams.replay import replay_recording
from streams.shedding import patient
from tests.streams.fingerprint import Detectors, Fingerprint
from tests.streams.test_service import CONFIG, Desk
from trainwarden.config import from_table
from trainwarden.records import Verdict, encode

ROOT = Path(__file__).parents[2]


class Trend(Fingerprint):
    """Like `Fingerprint`, and taken for one that follows trends."""

    name = "trend"


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A worker with one detector that may be shown less and one that may not."""
    monkeypatch.setattr(detect, "patient", lambda detector: detector.name == Trend.name)
    return Desk(CONFIG, Detectors(Fingerprint, Trend))


def fall_behind(desk: Desk, grid_points: int) -> None:
    """What the host of the worker would read off the broker, on a machine where a grid point takes half a second."""
    desk.worker.stage._shedding.point_ms = 500.0
    desk.worker.stage.note_lag({"tw.ticks": grid_points * len(desk.cluster.nodes)})


def test_only_those_who_follow_levels_and_trends_are_shown_less() -> None:
    shown_less = {name for name, kind in installed().all().items() if patient(kind())}
    assert {"dynamic_threshold", "series_residual", "relation"} <= shown_less
    assert not shown_less & {"hang", "mesh_links", "straggler", "fatal_code", "clock_skew"}
    assert not patient(Fingerprint()), "of a detector from elsewhere nothing is known"


def test_levels_are_left_out_while_behind_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Frame]] = {"fingerprint": [], "trend": []}

    def note(self: Fingerprint, frame: Frame) -> list[Verdict]:
        seen[self.name].append(frame)
        return []

    for kind in (Fingerprint, Trend):
        monkeypatch.setattr(kind, "update", note)
    monkeypatch.setattr(detect, "patient", lambda detector: detector.name == Trend.name)
    desk = Desk(CONFIG, Detectors(Fingerprint, Trend))
    desk.run(10)
    fall_behind(desk, 30)
    desk.run(16)
    fall_behind(desk, 0)
    desk.run(10)

    def count(name: str, of: str) -> int:
        return sum(len(getattr(frame, of)) for frame in seen[name])

    whole, thin = count("fingerprint", "ticks"), count("trend", "ticks")
    assert whole - thin == 12 == desk.worker.stage.pipeline._metrics.value("tw_ticks_shed_total")
    for of in ("steps", "logs"):
        assert count("fingerprint", of) == count("trend", of)
    assert {cut.keep_every for cut in desk.on("tw.cuts")} == {1, 4}


def test_a_successor_and_a_replay_leave_out_the_same(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.run(8)
    fall_behind(desk, 70)
    desk.run(8)
    said = desk.verdicts()
    desk.boot()
    desk.run(8)
    again = desk.verdicts()
    assert again[: len(said)] == said, "a repeat would be a second record under another identity, or other words"
    monkeypatch.setattr(replaying, "Pipeline", lambda config: Pipeline(config, desk.detectors))  # type: ignore[arg-type]
    told = replay_recording(desk.record(tmp_path / "recording"), CONFIG)
    assert {encode(verdict) for verdict in told.verdicts} == set(again)


@pytest.mark.parametrize(
    "runs", [["sigstop", "net_loss", "cpu_throttle", "clean1"], pytest.param([], marks=pytest.mark.long, id="all")]
)
def test_with_one_point_in_eight_real_faults_still_come_out_right(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Pipeline.run
    monkeypatch.setattr(Pipeline, "run", lambda self, frame, keep_every=1: whole(self, frame, 8))
    lines: list[str] = []
    assert evaluate(ROOT / "tests/recordings/data", from_table({}), lines.append, names=runs), lines
