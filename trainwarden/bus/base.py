"""The bus as its users see it. Offsets are always "next to read"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trainwarden.topics import Topic

Start = Literal["earliest", "latest"]
FailureHandler = Callable[[str, bytes, bytes, str], None]
"""Called with (topic, key, value, reason) for each message that could not be delivered; from any thread."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message as read; `timestamp_ms` is the producer's."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes
    timestamp_ms: int

    @property
    def place(self) -> str:
        """``topic/partition``, the key of position maps."""
        return f"{self.topic}/{self.partition}"


class Publisher(Protocol):
    """Sends messages in the background, in order per key."""

    def publish(self, topic: str, key: bytes, value: bytes) -> None:
        """Queue one message. Does not wait for the broker; a message that is lost in the end goes to the failure handler."""
        ...

    def flush(self, timeout_s: float) -> None:
        """Wait until everything published so far is acknowledged.

        Raises
        ------
        BusError
            When something was not acknowledged within `timeout_s`, or was refused.
        """
        ...

    def close(self) -> None:
        """Send what can still be sent within a second, then let go."""
        ...


class Subscriber(Protocol):
    """Reads topics from several partitions; one thread only."""

    def poll(self, timeout_s: float, max_messages: int = 5000) -> list[Message]:
        """Whatever is there, at most `max_messages`; waits up to `timeout_s` for the first one. Empty when nothing came."""
        ...

    def commit(self) -> None:
        """Store the positions of everything returned so far for the group. Call it after the effects are safe."""
        ...

    def seek_to(self, positions: Mapping[str, int]) -> None:
        """Continue at these offsets (``topic/partition`` → next offset); other partitions stay where they are."""
        ...

    def positions(self) -> dict[str, int]:
        """Next offset per partition of what was returned so far."""
        ...

    def unread(self) -> int:
        """How many messages lie on the broker beyond that, as far as it has said; of partitions nothing was fetched from, nothing."""
        ...

    def close(self) -> None:
        """Leave without committing."""
        ...


class Bus(Protocol):
    """A broker, or the memory that stands in for one."""

    def publisher(self, on_failure: FailureHandler | None = None) -> Publisher:
        """A new publisher."""
        ...

    def subscriber(self, topics: Sequence[str], group: str | None = None, start: Start = "earliest") -> Subscriber:
        """A new subscriber. Without `group` it reads every partition by itself and commits nothing, or of a topic written
        "topic/number" that one; `start` says where to begin when the group has no position."""
        ...

    def ensure_topics(self, topics: Sequence[Topic]) -> None:
        """Create what is missing; raises `UnavailableError` when a topic that exists has too few partitions."""
        ...

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the broker answers; raises `UnavailableError` with its address otherwise."""
        ...

    def close(self) -> None:
        """Close what this bus opened itself."""
        ...
