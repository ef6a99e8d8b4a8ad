"""Parts that hang instead of dying (SIGSTOP): who stands by takes over, and who wakes up has nothing more to say."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.theatre import Theatre, get, wait_for
from trainwarden.demo.processes import Child
from trainwarden.embedded.ports import free_port
from trainwarden.records import FrameCut

pytestmark = [pytest.mark.kafka, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def second_worker(play: Theatre) -> Iterator[tuple[Child, int]]:
    """A worker beside the first, with a page of its own."""
    port, first = free_port(), play.cluster.directory / "trainwarden.toml"
    config = first.with_name("second.toml")
    config.write_text(first.read_text().replace(f":{play.cluster.ports.worker}", f":{port}"))
    command = play.cluster.trainwarden("worker", "--config", str(config))
    child = play.cluster.children.start("worker-second", command)
    try:
        wait_for("the second worker to stand by", lambda: health(port) == "stands by")
        yield child, port
    finally:
        play.cluster.children.stop("worker-second")


def health(port: int) -> str:
    return get(f"http://127.0.0.1:{port}/healthz").strip()


@contextmanager
def hung(child: Child) -> Iterator[None]:
    os.kill(child.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(child.pid, signal.SIGCONT)


def cuts(play: Theatre) -> list[tuple[int, str]]:
    """Number and voice of each cut, in the order of the topic."""
    return [(record.seq, record.boot_id) for record in play.records("tw.cuts") if isinstance(record, FrameCut)]


def test_a_hung_worker_is_succeeded_and_has_nothing_to_say_when_it_wakes(play: Theatre) -> None:
    first = play.child("worker")
    with second_worker(play) as (_, port):
        with hung(first):
            hurt = play.hurt("kill", 1)
            wait_for("the second worker to lead", lambda: health(port) == "leads")
            play.healed(hurt)
        play.healed(play.hurt("freeze", 2))
        said = cuts(play)
        assert len({voice for _, voice in said}) > 1
        assert [number for number, _ in said] == list(range(1, len(said) + 1)), "the one that woke up has cut in"
    play.worker_leads()
    play.healed(play.hurt("kill", 0))


def test_a_hung_store_holds_up_nobody_and_loses_nothing(play: Theatre) -> None:
    """What it holds is compared with the topics at the end of this package."""
    with hung(play.child("store")):
        play.healed(play.hurt("kill", 2))
        play.trains()


def test_a_hung_action_service_heals_late_and_once(play: Theatre) -> None:
    with hung(play.child("actions")):
        hurt = play.hurt("freeze", 0)
        wait_for("the incident", lambda: play.incident_of(hurt))
    play.healed(hurt)


def highest_step(play: Theatre) -> int:
    """Of the ranks that are heard of."""
    return max(row.step for row in play.observed.attempts[play.observed.newest_attempt].last.values())


def test_a_hung_collector_is_told_from_a_hung_rank(play: Theatre) -> None:
    """Its node trains on, and so nothing is done to it."""
    attempt, before = play.observed.newest_attempt, highest_step(play)
    with hung(play.child("collector-n1")):
        wait_for("200 more steps of the others", lambda: highest_step(play) > before + 200)
        assert play.observed.newest_attempt == attempt
    play.drained()
    play.healed(play.hurt("kill", 2))
