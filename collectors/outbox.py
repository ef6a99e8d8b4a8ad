"""From sources to the broker: records get their header here, wait in the spool, and are taken off when acknowledged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from collectors.eventrate import EventRate
from collectors.predecessor import Predecessor
from collectors.spool import Entry, Held, Spool, Value
from trainwarden import topics
from trainwarden.bus import Bus, Publisher
from trainwarden.clock import NS_PER_MS, NS_PER_S, Clock
from trainwarden.errors import BusError, NoTopicError, TrainwardenError
from trainwarden.records import DeadLetter, LogEvent, Record, StepReport, StepRow, Tick, decode, encode
from trainwarden.selfmetrics import Metrics

logger = logging.getLogger(__name__)

URGENT_SPACING_NS = 250 * NS_PER_MS
ROWS_PER_REPORT = 500
DEAD_PER_S = 10
DEAD_BYTES = 4096
WAITED_NS = 3 * NS_PER_S
FLUSH_TIMEOUT_S = 3.0
BACKOFF_MAX_S = 5.0
DETOUR_NS = 60 * NS_PER_S
"""For so long nobody asks again for a topic that is not there."""
HOPELESS = ("MessageSizeTooLargeError", "RecordListTooLargeError", "InvalidRecordError", "CorruptRecordError")
"""Reasons that no later attempt would change: such an entry must not block those behind it."""


class Outbox:
    """Stamps records and appends them to the spool; implements `collectors.base.Outlet`. Thread-safe.

    Parameters
    ----------
    boot_id
        Of this run of the agent; with `seq` per record kind it orders what one agent says. Who knows it may speak for the node
        (`streams.voices`).
    alias
        What stands in its place where other collectors read: as random, and no way leads from it to the boot id.
    block
        Partition key of the node.
    before
        The agent that ran here before: ticks name it.
    """

    def __init__(
        self,
        cluster: str,
        node: str,
        boot_id: str,
        block: bytes,
        clock: Clock,
        spool: Spool,
        metrics: Metrics,
        before: Predecessor | None = None,
        alias: str = "",
    ) -> None:
        self._header = {"cluster": cluster, "node": node, "boot_id": boot_id}
        self._alias = alias
        self._before = before
        self._block = block
        self._clock = clock
        self._spool = spool
        self._metrics = metrics
        self._lock = threading.Lock()
        self._seq: dict[type[Record], int] = {}
        self._steps: dict[tuple[str, int, int], tuple[int, list[StepRow]]] = {}
        self._steps_left_ns = 0
        self._dead_second = (0, 0)
        self._rate = EventRate()
        self._layout_changed = False
        self.waiting = threading.Event()

    # --- what sources call -----------------------------------------------------------------------------------------------

    def log(self, event: LogEvent, urgent: bool) -> None:
        self.put(self._topic(event), self._block, event, Value.LOG, urgent)
        if urgent and self._clock.monotonic_ns() - self._steps_left_ns >= URGENT_SPACING_NS:
            self.leave()

    def _topic(self, event: LogEvent) -> str:
        """What has a code is read first; what is said too often waits with the lines, and nothing is left out."""
        with self._lock:
            prompt = self._rate.admits(event.code, self._clock.monotonic_ns())
        if event.code and not prompt:
            self._metrics.count("tw_events_demoted_total")
        return topics.EVENTS.name if prompt else topics.LOGS.name

    def step(self, job: str, attempt: int, rank: int, world: int, row: StepRow) -> None:
        with self._lock:
            _, rows = self._steps.setdefault((job, attempt, rank), (world, []))
            rows.append(row)
            full = len(rows) >= ROWS_PER_REPORT
        if full:
            self.leave()

    def dead(self, origin: str, reason: str, payload: bytes) -> None:
        second = self._clock.monotonic_ns() // NS_PER_S
        count = self._dead_second[1] + 1 if self._dead_second[0] == second else 1
        self._dead_second = (second, count)
        self._metrics.count("tw_dead_letters_total", topic=origin)
        if count <= DEAD_PER_S:
            letter = DeadLetter(topic=origin, reason=reason, payload=payload[:DEAD_BYTES])
            self.put(topics.DEAD.name, origin.encode(), letter, Value.STEP)

    def topology_changed(self) -> None:
        self._layout_changed = True

    # --- what the agent calls --------------------------------------------------------------------------------------------

    def take_layout_change(self) -> bool:
        """Whether a layout changed since the last call."""
        changed, self._layout_changed = self._layout_changed, False
        return changed

    def put(self, topic: str, key: bytes, record: Record, value_class: Value, leave: bool = False) -> None:
        """Stamp and keep one record; `leave` wakes the sender now."""
        now_ns = self._clock.now_ns()
        with self._lock:
            self._spool.append(self._entry(topic, key, record, value_class, now_ns))
        self._metrics.count("tw_records_total", topic=topic)
        if leave:
            self.waiting.set()

    def leave(self) -> None:
        """Close the step reports and wake the sender."""
        self._steps_left_ns = self._clock.monotonic_ns()
        with self._lock:
            steps, self._steps = self._steps, {}
        if steps:
            self._put_steps(steps)
        self.waiting.set()

    def _put_steps(self, steps: dict[tuple[str, int, int], tuple[int, list[StepRow]]]) -> None:
        """The reports of all ranks in one write."""
        topic, now_ns = topics.STEPS.name, self._clock.now_ns()
        reports = [
            StepReport(job=job, attempt=attempt, rank=rank, world=world, rows=tuple(rows))
            for (job, attempt, rank), (world, rows) in steps.items()
        ]
        with self._lock:
            self._spool.extend([self._entry(topic, r.job.encode(), r, Value.STEP, now_ns) for r in reports])
        self._metrics.count("tw_records_total", len(reports), topic=topic)

    def _entry(self, topic: str, key: bytes, record: Record, value_class: Value, now_ns: int) -> Entry:
        """The record with its header, encoded. Under the lock: entries are kept in the order of their numbers."""
        seq = self._seq[type(record)] = self._seq.get(type(record), -1) + 1
        header: dict[str, object] = {**self._header, "seq": seq, "observed_at_ns": record.observed_at_ns or now_ns}
        if topic in topics.READ_BY_COLLECTORS:
            header["boot_id"] = self._alias
        if self._before is not None and isinstance(record, Tick):
            header["succeeds"] = self._before.spoken()
        stamped = msgspec.structs.replace(record, **header)
        return Entry(value_class, now_ns, topic, key, encode(stamped))


class Sender:
    """Moves entries from the spool to the broker, in order; nothing is taken off before it is acknowledged.

    When a batch fails, the publisher is thrown away with all it had buffered, and the same entries are sent again by a new one.
    """

    def __init__(self, connect: Callable[[], Bus], spool: Spool, clock: Clock, metrics: Metrics) -> None:
        self._connect = connect
        self._spool = spool
        self._clock = clock
        self._metrics = metrics
        self._publisher: Publisher | None = None
        self.connected = False
        self._backoff_s = 0.0
        self._hopeless: set[tuple[str, bytes]] = set()
        self._detour_until_ns: int | None = None

    @property
    def backoff_s(self) -> float:
        """Pause before the next attempt; 0 while all is well."""
        return self._backoff_s

    def deliver(self) -> bool:
        """Send everything that waits; false when the broker did not take it (try again after `backoff_s`)."""
        try:
            while held := self._spool.peek():
                self._send(held)
        except TrainwardenError as error:
            self._spool.release()
            self._lost(error)
            return False
        self._metrics.set("tw_spool_bytes", self._spool.size_bytes)
        return True

    def failed(self, error: Exception) -> None:
        """Start over after something unforeseen: what was lent is sent again by a new publisher."""
        self._spool.release()
        self._lost(error)

    def close(self) -> None:
        """Let the publisher go."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _send(self, held: list[Held]) -> None:
        try:
            self._publish(held)
        except NoTopicError as error:
            if error.topic != topics.EVENTS.name:
                raise
            self._take_detour()
            self._publish(held)

    def _take_detour(self) -> None:
        """A broker that an older build has laid out has no topic for events, and ticks must not wait for it."""
        if self._detour_until_ns is None:
            logger.warning("no topic %s to write to: events go to %s (run `trainwarden topics`; allow WRITE and DESCRIBE)",
                           topics.EVENTS.name, topics.LOGS.name)  # fmt: skip
        self._detour_until_ns = self._clock.monotonic_ns() + DETOUR_NS

    def _place(self, entry: Entry) -> str:
        detour = self._detour_until_ns is not None and self._clock.monotonic_ns() < self._detour_until_ns
        return topics.LOGS.name if detour and entry.topic == topics.EVENTS.name else entry.topic

    def _publish(self, held: list[Held]) -> None:
        if self._publisher is None:
            self._publisher = self._connect().publisher(self._refused)
        late = 0
        for item in held:
            topic, value = self._place(item.entry), self._value(item.entry)
            if (topic, value) in self._hopeless:
                continue
            late += value is not item.entry.value
            self._publisher.publish(topic, item.entry.key, value)
        self._publisher.flush(FLUSH_TIMEOUT_S)
        self._spool.acknowledge(held[-1].place)
        self._hopeless.clear()
        if late:
            self._metrics.count("tw_spooled_records_total", late)
        if not self.connected:
            logger.info("broker reached")
        self.connected, self._backoff_s = True, 0.0

    def _value(self, entry: Entry) -> bytes:
        """The entry's bytes; a tick that waited for the broker says so."""
        if entry.topic != topics.TICKS.name or self._clock.now_ns() - entry.written_ns < WAITED_NS:
            return entry.value
        tick = decode(entry.value)
        return encode(msgspec.structs.replace(tick, spooled=True)) if isinstance(tick, Tick) else entry.value

    def _refused(self, topic: str, key: bytes, value: bytes, reason: str) -> None:
        del key
        if reason.startswith(HOPELESS) and (topic, value) not in self._hopeless:
            logger.error("a record of %d bytes for %s is given up: %s", len(value), topic, reason)
            self._metrics.count("tw_spool_dropped_total", topic=topic)
            self._hopeless.add((topic, value))

    def _lost(self, error: Exception) -> None:
        if self.connected or self._backoff_s == 0.0:
            logger.warning("broker away, records wait on disk: %s", error)
        self.connected = False
        self._backoff_s = min(max(0.5, self._backoff_s * 2), BACKOFF_MAX_S)
        self._metrics.set("tw_spool_bytes", self._spool.size_bytes)
        try:
            self.close()
        except (BusError, OSError) as problem:
            logger.info("the old publisher did not close: %s", problem)
