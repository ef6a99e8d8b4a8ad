"""kill -9 of every part in the middle of healing, each at its worst moment: nothing lost, nothing done twice, healed all the same."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.faults.theatre import SEEDS, Theatre, wait_for
from trainwarden.records import LogEvent, Reach, StepReport, Tick, Verdict, encode

pytestmark = [pytest.mark.kafka, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

WORKER_MOMENTS = ["verdict-without-cut", "before-incident", *(("after-verdict", "after-incident") if SEEDS else ())]
KILLS = int(os.environ.get("TRAINWARDEN_KILLS", "20"))
"""Kills at random moments, each with a seed of its own."""
ROUNDS = int(os.environ.get("TRAINWARDEN_KILL_ROUNDS", "2"))
"""Lives of the cluster in each of which every part is killed once: many kills in less time."""
PARTS = ("worker", "actions", "store", "collector-n0", "broker", "collector-n1", "collector-n2")
STORE_MOMENTS = ["half-inserted:7", *(("intended:3", "inserted:3") if SEEDS else ())]


def test_collector_is_killed_while_its_rank_is_frozen(play: Theatre) -> None:
    """The DaemonSet (here: the test) starts it again; what lay in its spool is said, and the rank is named all the same."""
    hurt = play.hurt("freeze", 1)
    play.child("collector-n1").kill()
    play.supervise()
    play.healed(hurt)
    play.drained()
    play.assert_no_gaps(Tick, StepReport, LogEvent)


@pytest.mark.parametrize("moment", WORKER_MOMENTS)
def test_worker_is_killed_between_verdict_and_incident(play: Theatre, moment: str) -> None:
    dying = play.start_dying("worker", moment)
    play.worker_leads()
    hurt = play.hurt("kill", 2)
    play.dies(dying)
    died_s = time.monotonic()
    play.supervise()
    play.worker_leads()
    play.figures.append((f"worker killed {moment}: successor leads", time.monotonic() - died_s))
    incident = play.healed(hurt)
    said = {r.verdict_id for r in play.records("tw.verdicts") if isinstance(r, Verdict)}
    assert set(incident.verdict_ids) <= said, "the incident rests on verdicts that nobody has"


@pytest.mark.parametrize("moment", ["after-started", "after-told"])
def test_action_service_is_killed_around_the_order_to_the_wardens(play: Theatre, moment: str) -> None:
    dying = play.start_dying("actions", moment)
    play.actions_lead()
    hurt = play.hurt("kill", 0)
    play.dies(dying)
    play.supervise()
    play.healed(hurt)


@pytest.mark.parametrize("moment", STORE_MOMENTS)
def test_store_writer_is_killed_while_records_flow(play: Theatre, moment: str) -> None:
    """What the store has is compared with the topics at the end of this package, after all kills."""
    play.dies(play.start_dying("store", moment))
    play.supervise()
    play.trains()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_part_is_killed_at_any_moment(play: Theatre, seed: int) -> None:
    rng = random.Random(seed)
    number, fault = rng.randrange(3), rng.choice(("kill", "freeze"))
    part = rng.choice(("worker", "actions", "store", f"collector-n{rng.randrange(3)}"))
    hurt = play.hurt(fault, number)
    moment_ns = time.time_ns() + rng.randrange(4_000_000_000)
    wait_for("the moment", lambda: time.time_ns() >= moment_ns)
    play.child(part).kill()
    play.supervise()
    play.healed(hurt)


def kill(play: Theatre, part: str) -> None:
    """SIGKILL, and the start that a supervisor would give it."""
    if part == "broker":
        play.kafka.kill()
        play.kafka.start()
    else:
        play.child(part).kill()
    play.supervise()


@pytest.mark.parametrize("seed", range(KILLS))
def test_each_part_is_killed_at_random_moments(play: Theatre, seed: int) -> None:
    """In training, every fifth time while a rank is dying; rows of the store are compared with the topics at the end of this package."""
    rng, part = random.Random(seed), PARTS[seed % len(PARTS)]
    hurt = play.hurt(rng.choice(("kill", "freeze")), rng.randrange(3)) if seed % 5 == 4 else None
    moment_ns = time.monotonic_ns() + rng.randrange(2_500_000_000)
    wait_for("the moment", lambda: time.monotonic_ns() >= moment_ns)
    kill(play, part)
    if hurt is not None:
        play.healed(hurt, unheard=part == "broker")
    play.drained()
    if seed % 5 == 4 or seed == KILLS - 1:
        assert_nothing_lost_nor_said_differently(play)


def assert_nothing_lost_nor_said_differently(play: Theatre) -> None:
    play.assert_no_gaps(Tick, StepReport, LogEvent)
    said: dict[str, bytes] = {}
    for verdict in (r for r in play.records("tw.verdicts") if isinstance(r, Verdict)):
        assert said.setdefault(verdict.verdict_id, encode(verdict)) == encode(verdict), "said twice, and differently"


@pytest.mark.parametrize("life", range(ROUNDS))
def test_every_part_is_killed_in_one_life(play: Theatre, life: int) -> None:
    """Each at a random moment, in random order, while those before it come back; every fifth life a rank is hurt afterwards."""
    rng, attempt, begun_s = random.Random(f"life {life}"), play.observed.newest_attempt, time.monotonic()
    known = {incident.incident_id for incident in play.observed.loud_incidents()}
    for part in rng.sample(PARTS, len(PARTS)):
        moment_ns = time.monotonic_ns() + rng.randrange(1_500_000_000)
        wait_for("the moment", lambda: time.monotonic_ns() >= moment_ns)  # noqa: B023 - waited for here
        kill(play, part)
    play.ready()
    play.drained()
    play.figures.append(("life with every part killed: all up, in training and sent", time.monotonic() - begun_s))
    accused = [i for i in play.observed.loud_incidents() if i.incident_id not in known and i.reach is Reach.ACT]
    assert not accused, [(i.kind, i.title) for i in accused]
    assert play.observed.newest_attempt == attempt, "the job was restarted, and nobody had hurt it"
    if life % 5 == 4 or life == ROUNDS - 1:
        play.healed(play.hurt(rng.choice(("kill", "freeze")), rng.randrange(3)))
        assert_nothing_lost_nor_said_differently(play)
