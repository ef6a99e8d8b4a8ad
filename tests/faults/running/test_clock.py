"""The clock of the worker's host or of a node is stepped by an hour: nobody is isolated, and when it is right again all is as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.theatre import ROOT, Theatre, wait_for
from trainwarden.records import Incident, IncidentStatus, LogEvent, Reach, StepReport, Tick

pytestmark = [pytest.mark.kafka, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]

HOUR_S = 3600
ENDED = (IncidentStatus.RECOVERED, IncidentStatus.CLOSED, IncidentStatus.SUPERSEDED)
STEPS = 200
"""So many steps are made on the wrong clock."""


@contextmanager
def on_a_clock(play: Theatre, name: str, words: tuple[str, ...], config: Path) -> Iterator[Path]:
    """A part runs on a clock of its own; gives the file that steps it."""
    file = play.cluster.directory / f"{name}.clock"
    play.cluster.children.stop(name)
    python = play.cluster.trainwarden()[0]
    command = [python, "-m", "tests.faults.stepped", str(file), *words, "--config", str(config)]
    play.cluster.children.start(name, command, PYTHONPATH=str(ROOT))
    play.ready()
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)
        play.cluster.children.stop(name)
        if name == "worker":
            play.cluster.start_service("worker")
        else:
            play.cluster.start_collector(int(name[-1]))
        play.ready()


def furthest(play: Theatre) -> int:
    return max(row.step for row in play.observed.attempts[play.observed.newest_attempt].last.values())


def stepped(play: Theatre, file: Path, by_s: int) -> None:
    """Steps are made on the wrong clock and after; nobody is taken away."""
    attempt, known = play.observed.newest_attempt, {i.incident_id for i in play.observed.loud_incidents()}
    for off_s in (by_s, 0):
        before = furthest(play)
        file.write_text(str(off_s))
        wait_for(f"{STEPS} steps at {off_s} s", lambda: furthest(play) > before + STEPS)  # noqa: B023 - waited for here
    assert play.observed.newest_attempt == attempt, "the job was restarted for a clock"

    def new() -> list[Incident]:
        return [i for i in play.observed.loud_incidents() if i.incident_id not in known]

    wait_for("all that was said of it to be taken back", lambda: all(i.status in ENDED for i in new()))
    accused = [(i.kind, i.title) for i in new() if i.reach is Reach.ACT]
    assert not accused
    play.figures += [(f"(no time) said of a clock: {i.kind}", 0.0) for i in new()]
    play.drained()


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S], ids=["forth", "back"])
def test_the_clock_of_the_worker_is_stepped(play: Theatre, by_s: int) -> None:
    with on_a_clock(play, "worker", ("worker",), play.cluster.directory / "trainwarden.toml") as file:
        stepped(play, file, by_s)
        play.healed(play.hurt("kill", 1))
    play.assert_no_gaps(StepReport)


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S], ids=["forth", "back"])
def test_the_clock_of_a_collector_is_stepped(play: Theatre, by_s: int) -> None:
    with on_a_clock(play, "collector-n1", ("collect",), play.cluster.directory / "n1" / "collector.toml") as file:
        stepped(play, file, by_s)
        play.healed(play.hurt("kill", 2))
    play.assert_no_gaps(Tick, StepReport, LogEvent)
