"""Who computed wrong first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from detectors.base import Frame
from detectors.steps.corruption import CorruptionDetector
from detectors.synthetic import Scene, SyntheticCluster
from trainwarden.records import Verdict

Script = Callable[[int], Scene | None]


def said(frames: list[Frame]) -> list[Verdict]:
    detector = CorruptionDetector()
    return [v for frame in frames for v in detector.update(frame)]


def spoken(verdicts: list[Verdict]) -> list[tuple[str, str]]:
    return sorted({(v.kind, v.entity.name) for v in verdicts if not v.clears})


def frames(script: Script, seconds: int = 30) -> list[Frame]:
    return SyntheticCluster(seed=5).frames(seconds, script)


def test_rank_that_was_first_is_named_though_all_are_bad_later() -> None:
    def script(second: int) -> Scene | None:
        return Scene(not_finite={2}) if second == 10 else Scene(not_finite={0, 1, 2, 3}) if second > 10 else None

    verdicts = said(frames(script))
    assert spoken(verdicts) == [("non_finite", "n2")]
    assert verdicts[0].rank == 2


def test_all_ranks_at_once_is_the_jobs_own_doing() -> None:
    assert spoken(said(frames(lambda s: Scene(not_finite={0, 1, 2, 3}) if s >= 10 else None))) == [
        ("non_finite", "synthetic")
    ]


def _with_bad_rows(given: list[Frame], bad: set[int]) -> list[Frame]:
    """Loss of rank 1 is not finite in the steps `bad` only."""
    changed = []
    for frame in given:
        steps = []
        for report in frame.steps:
            rows = tuple(
                replace(row, finite=False, loss=float("nan") if report.rank == 1 else row.loss)
                if row.step in bad
                else row
                for row in report.rows
            )
            steps.append(replace(report, rows=rows))
        changed.append(Frame(frame.now_ns, frame.ticks, tuple(steps), frame.logs, frame.topology))
    return changed


@pytest.mark.parametrize(("bad", "expected"), [({100}, []), ({100, 101, 103}, [("non_finite", "n1")])])
def test_single_bad_step_is_what_loss_scaling_does(bad: set[int], expected: list[tuple[str, str]]) -> None:
    assert spoken(said(_with_bad_rows(frames(lambda s: None), bad))) == expected


def test_reduced_norm_alone_blames_nobody() -> None:
    given = []
    for frame in frames(lambda s: None):
        steps = tuple(
            replace(r, rows=tuple(replace(w, finite=False, grad_norm=float("nan")) for w in r.rows))
            for r in frame.steps
        )
        given.append(
            Frame(
                frame.now_ns,
                frame.ticks,
                steps if frame.now_ns > given_after else frame.steps,
                frame.logs,
                frame.topology,
            )
        )
    assert spoken(said(given)) == []


given_after = 1_700_000_010 * 1_000_000_000


def test_finite_again_is_taken_back() -> None:
    verdicts = said(frames(lambda s: Scene(not_finite={1}) if 10 <= s < 15 else None))
    assert verdicts[-1].clears
    assert verdicts[-1].entity.name == "n1"


def test_replica_that_differs_is_named_after_two_checks() -> None:
    assert spoken(said(frames(lambda s: Scene(odd_sums={3}) if s >= 10 else None))) == [("silent_corruption", "n3")]


def test_sharded_parameters_always_differ_and_mean_nothing() -> None:
    assert said(frames(lambda s: Scene(odd_sums={3}))) == []


def test_two_and_two_cannot_be_told_apart() -> None:
    assert said(frames(lambda s: Scene(odd_sums={2, 3}) if s >= 10 else None)) == []
