"""The store says that it is behind, on the topic where the worker hears it, and takes it back."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
from msgspec import structs

from streams.store.service import metrics_page
from streams.store.vitals import StoreHealth
from streams.store.writer import BatchLimits, StoreWriter
from tests.store.make_records import incident, publish
from tests.store.test_writer import known_catalogs, ticks
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import SimulatedClock
from trainwarden.config import Config
from trainwarden.embedded.ports import free_port
from trainwarden.errors import ConfigError
from trainwarden.records import Entity, EntityKind, IncidentStatus, Verdict, decode
from trainwarden.selfmetrics import Metrics

STEP_S = 5.0


@pytest.fixture(autouse=True)
def nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus in memory waits in real time for what does not come."""
    monkeypatch.setattr("streams.store.writer.IDLE_POLL_S", 0.0)


class Away:
    """A client whose store is away while `away`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.away = False

    def __getattr__(self, name: str) -> Any:
        if self.away and name in ("insert_arrow", "command", "query"):
            raise ConnectionRefusedError("refused")
        return getattr(self._client, name)


def said(bus: MemoryBus) -> list[Verdict]:
    """What lies on the verdicts topic."""
    found = [decode(message.value) for message in bus.partitions("tw.verdicts")[0]]
    return [record for record in found if isinstance(record, Verdict)]


def test_a_store_that_is_away_is_said_and_taken_back_with_nothing_lost(client: Any) -> None:
    bus, clock, metrics, link = MemoryBus(), SimulatedClock(), Metrics("store"), Away(client)
    publish(bus, known_catalogs())
    writer = StoreWriter(bus, link, clock, metrics, "c", BatchLimits(age_ms=0, catalog_wait_s=0.2))
    health = StoreHealth(Config(cluster="c"), bus, client, clock, metrics)

    def run(cycles: int) -> None:
        for _ in range(cycles):
            writer.cycle()
            health.look(writer)
            clock.sleep(STEP_S)

    run(5)
    assert said(bus) == []
    link.away = True
    publish(bus, ticks(1, 3))
    run(6)
    assert [(v.kind, v.entity.name, v.clears) for v in said(bus)][:1] == [("pipeline_late", "store", False)]
    assert "not taking rows" in said(bus)[0].text
    link.away = False
    run(12)
    assert said(bus)[-1].clears
    assert metrics.value("tw_store_behind_seconds") < 2.0
    assert client.query("SELECT count() FROM host_ticks").result_rows[0][0] == 6
    writer.close()


def test_a_backlog_is_said_although_the_store_takes_rows(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bus, clock, metrics = MemoryBus(), SimulatedClock(), Metrics("store")
    publish(bus, known_catalogs())
    writer = StoreWriter(bus, client, clock, metrics, "c", BatchLimits(age_ms=0))
    monkeypatch.setattr(type(writer._subscriber), "unread", lambda self: 40_000)
    health = StoreHealth(Config(cluster="c"), bus, client, clock, metrics)
    for _ in range(8):
        writer.cycle()
        health.look(writer)
        clock.sleep(STEP_S)
    assert "faster than they are written" in said(bus)[0].text
    writer.close()


def test_a_successor_takes_back_what_a_killed_writer_said(client: Any) -> None:
    bus, clock, metrics = MemoryBus(), SimulatedClock(), Metrics("store")
    culprit = Entity(EntityKind.TELEMETRY, "store")
    late = structs.replace(incident(1, IncidentStatus.OPEN), kind="pipeline_late", culprits=(culprit,))
    publish(bus, [*known_catalogs(), ("tw.incidents", b"i", late)])
    writer = StoreWriter(bus, client, clock, metrics, "c", BatchLimits(age_ms=0))
    health = StoreHealth(Config(cluster="c"), bus, client, clock, metrics)
    for _ in range(24):
        writer.cycle()
        health.look(writer)
        clock.sleep(STEP_S)
    assert [(v.kind, v.clears) for v in said(bus)][:1] == [("pipeline_late", True)]
    writer.close()


def test_the_page_is_served_where_it_is_asked_for() -> None:
    metrics = Metrics("store")
    metrics.set("tw_store_behind_seconds", 3.0)
    port = free_port()
    with metrics_page(metrics, f"127.0.0.1:{port}"):
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    assert 'tw_store_behind_seconds{component="store"} 3' in page
    with metrics_page(metrics, ""):
        pass
    with pytest.raises(ConfigError, match="host:port"), metrics_page(metrics, "nonsense"):
        pass
