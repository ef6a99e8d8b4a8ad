"""Saves and evaluations that take longer than anybody knows: told, with nobody accused. A frozen rank is still a frozen rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from detectors.base import AlignedTick, FamilyMatrix, Frame
from detectors.steps.hang import HangDetector
from detectors.steps.processes import STATE_DISK, STATE_STOPPED
from detectors.steps.progress import BRIEF, JobProgress
from detectors.steps.writes import Writes
from detectors.synthetic import Scene, SyntheticCluster
from tests.detectors.steps.jobs import START_NS
from trainwarden.clock import NS_PER_S
from trainwarden.policy import KINDS, reach_at_least
from trainwarden.records import Reach, Verdict

BEGINS = 30
Rate = Callable[[int, int], float]
"""(second, rank) → bytes per second that the process writes."""
MB = 1e6


def at_five_seconds(rate: Rate) -> Rate:
    """What the collector makes of it: asked for every five seconds, the mean since the last time, repeated between."""

    def seen(second: int, rank: int) -> float:
        asked = second - second % 5
        return float(np.mean([rate(asked - back, rank) for back in range(5)]))

    return seen


def with_writes(frames: Iterable[Frame], rate: Rate) -> Iterator[Frame]:
    for frame in frames:
        yield replace(frame, ticks=tuple(_written(tick, rate) for tick in frame.ticks))


def _written(tick: AlignedTick, rate: Rate) -> AlignedTick:
    second = (tick.at_ns - START_NS) // NS_PER_S
    known = tick.families["process"]
    ranks = [int(device.removeprefix("rank")) for _, device in known.entities]
    column = np.array([[rate(second, rank)] for rank in ranks], np.float32).reshape(-1, 1)
    family = FamilyMatrix(
        known.family, known.entities, (*known.metrics, "write_bytes_per_s"), np.hstack([known.values, column])
    )
    return replace(tick, families={**tick.families, "process": family})


def said(
    scene: Scene,
    stands_s: int,
    rate: Rate = lambda second, rank: 0.0,
    goes_on: bool = True,
    state: HangDetector | None = None,
) -> list[Verdict]:
    """A job of four ranks that trains for half a minute, stands in this scene for so long, and goes on."""

    def script(second: int) -> Scene | None:
        return scene if BEGINS <= second < BEGINS + stands_s else None

    cluster, detector = SyntheticCluster(4, seed=3, evaluate_every=10_000), state or HangDetector()
    frames = cluster.frames(BEGINS + stands_s + (8 if goes_on else 0), script)
    return [v for frame in with_writes(frames, at_five_seconds(rate)) for v in detector.update(frame)]


def spoken(verdicts: list[Verdict]) -> list[tuple[str, str]]:
    return sorted({(v.kind, v.entity.name) for v in verdicts if not v.clears})


SAVER = Scene(standing=True, cpu_cores={0: 1.0})
"""Rank 0 is busy, the others wait for it."""


def writes_from(begin: int, end: int, rank: int = 0) -> Rate:
    return lambda second, writer: 80 * MB if writer == rank and begin <= second < end else 0.01 * MB


def test_the_first_save_that_is_announced_is_no_frozen_rank() -> None:
    scene = replace(SAVER, phase="checkpoint")
    assert said(scene, 120) == []
    verdicts = said(scene, 200)
    assert spoken(verdicts) == [("checkpoint_stall", "synthetic")]
    assert verdicts[0].value >= 180
    assert verdicts[-1].clears, "it is taken back with the next step"
    assert "the longest before took 0.1 s" in verdicts[0].text, "copies to memory"
    assert not reach_at_least(KINDS["checkpoint_stall"].reach, Reach.ACT), "nothing is done about it"


@pytest.mark.parametrize("states", [{}, {0: STATE_DISK}])
def test_a_save_that_nobody_announced_is_known_by_what_it_writes(states: dict[int, int]) -> None:
    """Without the writing this is a frozen rank: busy alone, or waiting in the kernel alone."""
    scene = replace(SAVER, states=states, cpu_cores={} if states else SAVER.cpu_cores)
    still = replace(scene, cpu_cores={0: 0.0}) if states else scene
    assert spoken(said(still, 60)) == [("rank_frozen", "n0")]
    writes = writes_from(BEGINS, BEGINS + 150)
    assert said(still, 150, writes) == []
    assert spoken(said(still, 200, writes)) == [("checkpoint_stall", "synthetic")]


def test_a_rank_that_writes_while_another_is_stopped_excuses_nobody() -> None:
    scene = Scene(standing=True, states={2: STATE_STOPPED})
    writing, quiet = (said(scene, 20, rate)[0] for rate in (writes_from(BEGINS, BEGINS + 20), lambda second, rank: 0.0))
    assert (writing.kind, writing.entity.name, writing.window_end_ns) == ("rank_frozen", "n2", quiet.window_end_ns)


def test_a_job_that_always_writes_does_not_save() -> None:
    assert spoken(said(SAVER, 60, lambda second, rank: 80 * MB)) == [("rank_frozen", "n0")]


def test_what_was_written_before_the_last_step_excuses_nobody() -> None:
    """A save, its step, and then a rank that hangs: the answer of five seconds still holds the end of the save."""
    assert spoken(said(SAVER, 60, writes_from(BEGINS - 9, BEGINS - 1))) == [("rank_frozen", "n0")]


def test_the_first_evaluation_accuses_nobody() -> None:
    verdicts = said(replace(SAVER, phase="eval"), 200)
    assert spoken(verdicts) == [("job_hang", "synthetic")]
    assert verdicts[0].value >= 180


def test_a_rank_that_hangs_in_a_save_is_accused_once_saves_are_known() -> None:
    job = JobProgress("j", steps_seen=9, last_phase="train", durations_ms=[500.0] * 100)
    detector = HangDetector()
    job._keep_phase("checkpoint", 40.0)
    assert job.phase_ms == {BRIEF + "checkpoint": [40.0]}
    assert detector._is_excused(job, "checkpoint", 100.0), "copies to memory say nothing of the first save to disk"
    job._keep_phase("checkpoint", 20_000.0)
    assert not detector._is_excused(job, "checkpoint", 100.0)
    assert not detector._is_excused(job, "train", 100.0)


def test_a_row_of_a_save_tells_of_a_save_that_is_over() -> None:
    job = JobProgress("j", steps_seen=9, last_phase="checkpoint", durations_ms=[500.0] * 100)
    assert job.phase_now() == "train"


def test_no_excuse_lasts_for_ever() -> None:
    detector = HangDetector()
    job = JobProgress("j", steps_seen=9, last_phase="train")
    assert detector._is_excused(job, "checkpoint", 1799.0)
    assert not detector._is_excused(job, "checkpoint", 1800.0)


def test_a_machine_answers_for_processes_that_cannot_be_asked() -> None:
    (tick,) = next(frame.ticks for frame in SyntheticCluster(4, seed=3).frames(3) if frame.ticks)
    nodes = ("n3", "n1", "n0")
    machines, own = np.array([[9e7], [1e6], [2e7]], np.float32), np.array([[5.0], *[[np.nan]] * 3], np.float32)
    host = FamilyMatrix("host", tuple((n, "") for n in nodes), ("disk_write_bytes_per_s",), machines)
    process = FamilyMatrix("process", tuple((f"n{r}", f"rank{r}") for r in range(4)), ("write_bytes_per_s",), own)
    there = replace(tick, families={"host": host, "process": process})
    found = Writes().of("j", process, np.arange(4), [f"n{r}" for r in range(4)], there)
    assert found.tolist() == pytest.approx([5.0, 0.0, np.nan, 8.3e7], nan_ok=True)
    alone = replace(tick, families={"process": process})
    assert Writes().of("j", process, np.arange(1), ["n0"], alone).tolist() == [5.0]


def test_progress_is_not_learnt_from_where_a_job_stands() -> None:
    job = JobProgress("j", steps_seen=9, durations_ms=[500.0] * 100, progress_ns=100 * NS_PER_S)
    assert job.is_moving(102 * NS_PER_S)
    assert not job.is_moving(104 * NS_PER_S)
