"""What lies on a topic is read to its end, also while others go on writing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition

from streams import reading
from trainwarden.config import Config

PLACE = TopicPartition("tw.cuts", 0)


class Chatter:
    """A consumer of one partition on which something new lies at every look."""

    def __init__(self, there: int) -> None:
        self.there = there
        self.next = 0

    async def __aenter__(self) -> Chatter:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, self.there)

    def seek(self, place: TopicPartition, offset: int) -> None:
        self.next = offset

    async def position(self, place: TopicPartition) -> int:
        return self.next

    async def getmany(self, timeout_ms: int) -> dict[TopicPartition, list[Any]]:
        await asyncio.sleep(0)
        offset, self.next = self.next, self.next + 1
        record = SimpleNamespace(topic=PLACE.topic, partition=0, offset=offset, key=b"", value=b"x", timestamp=offset)
        return {PLACE: [record]}


@pytest.fixture
def chatter(monkeypatch: pytest.MonkeyPatch) -> Chatter:
    made = Chatter(there=5)

    async def assigned(*_: object) -> list[TopicPartition]:
        return [PLACE]

    monkeypatch.setattr(reading, "consumer_of", lambda *_: made)
    monkeypatch.setattr(reading, "assign", assigned)
    return made


def test_a_topic_that_is_never_silent_has_an_end(chatter: Chatter) -> None:
    found = asyncio.run(asyncio.wait_for(reading.read_all(Config(), PLACE.topic), 30.0))
    assert [message.offset for message in found[:5]] == [0, 1, 2, 3, 4]
