"""One suite for every bus: memory, Tansu and Apache Kafka behave alike where the interface promises it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from trainwarden.bus import Bus, Subscriber, connect, decode_or_dead
from trainwarden.bus import kafka as kafka_bus
from trainwarden.bus.dead import fitting
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import SystemClock
from trainwarden.errors import BusError, ConfigError, UnavailableError
from trainwarden.records import DeadLetter, LogEvent, decode, encode
from trainwarden.topics import DEAD, Topic

pytestmark = pytest.mark.timeout(400)  # the first of them starts Apache Kafka


@pytest.fixture(params=["memory", "tansu", pytest.param("kafka", marks=pytest.mark.kafka)])
def bus(request: pytest.FixtureRequest) -> Iterator[Bus]:
    """A bus of each kind."""
    if request.param == "memory":
        yield MemoryBus()
        return
    broker: Any = request.getfixturevalue(request.param)
    connection = connect(f"kafka://{broker.bootstrap}")
    connection.wait_ready(30)
    yield connection
    connection.close()


@pytest.fixture
def topic(bus: Bus) -> Topic:
    """A topic nobody else uses."""
    made = Topic(f"t-{uuid.uuid4().hex[:8]}", "key", "anything", partitions=1 if isinstance(bus, MemoryBus) else 3)
    bus.ensure_topics([made])
    return made


def read(subscriber: Subscriber, count: int, limit_s: float = 60.0) -> list[bytes]:
    """Poll until `count` messages are there."""
    found: list[bytes] = []
    deadline = time.monotonic() + limit_s
    while len(found) < count and time.monotonic() < deadline:
        found += [message.value for message in subscriber.poll(0.2)]
    return found


def publish(bus: Bus, topic: Topic, values: list[bytes], key: bytes = b"k") -> None:
    """Publish and wait for the acknowledgement."""
    publisher = bus.publisher()
    for value in values:
        publisher.publish(topic.name, key, value)
    publisher.flush(60)
    publisher.close()


def test_messages_of_one_key_keep_their_order(bus: Bus, topic: Topic) -> None:
    sent = [b"%d" % i for i in range(500)]
    publish(bus, topic, sent)
    subscriber = bus.subscriber([topic.name])
    assert read(subscriber, 500) == sent
    subscriber.close()


def test_one_key_lies_in_one_partition(bus: Bus, topic: Topic) -> None:
    publish(bus, topic, [b"a", b"b"], key=b"same")
    subscriber = bus.subscriber([topic.name])
    seen: list[int] = []
    deadline = time.monotonic() + 60
    while len(seen) < 2 and time.monotonic() < deadline:
        seen += [message.partition for message in subscriber.poll(0.2)]
    assert len(set(seen)) == 1
    assert sum(subscriber.positions().values()) >= 2
    subscriber.close()


def test_a_group_goes_on_where_it_committed(bus: Bus, topic: Topic) -> None:
    publish(bus, topic, [b"1", b"2"])
    first = bus.subscriber([topic.name], group="g")
    assert read(first, 2) == [b"1", b"2"]
    first.commit()
    publish(bus, topic, [b"3"])
    assert read(first, 1) == [b"3"]
    first.close()
    second = bus.subscriber([topic.name], group="g")
    # a group that changes hands waits for a rebalance, which takes its time on a loaded machine
    assert read(second, 1, 90.0) == [b"3"], "what was read but not committed comes again"
    second.close()


def test_a_seek_goes_back(bus: Bus, topic: Topic) -> None:
    publish(bus, topic, [b"1", b"2", b"3"])
    subscriber = bus.subscriber([topic.name])
    read(subscriber, 3)
    place = next(place for place, offset in subscriber.positions().items() if offset == 3)
    subscriber.seek_to({place: 1})
    assert read(subscriber, 2) == [b"2", b"3"]
    subscriber.close()


def test_topics_may_be_ensured_twice(bus: Bus, topic: Topic) -> None:
    bus.ensure_topics([topic])


def test_a_topic_with_too_few_partitions_is_named(bus: Bus, topic: Topic) -> None:
    wider = Topic(topic.name, topic.key, topic.carries, partitions=9)
    with pytest.raises(UnavailableError, match=rf"{topic.name} has \d+ partitions, 9 are needed"):
        bus.ensure_topics([wider])


def test_malformed_bytes_become_a_dead_letter(bus: Bus, topic: Topic) -> None:
    bus.ensure_topics([DEAD])
    publish(bus, topic, [b"\xff\x00 no record", encode(LogEvent(node="good"))])
    subscriber, publisher = bus.subscriber([topic.name]), bus.publisher()
    records: list[Any] = []
    deadline = time.monotonic() + 60
    while len(records) < 2 and time.monotonic() < deadline:
        records += [decode_or_dead(message, publisher, "c", SystemClock()) for message in subscriber.poll(0.2)]
    publisher.flush(60)
    assert records[0] is None
    assert records[1].node == "good"
    dead = bus.subscriber([DEAD.name])
    letters: list[DeadLetter] = []
    while not letters and time.monotonic() < deadline:
        letters = [letter for letter in map(decode, (m.value for m in dead.poll(0.2))) if letter.topic == topic.name]
    assert letters[0].payload == b"\xff\x00 no record"
    assert letters[0].reason
    for part in (subscriber, publisher, dead):
        part.close()


def test_an_absent_broker_is_one_sentence() -> None:
    with pytest.raises(UnavailableError, match=r"no Kafka broker answers at 127\.0\.0\.1:1 "):
        connect("kafka://127.0.0.1:1").wait_ready(0.1)


@pytest.mark.parametrize("url", ["kafka://", "redis://x", "localhost:9092"])
def test_a_url_that_is_no_bus_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected kafka://"):
        connect(url)


def test_a_memory_bus_taken_away_tells_its_publisher() -> None:
    bus = MemoryBus()
    lost: list[str] = []
    publisher = bus.publisher(lambda topic, key, value, reason: lost.append(reason))
    bus.available = False
    publisher.publish("t", b"k", b"v")
    assert lost == ["the memory bus was taken away"]
    with pytest.raises(BusError, match="1 messages"):
        publisher.flush(1)


def test_a_broker_that_is_away_for_long_costs_a_publisher_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away:
        def __init__(self, **_: Any) -> None:
            pass

        def send(self, topic: str, value: bytes, key: bytes) -> None:
            raise kafka_bus.KafkaTimeoutError("away")

        def flush(self, timeout: float) -> None:
            pass

    monkeypatch.setattr(kafka_bus, "KafkaProducer", Away)
    lost: list[str] = []
    publisher = kafka_bus.KafkaPublisher(("127.0.0.1:9",), lambda topic, key, value, reason: lost.append(reason))
    for _ in range(1000):
        publisher.publish("t", b"k", b"v")
    assert len(lost) == 1000
    held = [v for v in vars(publisher).values() if isinstance(v, list | dict | set)]
    assert sum(len(v) for v in held) < 10
    with pytest.raises(BusError, match=r"1000 messages were not delivered: .*away"):
        publisher.flush(1.0)
    publisher.flush(1.0)


def test_a_dead_letter_fits_a_broker_whatever_is_large_in_it() -> None:
    large = DeadLetter(topic="t", reason="incident '" + "é" * 900_000, key=b"k" * 900_000, payload=b"p" * 900_000)
    letter = fitting(large)
    assert len(encode(letter)) < 400_000
    assert letter.reason.startswith("incident 'é")
    assert letter.reason.endswith("(cut from 900000 bytes, key cut from 900000 bytes)")
    small = DeadLetter(topic="t", reason="r", key=b"k", payload=b"p")
    assert fitting(small) == small
