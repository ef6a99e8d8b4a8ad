"""Reading from Kafka as a worker does: what it wants from where it wants, in no group; besides `streams.app` the only user of aiokafka."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from trainwarden.bus import Message
from trainwarden.bus.security import security_of
from trainwarden.config import Config
from trainwarden.errors import ConfigError
from trainwarden.topics import LOGS

SILENCE_MS = 150
READ_RECORDS = 5000
"""So much is taken at once, at most."""
LOGS_PER_CUT = 10_000
"""Cuts come four times a second."""


class Portions:
    """What is taken of a consumer: all that is urgent, and of log lines so many for each cut, each partition's turn the same.

    A flood of lines would make cuts of hundreds of thousands, gigabytes that take many seconds, and whose rank dies meanwhile would be
    named when they are worked off. What is not taken stays where it is, on the broker.
    """

    def __init__(self) -> None:
        self._left = LOGS_PER_CUT
        self._held: list[Message] = []
        self._told_ms = 0
        """When the last log line that was taken was told to the broker."""
        self._waits_since_ms: float | None = None

    def renew(self) -> None:
        """A cut was made."""
        self._left = LOGS_PER_CUT

    def age_s(self, waiting: bool, now_ms: float) -> float:
        """How far behind the log lines are, `waiting` being whether some lie unread: no further than that has been so, for the line before
        one that has just come may be hours old."""
        if not waiting:
            self._waits_since_ms = None
            return 0.0
        if self._waits_since_ms is None:
            self._waits_since_ms = now_ms
        return max(0.0, now_ms - max(self._told_ms, self._waits_since_ms)) / 1000

    def wanted(self, places: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Of these places those of which something may be taken before the next cut."""
        return [place for place in places if self._left > 0 or place.topic != LOGS.name]

    async def take(self, consumer: Any, places: Collection[TopicPartition], wait_ms: int) -> list[Message]:
        """What the consumer holds of these places; where that is nothing it waits, for `wait_ms` at most."""
        logs = [place for place in places if place.topic == LOGS.name]
        await self._fetch(consumer, [place for place in places if place.topic != LOGS.name], 0, READ_RECORDS)
        for number, place in enumerate(logs):
            await self._fetch(consumer, [place], 0, self._share(len(logs) - number))
        if wait_ms and not self._held:
            await self._fetch(consumer, self.wanted(places), wait_ms, READ_RECORDS)
        found, self._held = self._held, []
        return found

    def _share(self, places: int) -> int:
        return min(READ_RECORDS, -(-self._left // places))

    async def _fetch(self, consumer: Any, places: Collection[TopicPartition], wait_ms: int, most: int) -> None:
        """Hold what comes: should a later question fail, it is not lost."""
        if not places or most <= 0:
            return
        batches = await consumer.getmany(*places, timeout_ms=wait_ms, max_records=most)
        for place, records in batches.items():
            if place.topic == LOGS.name and records:
                self._left, self._told_ms = self._left - len(records), records[-1].timestamp
            self._held += map(message_of, records)


async def partitions_of(config: Config, topics: Iterable[str]) -> dict[str, int]:
    """How many partitions each topic has on the broker."""
    async with consumer_of(config, None) as consumer:
        await consumer._client.force_metadata_update()
        return {topic: len(consumer.partitions_for_topic(topic) or ()) for topic in topics}


async def read_all(config: Config, topic: str, start: int = 0, since_ms: int | None = None) -> list[Message]:
    """Everything on a topic as of now, from offset `start` or from a time on. The end that a broker reports may be too low (Tansu):
    it is the least that is read, and silence decides."""
    messages: list[Message] = []
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
            if not batches and all([await consumer.position(p) >= ends[p] for p in partitions]):
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
