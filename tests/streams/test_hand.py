"""Who has which unit, without a broker: what assignment, rebalance and a standstill do to a worker's hand."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition

from streams import app, dealing
from streams.stage import CorrelatorStage, Output
from streams.units import Unit, UnitMetrics, deck, units
from trainwarden.bus import Message
from trainwarden.clock import SimulatedClock
from trainwarden.config import Config, from_table
from trainwarden.errors import ConfigError, UnavailableError
from trainwarden.records import Verdict, decode, encode
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import ALL, STAGED, TICKS, UNITS, needed

DECK = deck(TICKS.partitions, UNITS.partitions)


class Service:
    """Stands in for a unit at work."""

    made: list[Service]

    def __init__(self, *_: Any, unit: Unit, **__: Any) -> None:
        self.name = unit.name
        self.ready = asyncio.Event()
        self.paused = self.given_away = self.saved = False
        self.disabled: dict[str, str] = {}
        type(self).made.append(self)

    async def run(self) -> None:
        self.ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.saved = not self.given_away

    async def settle(self) -> None:
        self.paused = True


class Producer:
    """A broker's face."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


async def nothing_said(config: Config, topic: str, start: int = 0) -> list[Message]:
    return []


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    Service.made = []
    monkeypatch.setattr(app, "AIOKafkaProducer", lambda **_: Producer())
    monkeypatch.setattr(dealing, "RawService", Service)
    monkeypatch.setattr(
        dealing.UnitsApplication, "_correlate", lambda self, held, correlator: held.service.run(), raising=True
    )
    monkeypatch.setattr(dealing, "read_all", nothing_said)
    return from_table({"run_dir": str(tmp_path), "kafka": {"url": "kafka://127.0.0.1:1"}, "streams": {"stages": 2}})


def parts(*numbers: int) -> list[TopicPartition]:
    return [TopicPartition(UNITS.name, number) for number in numbers]


def play(config: Config, scene: Any, clock: SimulatedClock | None = None) -> None:
    async def act() -> None:
        made = dealing.UnitsApplication(config, Metrics("worker"), clock or SimulatedClock(0), DECK)
        try:
            result: Coroutine[Any, Any, None] = scene(made)
            await result
        finally:
            await made._end()

    asyncio.run(act())


def test_units_are_taken_up_kept_and_given_away_as_kafka_says(config: Config) -> None:
    async def scene(worker: dealing.UnitsApplication) -> None:
        await worker._assigned(None, parts(0, 2, 5))
        await asyncio.sleep(0)
        assert worker._ready() == ["share/relation", "block/0", "share/jobs"]
        kept = worker._hand["block/0"].service
        await worker._revoked(None, parts(0, 2, 5))
        assert all(service.paused for service in Service.made)
        await worker._assigned(None, parts(2, 3))
        await asyncio.sleep(0)
        assert worker._ready() == ["block/0", "block/1"]
        assert worker._hand["block/0"].service is kept
        assert not kept.paused

    play(config, scene)
    saved = {service.name: service.saved for service in Service.made}
    assert saved == {"share/relation": False, "share/jobs": False, "block/0": True, "block/1": True}


def test_a_worker_without_a_unit_stands_by_and_partitions_beyond_the_deck_are_nobodys(config: Config) -> None:
    async def scene(worker: dealing.UnitsApplication) -> None:
        await worker._assigned(None, [])
        assert not worker.leads
        await worker._assigned(None, [*parts(40), TopicPartition("tw.other", 1)])
        assert not worker._hand

    play(config, scene)


def test_a_worker_that_stood_still_begins_anew_with_what_it_is_dealt_then(config: Config) -> None:
    """What it had in memory may be older than what somebody else has said meanwhile."""
    clock = SimulatedClock(0)

    async def scene(worker: dealing.UnitsApplication) -> None:
        await worker._assigned(None, parts(2, 3))
        before = worker._hand["block/0"].service
        clock.sleep(30)
        await worker._assigned(None, parts(2))
        assert worker._hand["block/0"].service is not before
        assert before.given_away
        assert not worker._pulse.stood_still

    play(config, scene, clock)


@pytest.mark.parametrize("dealt_meanwhile", [False, True])
def test_a_worker_that_wakes_gives_all_back_and_waits_for_word(
    config: Config, monkeypatch: pytest.MonkeyPatch, dealt_meanwhile: bool
) -> None:
    monkeypatch.setattr(dealing, "SESSION_TIMEOUT_S", 0.0)
    monkeypatch.setattr(dealing, "HEARTBEAT_S", 0.01)
    clock = SimulatedClock(0)

    async def scene(worker: dealing.UnitsApplication) -> None:
        await worker._assigned(None, parts(2, 3))
        clock.sleep(30)
        waking = asyncio.ensure_future(worker._wake())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not worker._hand
        if dealt_meanwhile:
            await worker._assigned(None, parts(4))
        await waking
        assert list(worker._hand) == (["block/2"] if dealt_meanwhile else ["block/0", "block/1"])
        assert not worker._pulse.stood_still

    play(config, scene, clock)


def test_a_unit_that_misses_its_cancellation_is_cancelled_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `asyncio.wait_for` does before Python 3.12 when the cancellation meets the answer: a rebalance must not hang on it."""
    monkeypatch.setattr(app, "CANCEL_S", 0.01)
    missed = []

    async def deaf(service: Service) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            missed.append(service.name)
        await asyncio.Event().wait()

    monkeypatch.setattr(Service, "run", deaf)

    async def scene(worker: dealing.UnitsApplication) -> None:
        await worker._assigned(None, parts(3))
        await asyncio.sleep(0)
        task = worker._hand["block/1"].task
        await asyncio.wait_for(worker._assigned(None, []), 20)
        assert task.cancelled()
        assert missed == ["block/1"]

    play(config, scene)


def test_a_unit_that_breaks_breaks_the_worker(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(service: Service) -> None:
        raise ZeroDivisionError(service.name)

    monkeypatch.setattr(Service, "run", broken)

    async def scene(worker: dealing.UnitsApplication) -> None:
        await worker._assigned(None, parts(3))
        await asyncio.sleep(0)
        task = worker._hand["block/1"].task
        assert task in worker._working()
        with pytest.raises(ZeroDivisionError, match="block/1"):
            task.result()

    play(config, scene)


def test_a_broken_detector_is_said_by_the_worker_that_has_it_and_taken_back_by_the_next(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the correlator is: each unit speaks of its own health."""
    monkeypatch.setattr(dealing, "HEALTH_S", 0.0)
    said: list[Verdict] = []
    clock = SimulatedClock(10**18)

    async def deliver(outlet: app.Outlet, outputs: list[Output]) -> dict[str, int]:
        said.extend(decode(output.value) for output in outputs)
        return {}

    monkeypatch.setattr(app.Outlet, "deliver", deliver)
    held: list[Message] = []

    async def past(config: Config, topic: str, start: int = 0) -> list[Message]:
        return held if topic == "tw.incidents" else []

    monkeypatch.setattr(dealing, "read_all", past)

    async def passes(seconds: int) -> None:
        for _ in range(seconds):
            clock.sleep(1)
            for _ in range(5):  # so that every task has had its turn
                await asyncio.sleep(0)

    async def breaks(worker: dealing.UnitsApplication) -> None:
        await worker._assigned(None, parts(1, 3))
        (broken,) = (made for made in Service.made if made.name == "share/lines")
        broken.disabled["dynamic_threshold"] = "ZeroDivisionError()"
        await passes(3)

    play(config, breaks, clock)
    assert [(v.kind, v.entity.name, v.clears) for v in said] == [("detector_off", "worker:dynamic_threshold", False)]
    correlator = CorrelatorStage(config, clock)
    correlator.take(Message("tw.verdicts", 0, 0, b"", encode(said.pop()), 0))
    clock.sleep(10)
    held += [Message("tw.incidents", 0, 0, b"", output.value, 0) for output in correlator.tick()]

    async def goes_on(worker: dealing.UnitsApplication) -> None:
        worker._pulse.beat()
        await worker._assigned(None, parts(1, 3))
        await passes(3)

    play(config, goes_on, clock)
    assert [(v.kind, v.entity.name, v.clears) for v in said] == [("detector_off", "worker:dynamic_threshold", True)]


def test_a_deck_has_every_unit_once_and_keeps_its_order_when_partitions_are_added() -> None:
    small, large = deck(4, 9), deck(8, 20)
    assert sorted(unit.name for unit in small) == sorted(unit.name for unit in units(4))
    assert sorted(unit.name for unit in large) == sorted(unit.name for unit in units(8))
    assert [unit.name for unit in large[: len(small)]] == [unit.name for unit in small]
    assert {unit.blocks for unit in large if unit.share} == {8}


def test_too_few_partitions_are_told_with_the_number_that_is_needed() -> None:
    with pytest.raises(UnavailableError, match=r"tw.units has 9 partitions, 13 are needed.*8 partitions of tw.ticks"):
        deck(8, 9)


def test_the_topics_of_two_stages_are_made_only_for_them_and_fit_each_other() -> None:
    assert needed(1) == ALL
    assert needed(2) == (*ALL, *STAGED)
    assert UNITS.partitions == len(units())
    with pytest.raises(ConfigError, match=r"streams.stages: found 3, expected 1 or 2"):
        from_table({"streams": {"stages": 3}})


def test_metrics_of_a_unit_carry_its_name() -> None:
    metrics = UnitMetrics("block/1")
    metrics.count("tw_records_total", topic="tw.ticks")
    assert metrics.page() == 'tw_records_total{component="worker",topic="tw.ticks",unit="block/1"} 1\n'
    assert metrics.value("tw_records_total", topic="tw.ticks") == 1
