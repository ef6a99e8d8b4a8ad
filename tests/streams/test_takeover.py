"""What a worker reads before it cuts for the first time, on a consumer that answers late."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError

from streams import app
from streams.pulse import Pulse
from streams.reading import PER_CUT
from streams.stage import CorrelatorStage
from streams.units import Unit, units
from trainwarden.bus import Message
from trainwarden.clock import SimulatedClock
from trainwarden.config import Config, from_table
from trainwarden.records import LogEvent, encode
from trainwarden.selfmetrics import Metrics


class Shelf:
    """A consumer whose partitions hold log lines; each fetch brings one of one partition, and the first brings nothing."""

    def __init__(self, *places: TopicPartition, held: int, stored: int = 0) -> None:
        self.held = held
        self.at = dict.fromkeys(places, stored)
        self.fetches = 0
        self.broken = False

    def assignment(self) -> set[TopicPartition]:
        return set(self.at)

    def seek(self, place: TopicPartition, offset: int) -> None:
        self.at[place] = offset

    async def position(self, place: TopicPartition) -> int:
        return self.at[place]

    async def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        if self.broken:
            raise KafkaConnectionError
        return dict.fromkeys(places, self.held)

    async def getmany(self, *places: TopicPartition, **_: Any) -> dict[TopicPartition, list[Any]]:
        self.fetches += 1
        behind = [place for place in places or self.at if self.at[place] < self.held]
        if self.fetches == 1 or not behind:
            return {}
        place = sorted(behind)[0]
        offset, self.at[place] = self.at[place], self.at[place] + 1
        value = encode(LogEvent(node="n0", seq=offset, boot_id="b", observed_at_ns=1))
        where = {"topic": place.topic, "partition": place.partition, "offset": offset}
        return {place: [SimpleNamespace(**where, key=b"", value=value, timestamp=0)]}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return from_table({"run_dir": str(tmp_path), "kafka": {"url": "kafka://127.0.0.1:1"}})


async def nothing(topic: str, start: int) -> list[Message]:
    del topic, start
    return []


def service(config: Config, unit: Unit | None = None) -> app.RawService:
    clock, metrics = SimulatedClock(0), Metrics("worker")
    pulse = Pulse(clock, 5.0)
    correlator = CorrelatorStage(config, clock, metrics) if unit is None else None
    outlet: Any = None
    return app.RawService(config, outlet, correlator, metrics, clock, pulse, unit=unit, past=nothing)


LOGS = [TopicPartition("tw.logs", number) for number in range(2)]
EVENT = TopicPartition("tw.events", 0)


def test_all_that_lies_there_is_read_before_the_first_cut_however_late_it_comes(config: Config) -> None:
    made, shelf = service(config), Shelf(*LOGS, held=3)
    assert asyncio.run(made._read_to_end(shelf, LOGS))
    made._stage.cut(1)
    assert made._stage.positions == {"tw.logs/0": 3, "tw.logs/1": 3}


def test_nothing_is_cut_while_the_broker_does_not_say_how_much_there_is(config: Config) -> None:
    made, shelf = service(config), Shelf(*LOGS, held=3)
    shelf.broken = True
    assert not asyncio.run(made._read_to_end(shelf, LOGS))
    assert shelf.fetches == 0


def test_a_partition_that_never_comes_to_its_end_is_not_waited_for_for_ever(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SILENT_S", 0.0)
    made, shelf = service(config), Shelf(*LOGS, held=3)
    assert asyncio.run(made._read_to_end(shelf, LOGS))
    assert shelf.fetches == 2, "one look at each of them"


@pytest.mark.parametrize(
    ("at", "silent_s", "gone"), [(3, 1.0, False), (3, 6.0, True), (2, 6.0, False), (2, 60.0, True)]
)
def test_recorded_cuts_are_given_up_only_at_the_end_of_what_there_is(
    config: Config, at: int, silent_s: float, gone: bool
) -> None:
    made, shelf = service(config), Shelf(*LOGS, held=3)
    reached = {"tw.logs/0": 3, "tw.logs/1": at}
    assert asyncio.run(made._gone(shelf, reached, silent_s)) is gone
    shelf.broken = True
    assert not asyncio.run(made._gone(shelf, reached, silent_s))


@pytest.mark.parametrize("unit", [None, units()[0]])
def test_without_a_snapshot_reading_begins_at_the_beginning_whatever_the_group_has_stored(
    config: Config, unit: Unit | None
) -> None:
    """Stored positions are for lag monitors: recorded cuts could not be repeated from there."""
    shelf = Shelf(*LOGS, held=3, stored=3)
    asyncio.run(service(config, unit)._resume(shelf))
    assert set(shelf.at.values()) == {0}


def test_a_share_reads_what_else_lay_there_when_it_has_read_a_summary(config: Config) -> None:
    made, shelf = service(config, units()[0]), Shelf(*LOGS, TopicPartition("tw.summaries", 0), held=2)
    assert asyncio.run(made._read_up(shelf))
    assert shelf.fetches == 0, "no summary, no question"
    made._fresh = True
    assert asyncio.run(made._read_up(shelf))
    assert [shelf.at[place] for place in LOGS] == [2, 2]
    assert shelf.at[TopicPartition("tw.summaries", 0)] == 0


class Enough(Exception):
    """All that a shelf holds was taken."""


class Small(Shelf):
    """Says that it is empty when it has been asked in vain for each of its partitions twice."""

    in_vain = 0

    async def getmany(self, *places: TopicPartition, **more: Any) -> dict[TopicPartition, list[Any]]:
        self.in_vain += all(at == self.held for at in self.at.values())
        if self.in_vain > 2 * len(self.at):
            raise Enough
        return await super().getmany(*places, **more)


def test_what_comes_between_two_cuts_is_not_left_for_the_next(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "READ_S", 0.001)
    made, shelf = service(config), Small(*LOGS, held=3)

    async def wait(for_s: float) -> None:
        await made._read_until(shelf, asyncio.get_running_loop().time() + for_s)

    made.paused = True
    asyncio.run(wait(0.005))
    assert shelf.fetches == 0, "nobody knows who leads"
    made.paused = False
    with pytest.raises(Enough):
        asyncio.run(wait(600.0))
    made._stage.cut(1)
    assert made._stage.positions == {"tw.logs/0": 3, "tw.logs/1": 3}


class Flooded(Shelf):
    """Its partitions hold different numbers of log events, and each fetch brings as many as may be; codes are on the topic for events."""

    def __init__(self, held: dict[TopicPartition, int]) -> None:
        super().__init__(*held, held=0)
        self.ends = held

    async def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: self.ends[place] for place in places}

    async def getmany(self, *places: TopicPartition, max_records: int, **_: Any) -> dict[TopicPartition, list[Any]]:
        for place in places:
            first = self.at[place]
            if last := min(self.ends[place], first + max_records) - first:
                self.at[place] = first + last
                return {place: [told(place, offset) for offset in range(first, first + last)]}
        return {}


def told(place: TopicPartition, offset: int) -> SimpleNamespace:
    code = "worker_exit:-9" if place.topic == EVENT.topic else ""
    node = f"n{place.partition}"
    value = encode(LogEvent(node=node, seq=offset, boot_id=place.topic, observed_at_ns=1, code=code, line="a line"))
    return SimpleNamespace(
        topic=place.topic, partition=place.partition, offset=offset, key=b"", value=value, timestamp=0
    )


@pytest.mark.parametrize("unit", [None, units()[0]])
def test_an_event_behind_a_flood_of_lines_is_in_the_next_frame(
    config: Config, unit: Unit | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flood came first, lies in more places, and is not read to its end for many cuts."""
    monkeypatch.setitem(PER_CUT, "tw.logs", 100)
    made, shelf = service(config, unit), Flooded({**dict.fromkeys(LOGS, 5000), EVENT: 1})
    made._portions.renew()
    asyncio.run(made._read(shelf, wait_ms=0))
    made._stage.cut(1)
    positions = made._stage.positions
    assert positions["tw.events/0"] == 1, "it waits behind the lines"
    assert sum(positions[f"tw.logs/{place.partition}"] for place in LOGS) == 100


def test_of_a_flood_of_events_a_cut_takes_so_many_and_each_partition_has_its_turn(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PER_CUT, "tw.events", 100)
    quiet = TopicPartition("tw.events", 1)
    made, shelf = service(config), Flooded({EVENT: 5000, quiet: 2, LOGS[0]: 30})
    for number in (1, 2):
        made._portions.renew()
        asyncio.run(made._read(shelf, wait_ms=0))
        made._stage.cut(number)
        assert made._stage.positions["tw.events/1"] == 2
        assert made._stage.positions["tw.logs/0"] == 30
        assert made._stage.positions["tw.events/0"] == 100 * number - 2


class Clerk(Shelf):
    """Stores the positions of its own partitions only, as the client does."""

    stored: ClassVar[dict[TopicPartition, int]] = {}

    async def commit(self, positions: dict[TopicPartition, int]) -> None:
        assert positions.keys() <= self.at.keys(), "not assigned"
        self.stored.update(positions)


def test_what_a_newer_build_read_besides_keeps_no_position_from_being_stored(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a roll back positions of a topic that only the newer build reads are part of the state."""
    monkeypatch.setattr(Clerk, "stored", {})
    made, shelf = service(config), Clerk(*LOGS, held=3)
    made._stage.pipeline.aligner.positions = {"tw.logs/0": 2, "tw.of-the-future/0": 7}
    asyncio.run(made._commit(shelf))
    assert shelf.stored == {LOGS[0]: 2}
