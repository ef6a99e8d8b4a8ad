"""The store writer: every topic into the store, nothing lost and nothing twice.

The order of things is the guarantee: a batch is *intended* in the journal, inserted under its token, then the positions are committed. A
kill between any two of them leaves either nothing, or a batch that the next writer cuts alike and the store recognises. A store that is
away is the same case without the kill: the writer goes back to the batch's start and tries again.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from streams.store.errors import StoreError, store_errors
from streams.store.inserts import Inserter
from streams.store.journal import TABLE as JOURNAL_TABLE
from streams.store.journal import Batch, Journal, State, range_of
from trainwarden import topics
from trainwarden.bus import Bus, Message
from trainwarden.clock import NS_PER_MS, NS_PER_S, Clock
from trainwarden.errors import BusError, UnavailableError
from trainwarden.selfmetrics import Metrics

LOG = logging.getLogger("trainwarden.store.writer")

GROUP = "tw.store"
STORED_TOPICS = tuple(topic.name for topic in topics.ALL if topic not in (topics.CUTS, topics.STATE))
"""Frame cuts and detector state are for machines and stay on the bus."""

ROW_BYTES = 100
"""Bytes of a message per row that it becomes, roughly: rows are counted before anything is decoded."""
IDLE_POLL_S = 0.25
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 10.0
REREAD_IDLE_POLLS = 30
EARLY_PAUSE_S = 0.05
TRICKLE_PAUSE_S, TRICKLE_MESSAGES = 0.1, 500
"""While a batch fills and less than this comes at a time, reading waits: each answer of a broker costs more than its messages."""
STRETCH = 20
DONE_NOTE_AFTER_S = 2.0
NEARLY_ALL = 5000
"""With fewer messages unread the next poll has them all: the writer keeps up."""
MEMBER_FOR_S = 3.0
"""Well under the bus's session time-out of 6 s."""


@dataclass(frozen=True)
class BatchLimits:
    """When a batch is closed: after `age_ms` from its first message, at about `rows` rows, or at so many `messages`.

    Messages count because a log line is one row with a text of its own: half a million of them were a gigabyte.

    An insert costs much the same for a hundred rows as for ten thousand, and there is one for each table. So a batch may grow
    `STRETCH` times as old where that keeps inserting to a share of 1/`STRETCH` of the time: a large cluster's rows wait ten
    seconds, not half of one. What is inserted at once is also merged less often, and a device's minute is fed six times, not 120.

    `catalog_wait_s` is how long a tick waits for its catalogue before it is a dead letter.
    """

    age_ms: int = 500
    rows: int = 500_000
    messages: int = 60_000
    catalog_wait_s: float = 5.0


class StoreWriter:
    """One member of the group `tw.store`.

    Call `cycle` again and again from one thread; it returns after at most about a quarter of a second when nothing comes.
    """

    def __init__(
        self,
        bus: Bus,
        client: Any,
        clock: Clock,
        metrics: Metrics,
        cluster: str = "",
        limits: BatchLimits | None = None,
    ) -> None:
        self._bus = bus
        self._client = client
        self._clock = clock
        self._metrics = metrics
        self._limits = limits or BatchLimits()
        self._inserter = Inserter(client, bus, cluster, clock, metrics, self._limits.catalog_wait_s)
        self._journal = Journal(client, self._inserter.schemas[JOURNAL_TABLE], clock, writer=uuid.uuid4().hex[:12])
        self._subscriber = bus.subscriber(STORED_TOPICS, group=GROUP)
        self._buffer: dict[str, list[Message]] = {}
        self._buffered_rows = 0
        self._buffered = 0
        self._opened_ns = 0
        self._took_ns = 0
        self._trickles = False
        self._uncommitted = False
        self._next: dict[str, int] = {}
        self._known: set[str] = set()
        self._stored: dict[str, list[tuple[int, int]]] = {}
        self._done: list[Batch] = []
        self._done_ns = 0
        self._retry_s = 0.0
        self._kept_up_ns = clock.monotonic_ns()
        self.trouble = ""
        """Why nothing could be written last time, empty when it could."""
        self._member_at_ns = (-(2**63), -(2**63))

    def cycle(self) -> int:
        """Read what is there and write a batch when one is due; returns the rows written.

        A store that is away is waited for (with growing pauses); reading stops meanwhile and the positions stay where they are.
        """
        messages: list[Message] = []
        try:
            if self._retry_s:
                self._wait_for_store()
            messages = self._poll()
            self._admit(messages)
            written = self._write_if_due()
            self._note_keeping_up()
            return written
        except StoreError as error:
            self._retry_s = min(LAST_RETRY_S, self._retry_s * 2 or FIRST_RETRY_S)
            self.trouble = f"it is not taking rows: {error}"
            LOG.warning("the store is not taking rows, next try in %.1f s: %s", self._retry_s, error)
            self._step_back(messages, "store_failed")
        except (BusError, UnavailableError) as error:
            self.trouble = str(error)
            LOG.warning("%s", error)
            self._step_back(messages, "bus_failed")
        return 0

    @property
    def behind_s(self) -> float:
        """How long ago everything on the broker was last read and nothing stood in the way; by a clock that nobody sets, since times on
        messages are those of many machines."""
        return (self._clock.monotonic_ns() - self._kept_up_ns) / NS_PER_S

    def _note_keeping_up(self) -> None:
        self.trouble = ""
        if self._subscriber.unread() <= NEARLY_ALL:
            self._kept_up_ns = self._clock.monotonic_ns()

    def drain(self) -> int:
        """Write what is buffered at once; used at the end and in tests."""
        try:
            written = self._write()
            self._note_done()
            return written
        except (StoreError, BusError) as error:
            LOG.warning("the last batch stays for the next writer: %s", error)
            return 0

    def close(self) -> None:
        """Write what is buffered, leave the group."""
        self.drain()
        self._subscriber.close()
        self._inserter.close()

    # --- reading --------------------------------------------------------------------------------------------------------

    def _poll(self) -> list[Message]:
        timeout_s = self._poll_timeout_s()
        if self._buffer and self._trickles:
            self._clock.sleep(min(TRICKLE_PAUSE_S, timeout_s))
            timeout_s = self._poll_timeout_s()
        began_ns = self._clock.monotonic_ns()
        messages = self._subscriber.poll(timeout_s)
        self._trickles = len(messages) < TRICKLE_MESSAGES
        early_s = timeout_s - (self._clock.monotonic_ns() - began_ns) / NS_PER_S
        if not messages and early_s > 0:
            # a client that cannot reach its group comes back at once: without this pause it would take a whole core
            self._clock.sleep(min(early_s, EARLY_PAUSE_S))
        return messages

    def _poll_timeout_s(self) -> float:
        if not self._buffer:
            return IDLE_POLL_S
        left_ns = self._opened_ns + self._age_ns - self._clock.monotonic_ns()
        return max(0.0, min(IDLE_POLL_S, left_ns / NS_PER_S))

    def _admit(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._uncommitted = True
            place = message.place
            if message.offset < self._next.get(place, 0):
                # the partition was taken away and given back, or the broker lost it and counts anew: what we know of it is void
                self._forget(place)
            self._next[place] = message.offset + 1
            stored = any(first <= message.offset < end for first, end in self._stored.get(place, ()))
            if not stored and not self._already_stored(message):
                self._take(message)

    def _already_stored(self, message: Message) -> bool:
        """Whether the journal has this message; a batch that was only intended is first written as it was intended."""
        if message.place in self._known:
            return False
        entry = self._journal.find(message)
        if entry is None:
            self._known.add(message.place)
            return False
        if not entry.done:
            self._finish(self._journal.batch(entry.batch_id))
        self._stored.setdefault(message.place, []).append((message.offset, entry.next_offset))
        return True

    def _take(self, message: Message) -> None:
        if not self._buffer:
            self._opened_ns = self._clock.monotonic_ns()
        self._buffer.setdefault(message.place, []).append(message)
        self._buffered += 1
        self._buffered_rows += 1 + len(message.value) // ROW_BYTES

    def _forget(self, place: str) -> None:
        dropped = self._buffer.pop(place, [])
        self._buffered -= len(dropped)
        self._buffered_rows -= sum(1 + len(message.value) // ROW_BYTES for message in dropped)
        self._known.discard(place)
        self._stored.pop(place, None)

    @property
    def _age_ns(self) -> int:
        """How old a batch may grow, by what the last one took to insert."""
        age_ns = self._limits.age_ms * NS_PER_MS
        return max(age_ns, STRETCH * min(age_ns, self._took_ns))

    # --- writing --------------------------------------------------------------------------------------------------------

    def _write_if_due(self) -> int:
        now_ns = self._clock.monotonic_ns()
        if self._done and now_ns - self._done_ns > DONE_NOTE_AFTER_S * NS_PER_S:
            self._note_done()
        full = self._buffered_rows >= self._limits.rows or self._buffered >= self._limits.messages
        old = now_ns - self._opened_ns >= self._age_ns
        if self._buffer and not full and not old:
            return 0
        return self._write() if self._buffer or self._uncommitted else 0

    def _write(self) -> int:
        self._drop_revoked()
        written = 0
        if self._buffer:
            batch = Batch(
                uuid.uuid4().hex[:16], tuple(range_of(messages) for _, messages in sorted(self._buffer.items()))
            )
            self._journal.write([*((done, State.DONE) for done in self._done), (batch, State.INTENDED)])
            self._done.clear()
            if self._may_have_rivals() and (rivals := self._journal.rivals(batch)):
                self._withdraw(batch, rivals)
                return 0
            written = self._insert(batch, [m for _, messages in sorted(self._buffer.items()) for m in messages])
            self._empty()
        if self._uncommitted:
            self._subscriber.commit()
            self._uncommitted = False
            self._member_at_ns = self._instants()
        return written

    def _instants(self) -> tuple[int, int]:
        return self._clock.monotonic_ns(), self._clock.now_ns()

    def _may_have_rivals(self) -> bool:
        """Whether another member may have been given our partitions without our knowing.

        A commit that went well a moment ago says no: sessions last longer. Both clocks are asked, since a machine that was suspended
        has lost time on one of them.
        """
        return (
            max(now - then for now, then in zip(self._instants(), self._member_at_ns, strict=True))
            > MEMBER_FOR_S * NS_PER_S
        )

    def _insert(self, batch: Batch, messages: Sequence[Message]) -> int:
        began_ns = self._clock.monotonic_ns()
        written = self._inserter.insert(batch.batch_id, messages)
        self._took_ns = self._clock.monotonic_ns() - began_ns
        self._metrics.count("tw_store_batches_total", outcome="written")
        self._done.append(batch)
        self._done_ns = self._clock.monotonic_ns()
        return written

    def _drop_revoked(self) -> None:
        """Another member has these partitions now, and their messages from the last commit on."""
        positions = self._subscriber.positions()
        for place in [place for place in self._buffer if place not in positions]:
            self._forget(place)

    def _withdraw(self, batch: Batch, rivals: tuple[str, ...]) -> None:
        LOG.warning(
            "batch %s holds messages that another writer has in %s: starting it anew", batch.batch_id, ", ".join(rivals)
        )
        self._metrics.count("tw_store_batches_total", outcome="withdrawn")
        self._journal.write([(batch, State.WITHDRAWN)])
        theirs = [self._journal.batch(rival) for rival in rivals]
        self._rewind([m for messages in self._buffer.values() for m in messages])
        for rival in theirs:
            self._finish(rival)
            for r in rival.ranges:
                self._stored.setdefault(r.place, []).append((r.first_offset, r.next_offset))

    def _finish(self, batch: Batch) -> None:
        """Write a batch that somebody intended and may not have written, exactly as it was cut."""
        messages = self._reread(batch)
        LOG.info("batch %s was intended and not finished: writing its %d messages", batch.batch_id, len(messages))
        self._insert(batch, messages)
        self._note_done()

    def _reread(self, batch: Batch) -> list[Message]:
        """All messages of a batch, read outside the group: its partitions may by now belong to several writers."""
        reader = self._bus.subscriber(sorted({r.topic for r in batch.ranges}), start="latest")
        try:
            reader.seek_to({r.place: r.first_offset for r in batch.ranges})
            return self._collect(reader, batch)
        finally:
            reader.close()

    def _collect(self, reader: Any, batch: Batch) -> list[Message]:
        ends = {r.place: r.next_offset for r in batch.ranges}
        open_places, found, idle = set(ends), list[Message](), 0
        while open_places and idle < REREAD_IDLE_POLLS:
            polled = reader.poll(0.1)
            idle = 0 if polled else idle + 1
            for message in polled:
                if message.offset < ends.get(message.place, 0):
                    found.append(message)
                if message.offset >= ends.get(message.place, 0) - 1:
                    open_places.discard(message.place)
        if open_places:
            LOG.warning(
                "batch %s: %s no longer hold all of its messages", batch.batch_id, ", ".join(sorted(open_places))
            )
        return sorted(found, key=lambda message: (message.place, message.offset))

    def _note_done(self) -> None:
        self._journal.write([(batch, State.DONE) for batch in self._done])
        self._done.clear()

    # --- trouble --------------------------------------------------------------------------------------------------------

    def _step_back(self, polled: Sequence[Message], outcome: str) -> None:
        self._metrics.count("tw_store_batches_total", outcome=outcome)
        self._rewind([*(m for messages in self._buffer.values() for m in messages), *polled])

    def _rewind(self, messages: Sequence[Message]) -> None:
        """Go back to before `messages`; the journal then says which of them are in the store."""
        starts: dict[str, int] = {}
        for message in messages:
            starts[message.place] = min(message.offset, starts.get(message.place, message.offset))
        self._empty()
        self._next.clear()
        self._known.clear()
        self._stored.clear()
        self._subscriber.seek_to(starts)

    def _empty(self) -> None:
        self._buffer.clear()
        self._buffered_rows = self._buffered = 0

    def _wait_for_store(self) -> None:
        self._clock.sleep(self._retry_s)
        with store_errors("it does not answer"):
            self._client.command("SELECT 1")
        self._retry_s = 0.0


def run_until(
    writer: StoreWriter, stop: threading.Event, after: Callable[[StoreWriter], None] = lambda writer: None
) -> None:
    """Cycle until `stop` is set, then write what is buffered; `after` sees the writer after each cycle."""
    try:
        while not stop.is_set():
            writer.cycle()
            after(writer)
    finally:
        writer.close()
