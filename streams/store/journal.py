"""The journal that makes a batch the same batch again.

Kafka gives a crashed writer's messages to its successor, but not the cuts: fifty messages that went in as one insert may come back as
forty and then twenty. The store recognises a repeated insert by its token only when it is the same insert. So the ranges of a batch are
written here before the batch is, and whoever meets the first message of a range that is already here takes the old cut.

A range is known by its offsets *and* its messages' times, at its start also by a hash of the first message: a broker that lost everything
(an embedded one after a restart) counts from zero again, and its messages are new ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from streams.store.columns import table_of
from streams.store.errors import store_errors
from trainwarden import topics
from trainwarden.bus import Message
from trainwarden.clock import NS_PER_MS, Clock

TABLE = "write_journal"


class State(IntEnum):
    """Of a batch. Later ones win."""

    INTENDED = 1
    DONE = 2
    WITHDRAWN = 3


@dataclass(frozen=True)
class Range:
    """Messages of one partition in one batch: offsets from `first_offset` up to, not including, `next_offset`."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int
    first_hash: int
    first_ms: int
    last_ms: int
    messages: int

    @property
    def place(self) -> str:
        """``topic/partition``."""
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True)
class Batch:
    """Ranges that were or are to be inserted under one token."""

    batch_id: str
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Entry:
    """What the journal knows about a message: it belongs to this batch, which ends here at `next_offset`."""

    batch_id: str
    next_offset: int
    done: bool


def hash_of(message: Message) -> int:
    """Identity of a message beyond its offset."""
    content = b"%d:%s" % (message.timestamp_ms, message.value)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def range_of(messages: Sequence[Message]) -> Range:
    """The range of one partition's messages, in offset order."""
    first, last = messages[0], messages[-1]
    times_ms = [message.timestamp_ms for message in messages]
    return Range(
        first.topic,
        first.partition,
        first.offset,
        last.offset + 1,
        hash_of(first),
        min(times_ms),
        max(times_ms),
        len(messages),
    )


class Journal:
    """Reads and writes `write_journal`.

    Parameters
    ----------
    writer
        Name of this writer process, unique per start.
    """

    def __init__(self, client: Any, schema: Any, clock: Clock, writer: str) -> None:
        self._client = client
        self._schema = schema
        self._clock = clock
        self._writer = writer

    def write(self, notes: Sequence[tuple[Batch, State]]) -> None:
        """Note states of batches, in one insert; repeating it is harmless."""
        rows = [row for batch, state in notes for row in self._rows(batch, state)]
        if not rows:
            return
        token = "+".join(f"{batch.batch_id}:{state.value}" for batch, state in notes)
        with store_errors("writing the journal"):
            self._client.insert_arrow(
                TABLE, table_of(self._schema, rows), settings={"insert_deduplication_token": token}
            )

    def find(self, message: Message) -> Entry | None:
        """The batch that holds `message`, unless it was withdrawn."""
        with store_errors("reading the journal"):
            found = self._client.query(
                "SELECT batch_id, any(next_offset), max(state) AS reached FROM write_journal WHERE topic = {topic:String} "
                "AND partition = {partition:Int32} AND first_offset <= {offset:Int64} AND next_offset > {offset:Int64} "
                "AND (first_offset < {offset:Int64} OR first_hash = {hash:UInt64}) "
                "AND first_ms <= {at_ms:Int64} AND last_ms >= {at_ms:Int64} "
                f"GROUP BY batch_id HAVING reached < {State.WITHDRAWN.value} ORDER BY reached DESC, batch_id LIMIT 1",
                parameters={
                    "topic": message.topic, "partition": message.partition, "offset": message.offset, "hash": hash_of(message),
                    "at_ms": message.timestamp_ms,
                },
            ).result_rows  # fmt: skip
        return Entry(str(found[0][0]), int(found[0][1]), int(found[0][2]) == State.DONE.value) if found else None

    def batch(self, batch_id: str) -> Batch:
        """A batch with all its ranges."""
        with store_errors("reading the journal"):
            rows = self._client.query(
                "SELECT topic, partition, first_offset, any(next_offset), any(first_hash), any(first_ms), any(last_ms), any(messages) "
                "FROM write_journal WHERE batch_id = {batch:String} GROUP BY topic, partition, first_offset "
                "ORDER BY topic, partition, first_offset",
                parameters={"batch": batch_id},
            ).result_rows
        return Batch(batch_id, tuple(Range(str(topic), *(int(value) for value in rest)) for topic, *rest in rows))

    def rivals(self, batch: Batch) -> tuple[str, ...]:
        """Other live batches that hold messages of this one: another writer had them first.

        Ranges overlap in offsets and in time; time tells a broker that began anew from one that went on. Compacted topics are left out:
        their ranges have holes that grow, and their tables keep one row per key anyway.
        """
        ranges = [r for r in batch.ranges if not topics.BY_NAME[r.topic].compacted]
        if not ranges:
            return ()
        clauses = " OR ".join(
            f"(topic = '{r.topic}' AND partition = {r.partition} AND first_offset < {r.next_offset} AND next_offset > {r.first_offset} "
            f"AND first_ms <= {r.last_ms} AND last_ms >= {r.first_ms})"
            for r in ranges
        )
        with store_errors("reading the journal"):
            rows = self._client.query(
                f"SELECT batch_id FROM write_journal WHERE ({clauses}) AND batch_id != {{batch:String}} AND batch_id NOT IN "
                f"(SELECT batch_id FROM write_journal WHERE state = {State.WITHDRAWN.value}) GROUP BY batch_id",
                parameters={"batch": batch.batch_id},
            ).result_rows
        return tuple(str(row[0]) for row in rows)

    def _rows(self, batch: Batch, state: State) -> list[dict[str, Any]]:
        return [
            {
                "batch_id": batch.batch_id, "state": state.value, "writer": self._writer, "topic": r.topic, "partition": r.partition,
                "first_offset": r.first_offset, "next_offset": r.next_offset, "first_hash": r.first_hash, "first_ms": r.first_ms,
                "last_ms": r.last_ms, "messages": r.messages, "written_at": self._clock.now_ns() // NS_PER_MS,
            }
            for r in batch.ranges
        ]  # fmt: skip
