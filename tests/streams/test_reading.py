"""How much is taken before a cut: all that is urgent, so many log lines, and of those each partition has its turn."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError

from streams import reading
from streams.reading import Portions
from trainwarden.bus import Message
from trainwarden.selfmetrics import Metrics

TICKS = [TopicPartition("tw.ticks", number) for number in range(2)]
EVENTS = [TopicPartition("tw.events", number) for number in range(2)]
LOGS = [TopicPartition("tw.logs", number) for number in range(4)]


class Held:
    """A consumer that holds so many messages of each partition, and fetches at most so many at a time."""

    def __init__(self, **counts: int) -> None:
        self.left = {place: counts.get(f"{place.topic[3:]}_{place.partition}", 0) for place in (*TICKS, *EVENTS, *LOGS)}
        self.waits: list[int] = []

    async def getmany(
        self, *places: TopicPartition, timeout_ms: int, max_records: int
    ) -> dict[TopicPartition, list[Any]]:
        assert places, "an empty list would mean all of them"
        self.waits.append(timeout_ms)
        for place in places:
            if count := min(self.left[place], max_records):
                self.left[place] -= count
                told = {"topic": place.topic, "partition": place.partition, "offset": 0, "key": b"", "value": b""}
                return {place: [SimpleNamespace(**told, timestamp=1000 + place.partition)] * count}
        return {}


async def taken(portions: Portions, held: Held, places: list[TopicPartition]) -> list[Message]:
    """All that is taken until nothing more comes."""
    found: list[Message] = []
    while messages := await portions.take(held, places, 0):
        found += messages
    return found


def of(messages: list[Message], place: TopicPartition) -> int:
    return sum((message.topic, message.partition) == place for message in messages)


def test_a_flood_of_log_lines_leaves_the_rest_as_fresh_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reading.PER_CUT, "tw.logs", 1000)
    portions, held = Portions(), Held(ticks_0=300, ticks_1=7000, logs_0=10_000, logs_1=10_000, logs_2=1, logs_3=10_000)
    first = asyncio.run(taken(portions, held, [*TICKS, *LOGS]))
    assert [of(first, place) for place in TICKS] == [300, 7000]
    lines = [of(first, place) for place in LOGS]
    assert sum(lines) == 1000
    assert lines[2] == 1, "whoever says little is not kept waiting by those who say much"
    assert min(lines[0], lines[1], lines[3]) >= 250
    assert portions.age_s("tw.logs", True, 5000.0) == 0.0, "they wait since now"
    assert portions.age_s("tw.logs", True, 9003.0) == 4.003
    assert asyncio.run(taken(portions, held, [*TICKS, *LOGS])) == []
    assert portions.wanted([*TICKS, *LOGS]) == TICKS
    portions.renew()
    second = asyncio.run(taken(portions, held, [*TICKS, *LOGS]))
    assert sum(of(second, place) for place in LOGS) == 1000


def test_events_do_not_wait_for_lines_nor_ticks_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two has a ration of its own, and of events each partition has its turn as well."""
    for topic in reading.PER_CUT:
        monkeypatch.setitem(reading.PER_CUT, topic, 1000)
    flood = {f"logs_{number}": 50_000 for number in range(4)}
    portions, held = Portions(), Held(ticks_0=300, events_0=2, events_1=1, **flood)
    first = asyncio.run(taken(portions, held, [*LOGS, *EVENTS, *TICKS]))
    assert [of(first, place) for place in (*TICKS, *EVENTS)] == [300, 0, 2, 1]
    assert [message.topic for message in first[:303]] == ["tw.ticks"] * 300 + ["tw.events"] * 3

    portions, held = Portions(), Held(ticks_0=300, events_0=50_000, events_1=3, logs_1=7)
    first = asyncio.run(taken(portions, held, [*LOGS, *EVENTS, *TICKS]))
    assert [of(first, place) for place in (TICKS[0], *EVENTS, LOGS[1])] == [300, 997, 3, 7]
    assert portions.wanted([*TICKS, *EVENTS, *LOGS]) == [*TICKS, *LOGS]
    assert portions.age_s("tw.events", True, 5000.0) == portions.age_s("tw.logs", False, 5000.0) == 0.0
    assert portions.age_s("tw.events", True, 7000.0) == 2.0
    metrics = Metrics("worker")
    portions.note_ages({"tw.events": 5, "tw.ticks": 9}, 7500.0, metrics)
    assert [metrics.value(name) for name in reading.AGES.values()] == [2.5, 0.0]
    portions.renew()
    assert of(asyncio.run(taken(portions, held, EVENTS)), EVENTS[0]) == 1000


@pytest.mark.parametrize("places", [TICKS, LOGS, [*TICKS, *LOGS]])
def test_nothing_is_lost_and_waiting_is_for_who_has_nothing(places: list[TopicPartition]) -> None:
    portions, held = Portions(), Held(ticks_0=3, logs_1=4)
    found = asyncio.run(taken(portions, held, places))
    assert len(found) == sum((place in places) * count for place, count in ((TICKS[0], 3), (LOGS[1], 4)))
    assert set(held.waits) == {0}
    assert asyncio.run(portions.take(held, places, 50)) == []
    assert held.waits.count(50) == 1


def test_who_has_had_his_log_lines_waits_for_the_rest_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reading.PER_CUT, "tw.logs", 5)
    portions, held = Portions(), Held(logs_0=9)
    assert len(asyncio.run(taken(portions, held, LOGS))) == 5
    held.waits.clear()
    assert asyncio.run(portions.take(held, LOGS, 50)) == []
    assert held.waits == [], "nobody is asked"


def test_what_was_taken_when_the_next_question_fails_is_told_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    portions, held = Portions(), Held(ticks_0=3, logs_1=2)
    ask, asked = held.getmany, []

    async def broken(*places: TopicPartition, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[Any]]:
        asked.append(places)
        if len(asked) == 2:
            raise KafkaConnectionError
        return await ask(*places, timeout_ms=timeout_ms, max_records=max_records)

    monkeypatch.setattr(held, "getmany", broken)
    with pytest.raises(KafkaConnectionError):
        asyncio.run(portions.take(held, [*TICKS, *LOGS], 0))
    found = asyncio.run(portions.take(held, [*TICKS, *LOGS], 0))
    assert (of(found, TICKS[0]), of(found, LOGS[1])) == (3, 2)


def test_a_line_that_has_just_come_after_an_hour_without_any_is_not_an_hour_late() -> None:
    portions, held = Portions(), Held(logs_3=1)
    asyncio.run(taken(portions, held, LOGS))  # told at 1003 ms
    assert portions.age_s("tw.logs", False, 3_600_000.0) == 0.0
    assert portions.age_s("tw.logs", True, 3_600_250.0) == 0.0
    assert portions.age_s("tw.logs", True, 3_600_500.0) == 0.25
    assert portions.age_s("tw.logs", False, 3_600_750.0) == 0.0
    assert portions.age_s("tw.logs", True, 3_601_000.0) == 0.0
