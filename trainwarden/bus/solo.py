"""A publisher for who sends a little, often, and counts its wakings: no thread of its own, the caller's flush does all the work.

`KafkaProducer` hands each message to a thread and is woken by it again, and looks at all its queues each time: for the ten messages a
second of a collector that is several times what the sending costs. In plain text a request is written to a socket and its answer read
from there; with TLS or SASL, and to a broker that does not know these versions of the request, kafka-python's connections do it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka.errors import (
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    for_code,
)
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.partitioner import murmur2
from kafka.protocol.producer import ProduceRequest
from kafka.structs import TopicPartition

from trainwarden.bus.base import FailureHandler
from trainwarden.bus.produce import ALL_REPLICAS, INT, Answer, Place, Waiting, answers_of, batch_of, request, version_of
from trainwarden.errors import BusError, NoTopicError, UnavailableError

OLDEST_BROKER = (0, 11)
LARGEST_BYTES = 1024 * 1024
LARGEST_ANSWER_BYTES = 1024 * 1024
BOOTSTRAP_MS, REQUEST_MS = 2000, 5000
METADATA_EVERY_S = 300.0
KEYS_REMEMBERED = 1000
CLIENT = "trainwarden"
TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
TopicData = ProduceRequest.TopicProduceData
PartitionData = TopicData.PartitionProduceData


@dataclass
class Queue:
    """Messages of one partition; `most` of a batch goes down when the broker calls one too large."""

    messages: deque[Waiting] = field(default_factory=deque)
    most: int = 10_000
    sent: int = 0

    def batch(self) -> bytes:
        """The next messages, as many as go into a batch."""
        data, self.sent = batch_of(list(self.messages), self.most)
        return data

    def taken(self) -> list[Waiting]:
        """What the last batch held, taken off."""
        return [self.messages.popleft() for _ in range(self.sent)]


class Line:
    """A connection in plain text to one broker, one request at a time."""

    def __init__(self, host: str, port: int, version: int, end_s: float) -> None:
        self._version = version
        self._number = 0
        try:
            self._socket = socket.create_connection((host, port), max(0.001, end_s - time.monotonic()))
        except TimeoutError:
            raise KafkaTimeoutError("no connection") from None
        except OSError as error:
            raise KafkaConnectionError(f"{host}:{port}: {error.strerror or error}") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def ended(self) -> bool:
        """Whether the broker has hung up, or said something that nobody asked for."""
        return bool(self._poll.poll(0))

    def send(self, batches: Mapping[Place, bytes], end_s: float) -> None:
        """Write a request. Raises `KafkaTimeoutError` and `KafkaConnectionError`."""
        self._number += 1
        with _as_kafka(self._socket, end_s):
            self._socket.sendall(request(self._number, self._version, CLIENT, REQUEST_MS, batches))

    def receive(self, end_s: float) -> dict[Place, Answer]:
        """The answer to it."""
        size = INT.unpack(self._read(INT.size, end_s))[0]
        if not 0 < size <= LARGEST_ANSWER_BYTES:
            raise KafkaConnectionError(f"an answer of {size} bytes")
        return answers_of(self._read(size, end_s), self._number)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _read(self, size: int, end_s: float) -> bytes:
        found = b""
        while len(found) < size:
            with _as_kafka(self._socket, end_s):
                some = self._socket.recv(size - len(found))
            if not some:
                raise KafkaConnectionError("the broker hung up")
            found += some
        return found


@contextlib.contextmanager
def _as_kafka(sock: socket.socket, end_s: float) -> Any:
    sock.settimeout(max(0.001, end_s - time.monotonic()))
    try:
        yield
    except TimeoutError:
        raise KafkaTimeoutError("no answer") from None
    except OSError as error:
        raise KafkaConnectionError(error.strerror or str(error)) from None


class SoloPublisher:
    """Publisher in the caller's thread. One batch of a partition is under way at a time, which keeps the order.

    A message that the broker refuses for its size is told to `on_failure` by itself, without those beside it. Anything else that goes
    wrong fails the whole flush: who wants to try again opens a new publisher.
    """

    def __init__(
        self, addresses: Sequence[str], on_failure: FailureHandler | None, secured: Mapping[str, Any] | None = None
    ) -> None:
        self._where = ",".join(addresses)
        self._on_failure = on_failure
        self._waiting: list[Waiting] = []
        self._failures = 0
        self._first_failure = ""
        self._places: dict[tuple[str, bytes], Place] = {}
        self._lines: dict[Any, Line] = {}
        given = {"bootstrap_servers": list(addresses), "request_timeout_ms": REQUEST_MS, **(secured or {})}
        self._net = NetworkSelector(slow_task_threshold_secs=0, **given)
        self._manager = KafkaConnectionManager(self._net, reconnect_backoff_max_ms=1000, **given)
        try:
            self._manager.bootstrap(BOOTSTRAP_MS)
            self._version = self._agreed(plain=not secured)
        except (KafkaError, UnavailableError) as error:
            self.close()
            raise UnavailableError(
                f"no Kafka broker answers at {self._where} ({error}): start one or set kafka.url"
            ) from None
        self._metadata_s = time.monotonic()

    def publish(self, topic: str, key: bytes, value: bytes) -> None:
        message = Waiting(topic, key, value, time.time_ns() // 1_000_000)
        if len(key) + len(value) > LARGEST_BYTES:
            self._failed([message], f"MessageSizeTooLargeError: {len(value)} bytes, at most {LARGEST_BYTES} are sent")
            return
        self._waiting.append(message)

    def flush(self, timeout_s: float) -> None:
        waiting, self._waiting = self._waiting, []
        end_s = time.monotonic() + timeout_s
        try:
            self._renew(end_s)
            queues = self._sorted(waiting, end_s)
            while queues:
                self._round(queues, end_s)
                queues = {place: queue for place, queue in queues.items() if queue.messages}
        except KafkaTimeoutError:
            raise BusError(f"messages were not acknowledged within {timeout_s} s") from None
        except KafkaError as error:
            raise BusError(f"messages were not delivered: {type(error).__name__}: {error}") from None
        failures, self._failures, first, self._first_failure = self._failures, 0, self._first_failure, ""
        if failures:
            raise BusError(f"{failures} messages were not delivered: {first}")

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        if not self._manager.closed:
            self._manager.close()
            self._net.close()

    # --- where to -------------------------------------------------------------------------------------------------------------

    def _agreed(self, plain: bool) -> int | None:
        """The version of the request that is written here; None when kafka-python has to write it."""
        if self._manager.broker_version < OLDEST_BROKER:
            raise UnavailableError("it is older than Kafka 0.11, whose messages these are")
        return version_of(self._manager.broker_version_data.api_versions) if plain else None

    def _renew(self, end_s: float) -> None:
        """Ask for the partitions and their leaders again, now and then; else do what is due on connections of kafka-python."""
        now = time.monotonic()
        if now - self._metadata_s >= METADATA_EVERY_S:
            self._metadata_s = now
            self._wait(self._manager.cluster.request_update(), end_s)
            self._places.clear()
        elif self._version is None:
            self._net.poll(timeout_ms=0)

    def _sorted(self, waiting: Iterable[Waiting], end_s: float) -> dict[Place, Queue]:
        queues: dict[Place, Queue] = {}
        for message in waiting:
            queues.setdefault(self._place(message, end_s), Queue()).messages.append(message)
        return queues

    def _place(self, message: Waiting, end_s: float) -> Place:
        """By the key, as every Kafka client does it."""
        known = message.topic, message.key
        place = self._places.get(known)
        if place is None:
            numbers = self._numbers(message.topic, end_s)
            place = (message.topic, numbers[(murmur2(message.key) & 0x7FFFFFFF) % len(numbers)])
            if len(self._places) >= KEYS_REMEMBERED:
                self._places.clear()
            self._places[known] = place
        return place

    def _numbers(self, topic: str, end_s: float) -> list[int]:
        cluster = self._manager.cluster
        if not cluster.partitions_for_topic(topic):
            self._wait(cluster.add_topic(topic), end_s)
        found = cluster.partitions_for_topic(topic)
        if not found:
            raise NoTopicError(topic)
        return sorted(found)

    # --- there and back -------------------------------------------------------------------------------------------------------

    def _round(self, queues: Mapping[Place, Queue], end_s: float) -> None:
        """One request to each broker, with the next batch of each partition that it leads."""
        leader = self._manager.cluster.leader_for_partition
        by_node: dict[Any, dict[Place, bytes]] = {}
        for place, queue in queues.items():
            by_node.setdefault(leader(TopicPartition(*place)), {})[place] = queue.batch()
        for answers in self._exchange(by_node, end_s):
            for place, answer in answers.items():
                self._settle(queues[place], answer)

    def _exchange(self, by_node: Mapping[Any, Mapping[Place, bytes]], end_s: float) -> list[dict[Place, Answer]]:
        """All requests are written before the first answer is waited for."""
        if self._version is None:
            futures = [self._manager.send(_asked(batches), node_id=node) for node, batches in by_node.items()]
            answers = [_told(self._wait(future, end_s)) for future in futures]
        else:
            lines = [self._line(node, self._version, end_s) for node in by_node]
            for line, batches in zip(lines, by_node.values(), strict=True):
                line.send(batches, end_s)
            answers = [line.receive(end_s) for line in lines]
        for batches, told in zip(by_node.values(), answers, strict=True):
            if told.keys() != batches.keys():
                raise KafkaConnectionError("an answer about other partitions")
        return answers

    def _line(self, node: Any, version: int, end_s: float) -> Line:
        line = self._lines.get(node)
        if line is not None and line.ended():
            self._lines.pop(node).close()
            line = None
        if line is None:
            broker = self._manager.cluster.broker_metadata(node)
            if broker is None:
                raise KafkaConnectionError(f"broker {node} leads a partition and nobody knows its address")
            line = self._lines[node] = Line(broker.host, broker.port, version, end_s)
        return line

    def _settle(self, queue: Queue, answer: Answer) -> None:
        """What the broker says of a batch."""
        if not answer.error_code:
            queue.taken()
            return
        kind = for_code(answer.error_code)
        if not issubclass(kind, TOO_LARGE):
            raise kind(answer.error_message)
        if queue.sent > 1:
            queue.most = queue.sent // 2
        else:
            self._failed(queue.taken(), f"{kind.__name__}: refused by the broker")

    def _wait(self, future: Any, end_s: float) -> Any:
        self._net.poll(timeout_ms=max(0.0, end_s - time.monotonic()) * 1000, future=future)
        if not future.is_done:
            raise KafkaTimeoutError("no answer")
        if future.failed():
            raise future.exception
        return future.value

    def _failed(self, messages: Iterable[Waiting], reason: str) -> None:
        for message in messages:
            self._failures += 1
            self._first_failure = self._first_failure or reason
            if self._on_failure is not None:
                self._on_failure(message.topic, message.key, message.value, reason)


def _asked(batches: Mapping[Place, bytes]) -> Any:
    """The request as kafka-python writes it."""
    topics: dict[str, list[Any]] = {}
    for (topic, number), data in batches.items():
        topics.setdefault(topic, []).append(PartitionData(index=number, records=data))
    asked = [TopicData(name=name, partition_data=parts) for name, parts in topics.items()]
    return ProduceRequest(
        transactional_id=None, acks=ALL_REPLICAS, timeout_ms=REQUEST_MS, topic_data=asked, max_version=9
    )


def _told(response: Any) -> dict[Place, Answer]:
    return {
        (topic.name, part.index): Answer(part.error_code, getattr(part, "error_message", None))
        for topic in response.responses
        for part in topic.partition_responses
    }
