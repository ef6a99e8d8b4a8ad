"""The publisher without a thread: its bytes as kafka-python reads them, a broker that hangs up and answers nonsense, and a real one."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kafka.errors import KafkaConnectionError, KafkaError, KafkaProtocolError, KafkaTimeoutError
from kafka.record.memory_records import MemoryRecords

from tests.kernel.test_bus import read
from trainwarden.bus import Bus, Message, connect
from trainwarden.bus.produce import Answer, Waiting, answers_of, batch_of, request, version_of, zigzag
from trainwarden.bus.solo import Line, SoloPublisher
from trainwarden.errors import BusError, UnavailableError
from trainwarden.topics import Topic

LIMIT_S = 60.0
AT_MS = 1_700_000_000_000
ENDS: list[Callable[[bytes], bytes]] = [
    lambda d: d[:-1],
    lambda d: b"",
    lambda d: d[:9],
    lambda d: d[:4] + b"\x7f" * 40,
]


def records_in(batch: bytes) -> list[tuple[bytes, bytes, int]]:
    """(key, value, time) of a batch as the library reads it, its check sum included."""
    found = []
    batches = MemoryRecords(batch)
    while (one := batches.next_batch()) is not None:
        assert one.validate_crc()
        found += [(record.key, record.value, record.timestamp) for record in one]
    return found


def waiting(*values: bytes, key: bytes = b"k") -> list[Waiting]:
    return [Waiting("t", key, value, AT_MS + 3 * number) for number, value in enumerate(values)]


@pytest.mark.parametrize("size", [0, 1, 63, 64, 8191, 8192, 200_000])
@pytest.mark.parametrize("packable", [True, False])
def test_a_batch_is_what_the_library_reads(size: int, packable: bool) -> None:
    value = bytes(size) if packable else random.Random(size).randbytes(size)
    messages = waiting(value, b"second", key=b"x" * (size % 70))
    batch, count = batch_of(messages, 100)
    assert count == 2
    assert records_in(batch) == [(m.key, m.value, m.at_ms) for m in messages]


def test_a_time_that_went_back_is_kept() -> None:
    messages = [Waiting("t", b"k", b"a", AT_MS), Waiting("t", b"k", b"b", AT_MS - 5000)]
    assert [at_ms for _, _, at_ms in records_in(batch_of(messages, 9)[0])] == [AT_MS, AT_MS - 5000]


def test_a_batch_ends_where_it_would_be_large_and_where_it_is_told() -> None:
    messages = waiting(*[bytes(100_000)] * 5)
    assert batch_of(messages, 100)[1] == 2
    assert batch_of(messages, 1)[1] == 1
    assert batch_of(waiting(bytes(900_000)), 1)[1] == 1, "one goes whatever its size"


@pytest.mark.parametrize("value", [0, 1, -1, 63, 64, -64, -65, 300, -86_400_000, 2**31])
def test_zigzag_comes_back(value: int) -> None:
    data, rest = zigzag(value), 0
    for place, byte in enumerate(data):
        rest |= (byte & 0x7F) << (7 * place)
        assert bool(byte & 0x80) == (place < len(data) - 1)
    assert (rest >> 1) ^ -(rest & 1) == value


def answer(number: int, *parts: tuple[str, int, int]) -> bytes:
    """An answer of a broker: (topic, partition, error)."""
    body = struct.pack(">ii", number, len(parts))
    for topic, partition, code in parts:
        body += struct.pack(">h", len(topic)) + topic.encode() + struct.pack(">iihqqq", 1, partition, code, 7, -1, 0)
    return body + struct.pack(">i", 0)


def test_answers_of_a_broker_are_read() -> None:
    assert answers_of(answer(4, ("a", 0, 0), ("b", 2, 10)), 4) == {("a", 0): Answer(0), ("b", 2): Answer(10)}


@pytest.mark.parametrize("end", ENDS)
def test_an_answer_that_ends_too_early_is_refused(end: Callable[[bytes], bytes]) -> None:
    with pytest.raises(KafkaProtocolError):
        answers_of(end(answer(4, ("a", 0, 0))[:-4]), 4)


def test_whatever_comes_is_an_answer_or_refused() -> None:
    dice, good = random.Random(7), answer(4, ("topic", 0, 0), ("other", 2, 10))
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(dice.randrange(1, 6)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        try:
            answers_of(bytes(data[: dice.randrange(len(data) + 1)]), 4)
        except KafkaProtocolError:
            refused += 1
    assert refused > 1000


def test_an_old_or_silent_broker_has_no_version_of_ours() -> None:
    assert version_of({0: (3, 11)}) == 7
    assert version_of({0: (0, 5)}) == 5
    assert version_of({0: (8, 12)}) is None
    assert version_of({1: (0, 5)}) is None


class Broker:
    """A socket that answers each request by `say`, which gets the number of the request."""

    def __init__(self, say: Callable[[int], bytes | None]) -> None:
        self._say = say
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        peer, _ = self._listening.accept()
        self._listening.close()
        with peer:
            while head := peer.recv(4, socket.MSG_WAITALL):
                body = peer.recv(struct.unpack(">i", head)[0], socket.MSG_WAITALL)
                reply = self._say(struct.unpack_from(">i", body, 4)[0])
                if reply is None:
                    return
                peer.sendall(struct.pack(">i", len(reply)) + reply)


def soon(seconds: float = LIMIT_S) -> float:
    return time.monotonic() + seconds


def test_a_line_asks_and_hears_and_notes_a_broker_that_hangs_up() -> None:
    line = Line(
        "127.0.0.1", Broker(lambda number: answer(number, ("t", 0, 0)) if number == 1 else None).port, 7, soon()
    )
    line.send({("t", 0): b"x" * 70_000}, soon())
    assert line.receive(soon()) == {("t", 0): Answer(0)}
    line.send({("t", 0): b"x"}, soon())
    with pytest.raises(KafkaConnectionError, match="hung up"):
        line.receive(soon())
    assert line.ended()
    line.close()


@pytest.mark.parametrize(
    ("say", "kind"),
    [(lambda number: answer(number + 1, ("t", 0, 0)), KafkaProtocolError), (lambda number: b"", KafkaError)],
)
def test_an_answer_that_is_none_of_ours_is_an_error(say: Callable[[int], bytes], kind: type[Exception]) -> None:
    line = Line("127.0.0.1", Broker(say).port, 7, soon())
    line.send({("t", 0): b"x"}, soon())
    with pytest.raises(kind):
        line.receive(soon())
    line.close()


def test_a_broker_that_says_nothing_is_not_waited_for_for_ever() -> None:
    held = threading.Event()

    def say(number: int) -> None:
        del number
        held.wait(LIMIT_S)

    line = Line("127.0.0.1", Broker(say).port, 7, soon())
    line.send({("t", 0): b"x"}, soon())
    with pytest.raises(KafkaTimeoutError):
        line.receive(soon(0.05))
    held.set()
    line.close()


def test_a_request_is_what_the_library_writes() -> None:
    """Version 7, but for the client's name."""
    from kafka.protocol.producer import ProduceRequest

    data = ProduceRequest.TopicProduceData
    part = data.PartitionProduceData(index=3, records=b"abc")
    theirs = ProduceRequest(
        transactional_id=None, acks=-1, timeout_ms=5000, topic_data=[data(name="t", partition_data=[part])]
    )
    theirs.API_VERSION = 7
    ours = request(9, 7, "me", 5000, {("t", 3): b"abc"})
    assert struct.unpack_from(">ihhi", ours) == (len(ours) - 4, 0, 7, 9)
    assert ours.endswith(bytes(theirs.encode()))


# --- a real broker ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bus(tansu: Any) -> Iterator[Bus]:
    connection = connect(f"kafka://{tansu.bootstrap}", solo=True)
    connection.wait_ready(LIMIT_S)
    yield connection
    connection.close()


@pytest.fixture
def topic(bus: Bus) -> Topic:
    made = Topic(f"t-{uuid.uuid4().hex[:8]}", "key", "anything", partitions=3)
    bus.ensure_topics([made])
    return made


def solo(bus: Bus, *given: Any) -> SoloPublisher:
    publisher = bus.publisher(*given)
    assert isinstance(publisher, SoloPublisher)
    return publisher


@pytest.mark.parametrize("by_library", [False, True])
def test_order_and_places_are_those_of_the_library(bus: Bus, topic: Topic, tansu: Any, by_library: bool) -> None:
    publisher, theirs = solo(bus), connect(f"kafka://{tansu.bootstrap}").publisher()
    if by_library:
        publisher._version = None  # as over TLS
    else:
        assert publisher._version == 7
    keys = [b"n%d" % number for number in range(20)]
    for number in range(3):
        for key in keys:
            publisher.publish(topic.name, key, b"%d" % number)
        publisher.flush(LIMIT_S)
    for key in keys:
        theirs.publish(topic.name, key, b"3")
    theirs.flush(LIMIT_S)
    reader, end_s = bus.subscriber([topic.name]), soon()
    found: list[Message] = []
    while len(found) < 80 and time.monotonic() < end_s:
        found += reader.poll(0.2)
    for key in keys:
        mine = [message for message in found if message.key == key]
        assert [message.value for message in mine] == [b"0", b"1", b"2", b"3"]
        assert len({message.partition for message in mine}) == 1, "the same place as the library's"
    for part in (publisher, theirs, reader):
        part.close()


def test_more_than_a_batch_goes_in_several(bus: Bus, topic: Topic) -> None:
    publisher, sent = solo(bus), [random.Random(n).randbytes(90_000) for n in range(12)]
    for value in sent:
        publisher.publish(topic.name, b"k", value)
    publisher.flush(LIMIT_S)
    reader = bus.subscriber([topic.name])
    assert read(reader, 12, LIMIT_S) == sent
    publisher.close()
    reader.close()


def test_what_is_too_large_is_told_and_what_is_beside_it_arrives(bus: Bus, topic: Topic) -> None:
    lost: list[str] = []
    publisher = solo(bus, lambda topic, key, value, reason: lost.append(reason))
    publisher.publish(topic.name, b"k", bytes(2 * 1024 * 1024))
    publisher.publish(topic.name, b"k", b"small")
    with pytest.raises(BusError, match="1 messages were not delivered: MessageSizeTooLargeError"):
        publisher.flush(LIMIT_S)
    assert len(lost) == 1
    reader = bus.subscriber([topic.name])
    assert read(reader, 1, LIMIT_S) == [b"small"]
    publisher.close()
    reader.close()


def test_a_batch_that_the_broker_calls_too_large_is_halved(
    bus: Bus, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[bytes] = []
    publisher = solo(bus, lambda topic, key, value, reason: lost.append(value))
    exchange = publisher._exchange

    def picky(by_node: Any, end_s: float) -> Any:
        sizes = {place: len(batch) for batches in by_node.values() for place, batch in batches.items()}
        if max(sizes.values()) > 500:
            return [{place: Answer(10) for place in sizes}]
        return exchange(by_node, end_s)

    monkeypatch.setattr(publisher, "_exchange", picky)
    sent = [random.Random(n).randbytes(150) for n in range(8)]
    for value in [*sent[:4], random.Random(9).randbytes(600), *sent[4:]]:
        publisher.publish(topic.name, b"k", value)
    with pytest.raises(BusError, match="1 messages were not delivered"):
        publisher.flush(LIMIT_S)
    assert [len(value) for value in lost] == [600]
    reader = bus.subscriber([topic.name])
    assert read(reader, 8, LIMIT_S) == sent
    publisher.close()
    reader.close()


def test_a_topic_that_is_not_there_is_named(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = solo(bus)
    monkeypatch.setattr(
        publisher._manager.cluster, "partitions_for_topic", lambda name: None
    )  # this broker makes any topic
    publisher.publish("t-nowhere", b"k", b"x")
    with pytest.raises(BusError, match="topic t-nowhere does not exist"):
        publisher.flush(LIMIT_S)
    publisher.close()


def test_a_connection_that_ended_between_two_flushes_is_made_again(bus: Bus, topic: Topic) -> None:
    publisher = solo(bus)
    publisher.publish(topic.name, b"k", b"1")
    publisher.flush(LIMIT_S)
    for line in publisher._lines.values():
        line._socket.shutdown(socket.SHUT_RDWR)
    publisher.publish(topic.name, b"k", b"2")
    publisher.flush(LIMIT_S)
    reader = bus.subscriber([topic.name])
    assert read(reader, 2, LIMIT_S) == [b"1", b"2"]
    publisher.close()
    reader.close()


def test_metadata_is_asked_for_again(bus: Bus, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = solo(bus)
    publisher.publish(topic.name, b"k", b"1")
    publisher.flush(LIMIT_S)
    monkeypatch.setattr("trainwarden.bus.solo.METADATA_EVERY_S", 0.0)
    publisher.publish(topic.name, b"k", b"2")
    publisher.flush(LIMIT_S)
    assert publisher._metadata_s > 0
    publisher.close()


def test_an_absent_broker_is_one_sentence() -> None:
    with pytest.raises(UnavailableError, match=r"no Kafka broker answers at 127\.0\.0\.1:1 "):
        connect("kafka://127.0.0.1:1", solo=True).publisher()


@pytest.mark.kafka
@pytest.mark.parametrize("by_library", [False, True])
def test_apache_kafka_takes_it_too(kafka: Any, by_library: bool) -> None:
    """Several partitions in one request, a batch above `max.message.bytes` of its topic, and what is in it arrives nevertheless."""
    bus = connect(f"kafka://{kafka.bootstrap}", solo=True)
    lost: list[tuple[int, str]] = []
    topic = Topic(f"t-{uuid.uuid4().hex[:8]}", "key", "anything", partitions=3)
    bus.wait_ready(LIMIT_S)
    bus.ensure_topics([topic])
    publisher = solo(bus, lambda topic, key, value, reason: lost.append((len(value), reason)))
    assert publisher._version == 7
    if by_library:
        publisher._version = None
    sent = {b"n%d" % number: random.Random(number).randbytes(30_000) for number in range(60)}
    for key, value in sent.items():
        publisher.publish(topic.name, key, value)
    publisher.publish(topic.name, b"large", random.Random(99).randbytes(1024 * 1024 - 100))
    publisher.publish(topic.name, b"larger", random.Random(98).randbytes(1024 * 1024 - 6))
    with pytest.raises(BusError, match=r"1 messages were not delivered: MessageSizeTooLargeError"):
        publisher.flush(LIMIT_S)
    assert [size for size, _ in lost] == [1024 * 1024 - 6]
    reader, end_s = bus.subscriber([topic.name]), soon()
    found: dict[bytes, bytes] = {}
    while len(found) < 61 and time.monotonic() < end_s:
        found |= {message.key: message.value for message in reader.poll(0.2)}
    assert {key: found.get(key) for key in sent} == sent
    for part in (publisher, reader, bus):
        part.close()
