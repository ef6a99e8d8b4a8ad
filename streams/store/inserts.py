"""From messages to rows in the store: decode, bury what nobody can read, insert each table under the batch's token."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from streams.store.columns import schemas_of, table_of
from streams.store.errors import store_errors
from streams.store.journal import TABLE as JOURNAL_TABLE
from streams.store.lean import LeanTick, decode_lean
from streams.store.rows import EARLIEST_NS, ROW_TABLES, Row, rows_of
from streams.store.steps import STEPS, StepTable, fits
from streams.store.ticks import TICK_TABLES, TickTables
from streams.store.words import Owners
from trainwarden.bus import Bus, Message, Publisher
from trainwarden.bus.dead import bury, decode_or_dead
from trainwarden.clock import NS_PER_MS, NS_PER_S, Clock
from trainwarden.errors import BusError, DecodeError
from trainwarden.records import Catalog, Record, StepReport, decode
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import CATALOG

LOG = logging.getLogger("trainwarden.store.inserts")

_UNFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""What Arrow raises for a value that its column cannot hold."""

INSERT_SETTINGS = {
    "async_insert": 0,
    "insert_deduplicate": 1,
    # without it a redelivered batch is dropped from the table but counted again in every roll-up
    "deduplicate_blocks_in_dependent_materialized_views": 1,
    "max_partitions_per_insert_block": 1000,
    # for some 90 functions of each roll-up seconds of compiling at every start, for nothing that could be measured afterwards
    "compile_aggregate_expressions": 0,
}
NO_REPEATS = {"optimize_on_insert": 0}
"""For tables in whose batches no key is twice: roll-ups are grouped already, and would be merged row by row once more for nothing."""

_Placed = tuple[Message, Row]


class Catalogs:
    """Every catalogue that `tw.catalog` holds, read by a subscriber of its own: no batch decides when a catalogue is known.

    A tick can overtake its catalogue (they are on different topics), so an unknown id is waited for.
    """

    def __init__(self, bus: Bus, clock: Clock, wait_s: float) -> None:
        self._subscriber = bus.subscriber([CATALOG.name], start="earliest")
        self._clock = clock
        self._wait_ns = int(wait_s * NS_PER_S)
        self._known: dict[str, Catalog] = {}
        self._missing: set[str] = set()

    def get(self, catalog_id: str) -> Catalog | None:
        """The catalogue, or None when it did not come within the wait; an id that once was missed is not waited for again."""
        deadline_ns = self._clock.monotonic_ns() + (0 if catalog_id in self._missing else self._wait_ns)
        while catalog_id not in self._known:
            self._read(timeout_s=0.05)
            if catalog_id not in self._known and self._clock.monotonic_ns() >= deadline_ns:
                self._missing.add(catalog_id)
                return None
        return self._known[catalog_id]

    def close(self) -> None:
        """Leave the topic."""
        self._subscriber.close()

    def _read(self, timeout_s: float) -> None:
        messages = self._subscriber.poll(timeout_s)
        for message in messages:
            try:
                record = decode(message.value)
            except DecodeError as error:
                LOG.warning(
                    "%s offset %d: %s", message.place, message.offset, error
                )  # the writer's own reading buries it
                continue
            if isinstance(record, Catalog):
                self._known[record.catalog_id] = record
        if not messages:
            self._clock.sleep(0.01)


@dataclass
class _Collected:
    """Rows of a batch before they become tables."""

    ticks: TickTables
    steps: StepTable
    rows: dict[str, list[_Placed]] = field(default_factory=dict)


class Inserter:
    """Turns messages into inserts.

    Parameters
    ----------
    cluster
        Name on dead letters.
    """

    def __init__(
        self, client: Any, bus: Bus, cluster: str, clock: Clock, metrics: Metrics, catalog_wait_s: float = 5.0
    ) -> None:
        self._client = client
        self._clock = clock
        self._cluster = cluster
        self._metrics = metrics
        self._catalogs = Catalogs(bus, clock, catalog_wait_s)
        self._publisher: Publisher = bus.publisher(self._letter_lost)
        self._buried = 0
        self._owners = Owners()
        with store_errors("reading the store's columns"):
            self.schemas: dict[str, Any] = schemas_of(client, (*TICK_TABLES, *ROW_TABLES, JOURNAL_TABLE))

    def insert(self, batch_id: str, messages: Sequence[Message]) -> int:
        """Insert all rows of `messages`; the same batch may be inserted again and is then recognised. Returns the rows.

        Raises
        ------
        StoreError
            The store did not take a table, or dead letters could not be sent: nothing may be committed.
        """
        tables = self._tables(messages)
        for name in sorted(tables):
            self._insert_table(batch_id, name, tables[name])
        self._send_letters()
        return sum(table.num_rows for table in tables.values())

    def close(self) -> None:
        """Close what this object opened on the bus."""
        self._catalogs.close()
        self._publisher.close()

    def _tables(self, messages: Sequence[Message]) -> dict[str, Any]:
        ticks = TickTables(self.schemas, self._catalogs.get, self._owners)
        collected = _Collected(ticks, StepTable(self.schemas[STEPS], self._owners))
        for topic, count in Counter(message.topic for message in messages).items():
            self._metrics.count("tw_records_total", count, topic=topic)
        for message in messages:
            record = decode_or_dead(message, self._publisher, self._cluster, self._clock, decode_lean)
            if record is None:
                self._count_dead(message)
            else:
                self._collect(message, record, collected)
        tables = collected.ticks.tables()
        for name, rows in collected.rows.items():
            if (table := self._row_table(name, rows)) is not None:
                tables[name] = table
        if (steps := collected.steps.table()) is not None:
            odd = tables.get(STEPS)  # reports with a number that has no room: what is left of them was made row by row
            tables[STEPS] = steps if odd is None else pa.concat_tables([steps.cast(odd.schema), odd])
        return tables

    def _collect(self, message: Message, record: Record, collected: _Collected) -> None:
        arrived_ms = arrival_ms(message, record)
        try:
            if isinstance(record, LeanTick):
                collected.ticks.add(record, arrived_ms)
            elif isinstance(record, StepReport) and fits(record):
                collected.steps.add(record, arrived_ms)
            else:
                for table, row in list(rows_of(record, arrived_ms)):
                    collected.rows.setdefault(table, []).append((message, row))
        except (DecodeError, *_UNFIT) as error:
            self._bury(message, str(error))

    def _row_table(self, name: str, rows: list[_Placed]) -> Any | None:
        schema = self.schemas[name]
        try:
            return table_of(schema, [row for _, row in rows])
        except _UNFIT:
            # one value that does not fit spoils the whole table: find its row, keep the others
            fitting = [(message, row) for message, row in rows if self._fits(schema, message, row)]
            return table_of(schema, [row for _, row in fitting]) if fitting else None

    def _fits(self, schema: Any, message: Message, row: Row) -> bool:
        try:
            table_of(schema, [row])
        except _UNFIT as error:
            self._bury(message, f"a value does not fit its column: {error}")
            return False
        return True

    def _insert_table(self, batch_id: str, name: str, table: Any) -> None:
        started = time.perf_counter()
        with store_errors(f"inserting {table.num_rows} rows into {name}"):
            more = NO_REPEATS if name in TICK_TABLES or name == STEPS else {}
            settings = {**INSERT_SETTINGS, **more, "insert_deduplication_token": f"{batch_id}:{name}"}
            self._client.insert_arrow(name, table, settings=settings)
        self._metrics.observe_ms("tw_insert_ms", (time.perf_counter() - started) * 1000, table=name)
        self._metrics.count("tw_store_rows_total", table.num_rows, table=name)

    def _bury(self, message: Message, reason: str) -> None:
        bury(message, reason, self._publisher, self._cluster, self._clock)
        self._count_dead(message)

    def _count_dead(self, message: Message) -> None:
        self._buried += 1
        self._metrics.count("tw_dead_letters_total", topic=message.topic)

    def _letter_lost(self, topic: str, key: bytes, value: bytes, reason: str) -> None:
        LOG.warning(
            "a dead letter of %d bytes for %s (%s) was not delivered: %s",
            len(value),
            topic,
            key.decode(errors="replace"),
            reason,
        )

    def _send_letters(self) -> None:
        if not self._buried:
            return
        with store_errors("sending dead letters"):
            try:
                self._publisher.flush(10.0)
            except BusError as error:
                raise OSError(str(error)) from error
        self._buried = 0


def arrival_ms(message: Message, record: Record) -> int:
    """When the broker had it; the record's own time where the broker's cannot be true."""
    earliest_ms, latest_ms = EARLIEST_NS // NS_PER_MS, 4_102_444_800_000
    if earliest_ms <= message.timestamp_ms <= latest_ms:
        return message.timestamp_ms
    return min(max(record.observed_at_ns // NS_PER_MS, earliest_ms), latest_ms)
