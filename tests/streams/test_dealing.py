"""Two-stage detection on Kafka: units are dealt to workers, and move when one is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.streams.staged import Staged, stopped
from tests.streams.words import PATIENCE_NS, detectors
from trainwarden.embedded.kafka import ApacheKafka
from trainwarden.records import Incident


@pytest.mark.faults
@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_share_the_units_and_one_that_is_killed_is_not_missed(
    kafka_runtime: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.detect.registry", detectors)
    monkeypatch.setattr("streams.merge.PATIENCE_NS", PATIENCE_NS)
    with ApacheKafka(tmp_path / "kafka") as broker:
        site = Staged(tmp_path, broker.bootstrap)
        try:
            first, second = site.start(), site.start()
            site.until("two workers have all units between them", lambda: site.have_all(first, second))
            site.live(4)
            site.kill_rank(2)
            site.live_until("an incident", lambda: any(isinstance(i, Incident) for i in site.records("tw.incidents")))
            victim, left = (first, second) if "share/jobs" in first.units() else (second, first)
            victim.process.kill()
            site.live_until("the other has all units", lambda: site.have_all(left))
            site.live(2)
            last_s = max(at_s for _, at_s in site.sent)
            site.until("all was looked at", lambda: site.heard_until() >= last_s)
            assert 'tw_up{component="worker",unit="share/jobs"} 1' in left.page("metrics")
            stopped(left)
            site.assert_nothing_lost()
            assert site.opinions() == site.retold_by_one()
            assert len({i.incident_id for i in site.records("tw.incidents") if isinstance(i, Incident)}) == 1
        finally:
            site.close()
