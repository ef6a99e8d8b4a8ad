"""A worker that was held up reads on to the end before time goes on: else whole partitions would be late."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError

from streams import app
from streams.pulse import Pulse
from tests.streams.synthetic import host_catalog, tick
from trainwarden.clock import SystemClock
from trainwarden.config import from_table
from trainwarden.records import encode
from trainwarden.selfmetrics import Metrics

PLACES = [TopicPartition("tw.ticks", 0), TopicPartition("tw.ticks", 1)]
ON_BROKER = 6


class Fetching:
    """A consumer as aiokafka's is: of a partition it holds one batch, and fetches the next when that is taken; here one message each, the
    other partition's not before it is asked again."""

    def __init__(self, away: int = 0) -> None:
        self.at = dict.fromkeys(PLACES, 0)
        self.asked = 0
        self.away = away
        self._full = True

    def assignment(self) -> list[TopicPartition]:
        return PLACES

    async def getmany(self, *places: TopicPartition, timeout_ms: int, max_records: int) -> dict[Any, list[Any]]:
        self._full = self._full or timeout_ms > 0
        found = {}
        for place in places if self._full else ():
            if self.at[place] < ON_BROKER:
                payload = encode(tick(f"n{place.partition}", self.at[place]))
                told = {"topic": place.topic, "partition": place.partition, "offset": self.at[place], "key": b"k"}
                found[place] = [SimpleNamespace(**told, value=payload, timestamp=0)]
                self.at[place] += 1
                break
        self._full = False
        return found

    async def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        self.asked += 1
        if self.asked <= self.away:
            raise KafkaConnectionError("away")
        return dict.fromkeys(places, ON_BROKER)

    async def position(self, place: TopicPartition) -> int:
        return self.at[place]


def service(folder: Path) -> app.RawService:
    config = from_table({"cluster": "c", "run_dir": str(folder), "kafka": {"url": "kafka://127.0.0.1:9"}})
    clock = SystemClock()
    made = app.RawService(config, None, None, Metrics("test"), clock, Pulse(clock, 5.0))  # type: ignore[arg-type]
    made._stage.pipeline.aligner.add("tw.catalog", 0, 0, host_catalog())
    return made


async def read(raw: app.RawService, consumer: Fetching, unread_s: float) -> bool:
    """What comes before a cut, so long after the last time; whether the cut may be made."""
    raw._read_s = asyncio.get_running_loop().time() - unread_s
    await raw._read(consumer, wait_ms=0)
    return await raw._read_up(consumer)


def test_after_a_hold_up_all_that_lies_on_the_broker_is_read_before_the_cut(tmp_path: Path) -> None:
    raw, consumer = service(tmp_path), Fetching()
    assert asyncio.run(read(raw, consumer, 10 * app.UNREAD_S))
    assert consumer.at == dict.fromkeys(PLACES, ON_BROKER)
    assert consumer.asked == 1


def test_who_reads_all_the_time_asks_nothing(tmp_path: Path) -> None:
    raw, consumer = service(tmp_path), Fetching()
    assert asyncio.run(read(raw, consumer, 0.0))
    assert sum(consumer.at.values()) == 1
    assert consumer.asked == 0


def test_after_a_hold_up_nothing_is_cut_before_the_broker_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw, consumer = service(tmp_path), Fetching(away=2)
    may = [asyncio.run(read(raw, consumer, wait_s)) for wait_s in (10 * app.UNREAD_S, 0.0, 0.0, 0.0)]
    assert may == [False, False, True, True]
    assert consumer.at == dict.fromkeys(PLACES, ON_BROKER)
    assert "nothing is cut before the broker answers" in caplog.text
