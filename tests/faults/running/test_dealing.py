"""Eight workers that share the units of two-stage detection; one is killed, one hangs and wakes: what is said is what one worker says."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.streams.staged import Staged, Worker, stopped
from tests.streams.words import PATIENCE_NS, detectors
from trainwarden.embedded.kafka import ApacheKafka
from trainwarden.records import Incident, Verdict, decode

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1200)]


def owner(workers: list[Worker], unit: str) -> Worker:
    return next(worker for worker in workers if unit in worker.units())


def killed_and_hung(site: Staged) -> None:
    """The cluster is alive all the while."""
    workers = [site.start() for _ in range(8)]
    site.until("eight workers have all units between them", lambda: site.have_all(*workers))
    site.live(3)
    site.kill_rank(2)
    victim = owner(workers, "share/jobs")
    workers.remove(victim)
    victim.process.kill()
    site.live_until("seven have all units", lambda: site.have_all(*workers))
    hung = owner(workers, "block/1")
    others = [worker for worker in workers if worker is not hung]
    os.kill(hung.process.pid, signal.SIGSTOP)
    try:
        site.live_until("six have all units", lambda: site.have_all(*others))
    finally:
        os.kill(hung.process.pid, signal.SIGCONT)
    site.live_until("the one that woke up has units again", lambda: site.have_all(*workers))
    site.live(2)
    last_s = max(at_s for _, at_s in site.sent)
    site.until("all was looked at", lambda: site.heard_until() >= last_s)
    assert "this worker stood still" in hung.log.read_text()
    stopped(*workers)


def told_again_by_one(site: Staged) -> None:
    """A worker alone repeats the recorded cuts from the first one, without any snapshot, and says the same."""
    said = site.opinions()
    site.forget("tw.state", "tw.verdicts")
    alone = site.start()
    site.until("one worker has all units", lambda: site.have_all(alone))
    site.until("all is said again", lambda: said.keys() <= site.opinions().keys())
    stopped(alone)
    again = site.opinions()
    assert {name: again[name] for name in said} == said
    last_ns = max(told.observed_at_ns for told in map(decode, said.values()) if isinstance(told, Verdict))
    new = [decode(again[name]) for name in again.keys() - said.keys()]
    assert all(told.observed_at_ns > last_ns for told in new), "said of the time before, and not by the eight"


def test_eight_workers_of_which_one_is_killed_and_one_hangs_say_what_one_says(
    kafka_runtime: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.detect.registry", detectors)
    monkeypatch.setattr("streams.merge.PATIENCE_NS", PATIENCE_NS)
    with ApacheKafka(tmp_path / "kafka") as broker:
        site = Staged(tmp_path, broker.bootstrap)
        try:
            killed_and_hung(site)
            site.assert_nothing_lost(woken=True)
            assert site.opinions() == site.retold_by_one()
            assert len({i.incident_id for i in site.records("tw.incidents") if isinstance(i, Incident)}) == 1
            told_again_by_one(site)
        finally:
            site.close()
