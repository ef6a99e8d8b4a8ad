"""Store or broker away for minutes (`TRAINWARDEN_AWAY_MINUTES`, by default half a one): nothing is lost, no verdict is said twice."""

from __future__ import annotations

import os
import time

import pytest

from tests.faults.running.test_full import rows
from tests.faults.theatre import Theatre, wait_for
from trainwarden.records import LogEvent, Reach, StepReport, Tick, Verdict, encode

AWAY_S = 60.0 * float(os.environ.get("TRAINWARDEN_AWAY_MINUTES", "0.5"))
pytestmark = [pytest.mark.kafka, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600 + 2 * AWAY_S)]


def furthest(play: Theatre) -> int:
    return max(row.step for row in play.observed.attempts[play.observed.newest_attempt].last.values())


def stays_away(begun_s: float) -> None:
    wait_for("the end of the absence", lambda: time.monotonic() - begun_s >= AWAY_S, AWAY_S + 60)


def assert_said_once(play: Theatre) -> None:
    """A verdict may lie on the topic again (a successor repeats); then it is the same record."""
    said: dict[str, bytes] = {}
    for record in play.records("tw.verdicts"):
        if isinstance(record, Verdict) and record.cluster == "demo":
            assert said.setdefault(record.verdict_id, encode(record)) == encode(record)


def test_the_store_is_away_for_minutes(play: Theatre) -> None:
    """What it holds is compared with the topics, row by row, at the end of this package."""
    play.child("store").kill()
    begun_s = time.monotonic()
    play.healed(play.hurt("kill", 1))
    play.trains()
    stays_away(begun_s)
    reported = sum(len(r.rows) for r in play.records("tw.steps") if isinstance(r, StepReport) and r.cluster == "demo")
    back_s = time.monotonic()
    play.supervise()
    wait_for("the store to have what it missed", lambda: rows(play) >= reported, 300)
    play.figures.append((f"store away for {AWAY_S:.0f} s: it has caught up", time.monotonic() - back_s))
    assert_said_once(play)


def test_the_broker_is_away_for_minutes(play: Theatre) -> None:
    pids, attempt = play.pids(), play.observed.newest_attempt
    known = {i.incident_id for i in play.observed.loud_incidents()}
    play.kafka.kill()
    stays_away(time.monotonic())
    play.kafka.start()
    back_s = time.monotonic()
    play.drained()
    play.figures.append((f"broker away for {AWAY_S:.0f} s: spools drained", time.monotonic() - back_s))
    play.trains()
    assert play.pids() == pids, "somebody ended or was started again"
    accused = [i for i in play.observed.loud_incidents() if i.incident_id not in known and i.reach is Reach.ACT]
    assert not accused, [(i.kind, i.title) for i in accused]
    assert play.observed.newest_attempt == attempt
    play.healed(play.hurt("freeze", 2))
    play.assert_no_gaps(Tick, StepReport, LogEvent)
    assert_said_once(play)
