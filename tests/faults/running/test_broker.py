"""kill -9 of Kafka and its restart on the same data: all parts resume by themselves and nothing is lost."""

from __future__ import annotations

import time

import pytest

from tests.faults.theatre import Theatre, wait_for
from trainwarden.records import LogEvent, StepReport, Tick

pytestmark = [pytest.mark.kafka, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]


def bring_back(play: Theatre, pids: dict[str, int]) -> None:
    """Start the broker when every collector has begun to spool; nobody else is touched."""
    for number in range(3):
        wait_for(f"n{number} to spool", lambda n=number: play.spooled(n) > 4096)  # type: ignore[misc]
    play.kafka.start()
    back_s = time.monotonic()
    play.drained()
    play.figures.append(("broker back: spools drained", time.monotonic() - back_s))
    play.trains()
    assert play.pids() == pids, "somebody ended or was started again"


def test_broker_is_killed_during_training(play: Theatre) -> None:
    pids = play.pids()
    play.kafka.kill()
    bring_back(play, pids)
    hurt = play.hurt("kill", 1)
    play.healed(hurt)
    play.assert_no_gaps(Tick, StepReport, LogEvent)


def test_broker_is_killed_while_an_incident_is_open(play: Theatre) -> None:
    pids = play.pids()
    hurt = play.hurt("freeze", 2)
    wait_for("the incident", lambda: play.incident_of(hurt))
    play.kafka.kill()
    bring_back(play, pids)
    play.healed(hurt)
    play.assert_no_gaps(Tick)
