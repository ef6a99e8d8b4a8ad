"""Kafka through kafka-python: the bus of everything outside the stream application.

Settings that were paid for (see docs/design): the idempotent producer never recovers when a memory-only broker restarts, so ordering
comes from one request in flight instead; sessions are short so that groups form and heal in seconds; CRC32C comes from the
`crc32c` package, without which a producer costs seven times the CPU.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kafka import ConsumerRebalanceListener, KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic
from kafka.codec import has_lz4
from kafka.errors import KafkaError, KafkaTimeoutError, TopicAlreadyExistsError
from kafka.structs import OffsetAndMetadata

from trainwarden.bus.base import FailureHandler, Message, Publisher, Start
from trainwarden.bus.records import PartitionRecords
from trainwarden.bus.security import Security
from trainwarden.clock import Clock, SystemClock
from trainwarden.errors import BusError, UnavailableError
from trainwarden.topics import Topic

logging.getLogger("kafka").setLevel(logging.CRITICAL)
"""What goes wrong comes to our callers as one error; the library would say it in many lines on the terminal too."""

SEND_BLOCK_MS = 500
DELIVERY_TIMEOUT_MS = 10_000
SESSION_TIMEOUT_MS = 6_000
HEARTBEAT_MS = 1_000
REQUEST_TIMEOUT_MS = 10_000
COMMIT_TIMEOUT_MS = 10_000
NOTHING: Mapping[str, Any] = {}
"""Options of a client that talks in plain text."""


class KafkaBus:
    """A Kafka cluster by its bootstrap addresses; `solo` gives publishers without a thread of their own (`trainwarden.bus.solo`)."""

    def __init__(
        self,
        addresses: Sequence[str],
        clock: Clock | None = None,
        security: Security | None = None,
        solo: bool = False,
    ) -> None:
        self.addresses = tuple(addresses)
        self._solo = solo
        self._secured = (security or Security()).options()
        self._clock: Clock = clock or SystemClock()

    def publisher(self, on_failure: FailureHandler | None = None) -> Publisher:
        if self._solo:
            from trainwarden.bus.solo import SoloPublisher

            return SoloPublisher(self.addresses, on_failure, self._secured)
        return KafkaPublisher(self.addresses, on_failure, self._secured)

    def subscriber(self, topics: Sequence[str], group: str | None = None, start: Start = "earliest") -> KafkaSubscriber:
        return KafkaSubscriber(self.addresses, tuple(topics), group, start, self._secured)

    def ensure_topics(self, topics: Sequence[Topic]) -> None:
        with self._admin() as admin:
            for topic in topics:
                _create(admin, topic)
            self._wait_known(admin, topics)
            _check_partitions(admin, topics)

    def wait_ready(self, timeout_s: float) -> None:
        deadline_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            try:
                with self._admin():
                    return
            except UnavailableError:
                if self._clock.monotonic_ns() >= deadline_ns:
                    raise
                self._clock.sleep(0.1)

    def close(self) -> None:
        return None

    def _wait_known(self, admin: Any, topics: Sequence[Topic]) -> None:
        """A broker confirms a new topic before it knows its partitions itself."""
        deadline_ns = self._clock.monotonic_ns() + REQUEST_TIMEOUT_MS * 1_000_000
        while not all(_partitions_of(admin, topics).values()) and self._clock.monotonic_ns() < deadline_ns:
            self._clock.sleep(0.05)

    @contextlib.contextmanager
    def _admin(self) -> Any:
        try:
            admin = KafkaAdminClient(
                bootstrap_servers=list(self.addresses),
                request_timeout_ms=REQUEST_TIMEOUT_MS,
                bootstrap_timeout_ms=2000,
                **self._secured,
            )
        except KafkaError as error:
            raise UnavailableError(
                f"no Kafka broker answers at {','.join(self.addresses)} ({error}): start one or set kafka.url"
            ) from None
        try:
            yield admin
        except KafkaError as error:
            raise UnavailableError(
                f"the Kafka broker at {','.join(self.addresses)} did not do what it was asked ({type(error).__name__}: {error})"
            ) from None
        finally:
            admin.close()


def _create(admin: Any, topic: Topic) -> None:
    wanted = NewTopic(
        topic.name, num_partitions=topic.partitions, replication_factor=-1, topic_configs=topic.settings()
    )
    try:
        admin.create_topics([wanted], timeout_ms=REQUEST_TIMEOUT_MS)
    except TopicAlreadyExistsError:
        return
    except KafkaError:
        # brokers older than 2.4, and Tansu, want the number spelled out
        wanted = NewTopic(
            topic.name, num_partitions=topic.partitions, replication_factor=1, topic_configs=topic.settings()
        )
        with contextlib.suppress(TopicAlreadyExistsError):
            admin.create_topics([wanted], timeout_ms=REQUEST_TIMEOUT_MS)


def _partitions_of(admin: Any, topics: Sequence[Topic]) -> dict[str, int]:
    """Number of partitions by topic, 0 while it is unknown."""
    described = admin.describe_topics([topic.name for topic in topics])
    return {topic.name: 0 for topic in topics} | {entry["name"]: len(entry["partitions"]) for entry in described}


def _check_partitions(admin: Any, topics: Sequence[Topic]) -> None:
    found = _partitions_of(admin, topics)
    for topic in topics:
        have = found[topic.name]
        if have < topic.partitions:
            raise UnavailableError(f"topic {topic.name} has {have} partitions, {topic.partitions} are needed: "
                                   f"add them (kafka-topics.sh --alter --topic {topic.name} --partitions {topic.partitions})")  # fmt: skip


class KafkaPublisher:
    """Publisher on kafka-python. One request in flight keeps the order without producer ids."""

    def __init__(
        self, addresses: tuple[str, ...], on_failure: FailureHandler | None, secured: Mapping[str, Any] = NOTHING
    ) -> None:
        try:
            self._producer = KafkaProducer(
                bootstrap_servers=list(addresses), acks="all", enable_idempotence=False, max_in_flight_requests_per_connection=1,
                linger_ms=5, compression_type="lz4" if has_lz4() else None, max_block_ms=SEND_BLOCK_MS, metrics_enabled=False,
                delivery_timeout_ms=DELIVERY_TIMEOUT_MS, request_timeout_ms=5000, retry_backoff_ms=100, reconnect_backoff_max_ms=1000,
                bootstrap_timeout_ms=2000, **secured,
            )  # fmt: skip
        except KafkaError as error:
            raise UnavailableError(
                f"no Kafka broker answers at {','.join(addresses)} ({error}): start one or set kafka.url"
            ) from None
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._failures = 0
        self._first_failure = ""

    def publish(self, topic: str, key: bytes, value: bytes) -> None:
        try:
            future = self._producer.send(topic, value=value, key=key)
        except (KafkaError, AssertionError) as error:
            self._failed(topic, key, value, error)
            return
        future.add_errback(lambda error: self._failed(topic, key, value, error))

    def flush(self, timeout_s: float) -> None:
        try:
            self._producer.flush(timeout=timeout_s)
        except KafkaTimeoutError:
            raise BusError(f"messages were not acknowledged within {timeout_s} s") from None
        with self._lock:
            failures, self._failures, first, self._first_failure = self._failures, 0, self._first_failure, ""
        if failures:
            raise BusError(f"{failures} messages were not delivered: {first}")

    def close(self) -> None:
        try:
            self._producer.close(timeout=1)
        except KafkaError as error:  # a broker that stands: the library's own thread is waited for in vain
            raise BusError(f"the publisher did not close: {type(error).__name__}: {error}") from None

    def _failed(self, topic: str, key: bytes, value: bytes, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        with self._lock:
            self._failures += 1
            self._first_failure = self._first_failure or reason
        if self._on_failure is not None:
            self._on_failure(topic, key, value, reason)


class KafkaSubscriber:
    """Subscriber on kafka-python: a group member, or (without a group) a reader of all partitions."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        topics: tuple[str, ...],
        group: str | None,
        start: Start,
        secured: Mapping[str, Any] = NOTHING,
    ) -> None:
        try:
            self._consumer = KafkaConsumer(
                bootstrap_servers=list(addresses), group_id=group, enable_auto_commit=False, auto_offset_reset=start,
                session_timeout_ms=SESSION_TIMEOUT_MS, heartbeat_interval_ms=HEARTBEAT_MS, metrics_enabled=False,
                fetch_max_wait_ms=100, retry_backoff_ms=100, reconnect_backoff_max_ms=1000, bootstrap_timeout_ms=2000,
                **secured,
            )  # fmt: skip
        except KafkaError as error:
            raise UnavailableError(
                f"no Kafka broker answers at {','.join(addresses)} ({error}): start one or set kafka.url"
            ) from None
        self._consumer._fetcher.PartitionRecords = PartitionRecords
        self._group = group
        self._positions: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        if group is None:
            self._consumer.assign([partition for asked in topics for partition in self._asked(asked)])
        else:
            self._consumer.subscribe(list(topics), listener=_Assignment(self))

    def poll(self, timeout_s: float, max_messages: int = 5000) -> list[Message]:
        try:
            batches = self._consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=max_messages)
        except KafkaError as error:
            raise BusError(f"reading from Kafka failed: {type(error).__name__}: {error}") from None
        for records in batches.values():
            self._positions[records[-1].place] = records[-1].offset + 1
        return [record for records in batches.values() for record in records]

    def commit(self) -> None:
        if self._group is None or not self._positions:
            return
        offsets = {_partition_of(place): OffsetAndMetadata(offset, "", -1) for place, offset in self._positions.items()}
        try:
            self._consumer.commit(offsets, timeout_ms=COMMIT_TIMEOUT_MS)
        except KafkaError as error:
            raise BusError(
                f"positions of group {self._group} were not stored: {type(error).__name__}: {error}"
            ) from None

    def seek_to(self, positions: Mapping[str, int]) -> None:
        self._wanted = dict(positions)
        self.apply_wanted()

    def positions(self) -> dict[str, int]:
        return dict(self._positions)

    def unread(self) -> int:
        ends = {f"{p.topic}/{p.partition}": self._consumer.highwater(p) for p in self._consumer.assignment()}
        return sum(max(0, end - self._positions.get(place, end)) for place, end in ends.items() if end is not None)

    def close(self) -> None:
        self._consumer.close(autocommit=False, timeout_ms=2000)

    def apply_wanted(self) -> None:
        """Seek assigned partitions to the positions asked for; the others are sought when they are assigned."""
        for partition in self._consumer.assignment():
            place = f"{partition.topic}/{partition.partition}"
            if place in self._wanted:
                offset = self._wanted.pop(place)
                self._consumer.seek(partition, offset)
                self._positions[place] = offset

    def forget(self, partitions: Sequence[Any]) -> None:
        """Partitions went to another member: their positions are its business now."""
        for partition in partitions:
            self._positions.pop(f"{partition.topic}/{partition.partition}", None)

    def _asked(self, asked: str) -> list[TopicPartition]:
        """Partitions of "topic" or "topic/number"."""
        topic, _, only = asked.partition("/")
        numbers = [int(only)] if only else self._partitions_of(topic)
        return [TopicPartition(topic, number) for number in numbers]

    def _partitions_of(self, topic: str) -> list[int]:
        found = self._consumer.partitions_for_topic(topic)
        if not found:
            raise UnavailableError(f"topic {topic} does not exist: run `trainwarden topics` first")
        return sorted(found)


class _Assignment(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, owner: KafkaSubscriber) -> None:
        self._owner = owner

    def on_partitions_revoked(self, revoked: Sequence[Any]) -> None:
        self._owner.forget(revoked)

    def on_partitions_assigned(self, assigned: Sequence[Any]) -> None:
        del assigned
        self._owner.apply_wanted()


def _partition_of(place: str) -> Any:
    topic, _, number = place.rpartition("/")
    return TopicPartition(topic, int(number))
