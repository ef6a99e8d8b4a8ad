"""Reading from Kafka as a worker does: what it wants from where it wants, in no group; besides `streams.app` the only user of aiokafka."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from trainwarden.bus import Message
from trainwarden.bus.security import security_of
from trainwarden.config import Config
from trainwarden.errors import ConfigError
from trainwarden.selfmetrics import MetricName, Metrics
from trainwarden.topics import EVENTS, LOGS

SILENCE_MS = 150
NEVER_SILENT_S = 1.0
"""Nine units that cut four times a second leave no silence: what was there at the beginning has been read by then."""
READ_RECORDS = 5000
"""So much is taken at once, at most."""
PER_CUT = {EVENTS.name: 10_000, LOGS.name: 10_000}
"""Of these so many at most, in this order; cuts come four times a second."""

AGES: dict[str, MetricName] = {EVENTS.name: "tw_event_age_seconds", LOGS.name: "tw_log_age_seconds"}


@dataclass
class _Ration:
    """What may still be taken of a topic before the next cut, when the last that was taken was told to the broker, and since when some
    have been waiting there."""

    left: int
    told_ms: int = 0
    waits_since_ms: float | None = None


class Portions:
    """What is taken of a consumer: all that is urgent, then of log events and last of log lines so many for each cut, each partition's turn
    the same.

    A flood of lines would make cuts of hundreds of thousands, gigabytes that take many seconds, and whose rank dies meanwhile would be
    named when they are worked off. What is not taken stays where it is, on the broker. Events have a ration of their own, so that no flood
    of lines keeps one waiting, and no flood of them the ticks.
    """

    def __init__(self) -> None:
        self._rations = {topic: _Ration(most) for topic, most in PER_CUT.items()}
        self._held: list[Message] = []

    def renew(self) -> None:
        """A cut was made."""
        for topic, ration in self._rations.items():
            ration.left = PER_CUT[topic]

    def age_s(self, topic: str, waiting: bool, now_ms: float) -> float:
        """How far behind the log lines or events are, `waiting` being whether some lie unread: no further than that has been so, for the
        one before one that has just come may be hours old."""
        ration = self._rations[topic]
        if not waiting:
            ration.waits_since_ms = None
            return 0.0
        if ration.waits_since_ms is None:
            ration.waits_since_ms = now_ms
        return max(0.0, now_ms - max(ration.told_ms, ration.waits_since_ms)) / 1000

    def note_ages(self, unread: Mapping[str, int], now_ms: float, metrics: Metrics) -> None:
        """Say how far behind each is, by how many records of it lie unread."""
        for topic, name in AGES.items():
            metrics.set(name, self.age_s(topic, unread.get(topic, 0) > 0, now_ms))

    def wanted(self, places: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Of these places those of which something may be taken before the next cut."""
        return [place for place in places if place.topic not in self._rations or self._rations[place.topic].left > 0]

    async def take(self, consumer: Any, places: Collection[TopicPartition], wait_ms: int) -> list[Message]:
        """What the consumer holds of these places; where that is nothing it waits, for `wait_ms` at most."""
        await self._fetch(consumer, [place for place in places if place.topic not in self._rations], 0, READ_RECORDS)
        for topic, ration in self._rations.items():
            rationed = [place for place in places if place.topic == topic]
            for number, place in enumerate(rationed):
                await self._fetch(consumer, [place], 0, _share(ration.left, len(rationed) - number))
        if wait_ms and not self._held:
            await self._fetch(consumer, self.wanted(places), wait_ms, READ_RECORDS)
        found, self._held = self._held, []
        return found

    async def _fetch(self, consumer: Any, places: Collection[TopicPartition], wait_ms: int, most: int) -> None:
        """Hold what comes: should a later question fail, it is not lost."""
        if not places or most <= 0:
            return
        batches = await consumer.getmany(*places, timeout_ms=wait_ms, max_records=most)
        for place, records in batches.items():
            if records and (ration := self._rations.get(place.topic)) is not None:
                ration.left, ration.told_ms = ration.left - len(records), records[-1].timestamp
            self._held += map(message_of, records)


def _share(left: int, places: int) -> int:
    return min(READ_RECORDS, -(-left // places))


async def partitions_of(config: Config, topics: Iterable[str]) -> dict[str, int]:
    """How many partitions each topic has on the broker."""
    async with consumer_of(config, None) as consumer:
        await consumer._client.force_metadata_update()
        return {topic: len(consumer.partitions_for_topic(topic) or ()) for topic in topics}


async def read_all(config: Config, topic: str, start: int = 0, since_ms: int | None = None) -> list[Message]:
    """Everything on a topic as of now, from offset `start` or from a time on. The end that a broker reports may be too low (Tansu):
    it is the least that is read, and silence decides, or a second of a topic on which somebody speaks all the time."""
    messages: list[Message] = []
    loop, until_s = asyncio.get_running_loop(), math.inf
    async with consumer_of(config, None) as consumer:
        partitions = await assign(consumer, [topic])
        ends = await consumer.end_offsets(partitions)
        for partition in partitions:
            consumer.seek(
                partition,
                start if since_ms is None else await offset_at(consumer, partition, since_ms, ends[partition]),
            )
        while True:
            batches = await consumer.getmany(timeout_ms=SILENCE_MS)
            messages.extend(message_of(record) for records in batches.values() for record in records)
            whole = all([await consumer.position(p) >= ends[p] for p in partitions])
            until_s = min(until_s, loop.time() + NEVER_SILENT_S) if whole else until_s
            if (whole and not batches) or loop.time() >= until_s:
                return [m for m in messages if since_ms is None or m.timestamp_ms >= since_ms]


async def offset_at(consumer: Any, partition: TopicPartition, since_ms: int, end: int) -> int:
    """First offset not older than `since_ms`; a broker that cannot tell makes us read from the beginning."""
    try:
        found = (await consumer.offsets_for_times({partition: since_ms}))[partition]
    except KafkaError:
        return 0
    return int(found.offset) if found is not None else end


def addresses(config: Config) -> tuple[str, ...]:
    """Bootstrap addresses of the configured Kafka."""
    scheme, _, rest = config.kafka.url.partition("://")
    if scheme != "kafka" or not rest:
        raise ConfigError(
            f"kafka.url: {config.kafka.url!r}: the worker reads from a broker, expected kafka://host:port[,host:port]"
        )
    return tuple(rest.split(","))


def consumer_of(config: Config, group: str | None) -> Any:
    return AIOKafkaConsumer(
        bootstrap_servers=list(addresses(config)),
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=100,
        max_partition_fetch_bytes=4 * 1024 * 1024,
        metadata_max_age_ms=30_000,
        retry_backoff_ms=100,
        **security_of(config.kafka).options(),
    )


async def assign(consumer: Any, places: Sequence[str]) -> list[TopicPartition]:
    """Take all partitions of a topic, or of "topic/number" that one, without joining a group: one leader reads everything."""
    await consumer._client.force_metadata_update()
    partitions = []
    for place in places:
        topic, _, only = place.partition("/")
        numbers = [int(only)] if only else sorted(consumer.partitions_for_topic(topic) or ())
        partitions += [TopicPartition(topic, number) for number in numbers]
    consumer.assign(partitions)
    return partitions


async def positions_of(consumer: Any) -> dict[str, int]:
    return {f"{p.topic}/{p.partition}": await consumer.position(p) for p in consumer.assignment()}


def message_of(record: Any) -> Message:
    return Message(
        record.topic, record.partition, record.offset, record.key or b"", record.value or b"", record.timestamp
    )


def partition_at(place: str) -> TopicPartition:
    topic, _, number = place.rpartition("/")
    return TopicPartition(topic, int(number))
