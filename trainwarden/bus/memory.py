"""A broker in memory: partitions, keys, groups and offsets behave as Kafka's do; nothing survives the process."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

from trainwarden.bus.base import FailureHandler, Message, Start
from trainwarden.clock import NS_PER_MS, Clock, SystemClock
from trainwarden.errors import BusError, UnavailableError
from trainwarden.topics import BY_NAME, Topic


class MemoryBus:
    """Topics as lists of messages.

    Tests take the broker away with `available = False`: publishers then fail as with a broker that is gone.
    """

    _by_name: ClassVar[dict[str, MemoryBus]] = {}

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.available = True
        self.changed = threading.Condition()
        self._logs: dict[str, list[list[Message]]] = {}
        self._committed: dict[tuple[str, str], int] = {}

    @classmethod
    def named(cls, name: str) -> MemoryBus:
        """The bus of this name, shared by everybody in the process."""
        return cls._by_name.setdefault(name, cls())

    def publisher(self, on_failure: FailureHandler | None = None) -> MemoryPublisher:
        return MemoryPublisher(self, on_failure)

    def subscriber(
        self, topics: Sequence[str], group: str | None = None, start: Start = "earliest"
    ) -> MemorySubscriber:
        return MemorySubscriber(self, tuple(topics), group, start)

    def ensure_topics(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            have = len(self.partitions(topic.name))
            if have < topic.partitions:
                raise UnavailableError(f"topic {topic.name} has {have} partitions, {topic.partitions} are needed")

    def wait_ready(self, timeout_s: float) -> None:
        del timeout_s
        if not self.available:
            raise UnavailableError("the memory bus was taken away")

    def close(self) -> None:
        return None

    def partitions(self, topic: str) -> list[list[Message]]:
        """Logs of a topic; created on first use with the partitions that `trainwarden.topics` says."""
        if topic not in self._logs:
            known = BY_NAME.get(topic)
            self._logs[topic] = [[] for _ in range(known.partitions if known else 1)]
        return self._logs[topic]

    def append(self, topic: str, key: bytes, value: bytes) -> None:
        """Add a message to the partition of its key."""
        with self.changed:
            logs = self.partitions(topic)
            partition = zlib.crc32(key) % len(logs)
            log = logs[partition]
            log.append(Message(topic, partition, len(log), key, value, self.clock.now_ns() // NS_PER_MS))
            self.changed.notify_all()

    def committed(self, group: str, place: str) -> int | None:
        """Stored position of a group."""
        return self._committed.get((group, place))

    def store_commit(self, group: str, positions: Mapping[str, int]) -> None:
        """Store positions of a group."""
        with self.changed:
            self._committed.update({(group, place): offset for place, offset in positions.items()})


class MemoryPublisher:
    """Publisher of a `MemoryBus`."""

    def __init__(self, bus: MemoryBus, on_failure: FailureHandler | None) -> None:
        self._bus = bus
        self._on_failure = on_failure
        self._failed = 0

    def publish(self, topic: str, key: bytes, value: bytes) -> None:
        if self._bus.available:
            self._bus.append(topic, key, value)
            return
        self._failed += 1
        if self._on_failure is not None:
            self._on_failure(topic, key, value, "the memory bus was taken away")

    def flush(self, timeout_s: float) -> None:
        del timeout_s
        failed, self._failed = self._failed, 0
        if failed:
            raise BusError(f"{failed} messages were not delivered: the memory bus was taken away")

    def close(self) -> None:
        return None


class MemorySubscriber:
    """Subscriber of a `MemoryBus`. Members of one group share positions but not partitions: use one member in tests."""

    def __init__(self, bus: MemoryBus, topics: tuple[str, ...], group: str | None, start: Start) -> None:
        self._bus = bus
        self._group = group
        self._positions: dict[str, int] = {}
        for asked in topics:
            topic, _, only = asked.partition("/")
            for number, log in enumerate(bus.partitions(topic)):
                if only and number != int(only):
                    continue
                place = f"{topic}/{number}"
                stored = bus.committed(group, place) if group else None
                self._positions[place] = stored if stored is not None else (0 if start == "earliest" else len(log))

    def poll(self, timeout_s: float, max_messages: int = 5000) -> list[Message]:
        with self._bus.changed:
            found = self._take(max_messages)
            if not found and timeout_s > 0:
                self._bus.changed.wait(timeout_s)
                found = self._take(max_messages)
            return found

    def commit(self) -> None:
        if self._group is not None:
            self._bus.store_commit(self._group, self._positions)

    def seek_to(self, positions: Mapping[str, int]) -> None:
        self._positions.update({place: offset for place, offset in positions.items() if place in self._positions})

    def positions(self) -> dict[str, int]:
        return dict(self._positions)

    def unread(self) -> int:
        ends = {place: self._end(place) for place in self._positions}
        return sum(max(0, end - self._positions[place]) for place, end in ends.items())

    def close(self) -> None:
        return None

    def _end(self, place: str) -> int:
        topic, _, number = place.rpartition("/")
        return len(self._bus.partitions(topic)[int(number)])

    def _take(self, limit: int) -> list[Message]:
        found: list[Message] = []
        if not self._bus.available:
            return found
        for place, offset in self._positions.items():
            topic, _, number = place.rpartition("/")
            batch = self._bus.partitions(topic)[int(number)][offset : offset + limit - len(found)]
            self._positions[place] = offset + len(batch)
            found.extend(batch)
        return found
