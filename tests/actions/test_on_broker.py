"""The action service on a broker that speaks Kafka's protocol."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actions.builders import NODES
from tests.actions.harness import Rig, rig, wait_for
from trainwarden.embedded.tansu import TansuBroker
from trainwarden.records import ActionStatus, Entity, EntityKind, IncidentStatus


@pytest.fixture
def on_tansu(tmp_path: Path) -> Iterator[Rig]:
    with TansuBroker(tmp_path / "tansu.log") as broker, rig(tmp_path, f"kafka://{broker.bootstrap}") as made:
        made.timeouts_ms = (10_000, 10_000, 20_000)
        yield made


@pytest.mark.slow
def test_incidents_come_in_and_rows_go_out(on_tansu: Rig) -> None:
    on_tansu.start(verify_s=60)
    on_tansu.report(kind="rank_killed")
    assert on_tansu.end().status is ActionStatus.VERIFIED
    assert [plan.incident_id for plan in on_tansu.plans] == ["i1"]
    sequence = [row.seq for row in on_tansu.results]
    assert sequence == sorted(sequence)
    assert on_tansu.effects() == [(name, "world") for name in NODES]


@pytest.mark.slow
def test_a_restarted_service_reads_the_past_and_repeats_nothing(on_tansu: Rig) -> None:
    first = on_tansu.start(verify_s=60)
    on_tansu.report(kind="rank_killed")
    assert on_tansu.end().status is ActionStatus.VERIFIED
    on_tansu.report(incident_id="old", kind="rank_killed", observed_at_ns=time.time_ns() - 400 * 10**9)
    on_tansu.report(incident_id="over", kind="rank_killed")
    on_tansu.report(incident_id="over", kind="rank_killed", revision=2, status=IncidentStatus.CLOSED)
    on_tansu.services.remove(first)
    first.stop()
    second = on_tansu.start("two", verify_s=60)
    on_tansu.report(incident_id="i2", kind="rank_killed", culprits=(Entity(EntityKind.NODE, "n1"),))
    assert on_tansu.end("i2").status is ActionStatus.VERIFIED
    assert on_tansu.ends("old") == []
    assert on_tansu.wardens["n0"].generation == 3 + len(
        [e for e in on_tansu.ends("over") if e.status is ActionStatus.VERIFIED]
    )
    wait_for(
        "everything to be known as delivered",
        lambda: second.ledger.marked("published") == len(second.ledger.rows_after(0)),
    )
