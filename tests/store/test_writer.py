"""The writer on a real store: nothing lost, nothing twice, whatever happens between intention and commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streams.store.connect import connect
from streams.store.journal import TABLE as JOURNAL
from streams.store.writer import BatchLimits, StoreWriter
from tests.store.make_records import START_NS, catalogs, incident, log, one_of_each, publish, steps, tick, verdict
from tests.store.server import StoreProcess
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_S, SimulatedClock, SystemClock
from trainwarden.records import IncidentStatus, Record, encode
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import node_block

NOW = BatchLimits(age_ms=0, catalog_wait_s=0.2)


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it."""


class Mortal:
    """A client that dies around one insert.

    Parameters
    ----------
    table
        The insert to die at; empty never dies.
    before
        Die before the rows are sent, else after they are in.
    """

    def __init__(self, client: Any, table: str = "", before: bool = False) -> None:
        self._client = client
        self.table = table
        self._before = before

    def insert_arrow(self, table: str, rows: Any, **settings: Any) -> None:
        """Insert, and die around it."""
        if table == self.table and self._before:
            raise Killed
        self._client.insert_arrow(table, rows, **settings)
        if table == self.table:
            raise Killed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def writer_of(bus: MemoryBus, client: Any, limits: BatchLimits = NOW, metrics: Metrics | None = None) -> StoreWriter:
    return StoreWriter(bus, client, SystemClock(), metrics or Metrics("store"), "c", limits)


def settle(writer: StoreWriter, cycles: int = 3) -> None:
    """Cycle until a whole round brings nothing."""
    for _ in range(cycles):
        writer.cycle()
    writer.drain()


def ticks(first: int, count: int) -> list[tuple[str, bytes, Record]]:
    return [
        ("tw.ticks", node_block(node), tick(seq, node)) for seq in range(first, first + count) for node in ("n0", "n1")
    ]


def known_catalogs() -> list[tuple[str, bytes, Record]]:
    return [("tw.catalog", c.catalog_id.encode(), c) for c in catalogs()]


def one(client: Any, query: str) -> Any:
    row = client.query(query).result_rows[0]
    return row[0] if len(row) == 1 else row


@pytest.fixture
def bus() -> MemoryBus:
    made = MemoryBus()
    publish(made, known_catalogs())
    return made


def test_everything_arrives_in_its_table(client: Any) -> None:
    bus = MemoryBus()
    publish(bus, one_of_each())
    settle(writer_of(bus, client))
    counts = {table: one(client, f"SELECT count() FROM {table}") for table in (
        "host_ticks", "process_ticks", "nic_ticks", "mesh_ticks", "gpu_ticks", "other_ticks", "gaps", "steps", "log_events", "topology",
        "verdicts", "incidents", "incident_revisions", "plans", "actions", "deliveries", "policy_changes", "dead_letters")}  # fmt: skip
    assert counts == {"host_ticks": 1, "process_ticks": 1, "nic_ticks": 2, "mesh_ticks": 1, "gpu_ticks": 1, "other_ticks": 1, "gaps": 1,
                      "steps": 4, "log_events": 1, "topology": 1, "verdicts": 1, "incidents": 1, "incident_revisions": 2, "plans": 1,
                      "actions": 1, "deliveries": 1, "policy_changes": 1, "dead_letters": 1}  # fmt: skip
    assert one(client, "SELECT kind, culprit, status FROM incidents") == ("rank_frozen", "node:n2", "closed")
    assert one(client, "SELECT detect_s, act_s, recover_s FROM incidents") == (3.0, 2.0, 9.0)
    assert one(client, "SELECT hex(payload) FROM dead_letters") == "FF00"
    assert one(client, "SELECT attributes['exit_code'] FROM log_events") == "9"


def test_absent_values_do_not_spoil_means(bus: MemoryBus, client: Any) -> None:
    publish(bus, ticks(0, 10))
    settle(writer_of(bus, client))
    assert one(client, "SELECT avg(cpu_busy_ratio), countIf(cpu_busy_ratio IS NULL), count() FROM host_ticks") == (
        0.5,
        4,
        20,
    )
    assert one(client, "SELECT sum(samples), sum(cpu_busy_ratio_count), max(cpu_busy_ratio_max) FROM host_1m") == (
        20,
        16,
        0.5,
    )
    assert one(client, "SELECT sum(samples), max(load1), min(cpu_busy_ratio) FROM host_minutes") == (20, 1.0, 0.5)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("table", [JOURNAL, "host_ticks", "log_events", "process_ticks", "steps"])
def test_killed_around_any_insert(bus: MemoryBus, client: Any, table: str, before: bool) -> None:
    publish(bus, [*ticks(0, 5), ("tw.logs", b"b", log(0)), ("tw.steps", b"job", steps(0, 10))])
    with pytest.raises(Killed):
        settle(writer_of(bus, Mortal(client, table, before)))
    # more arrives before the successor starts: without the journal it would cut other batches
    publish(bus, [*ticks(5, 5), ("tw.events", b"b", log(1, "xid:79")), ("tw.steps", b"job", steps(10, 10))])
    settle(writer_of(bus, client))
    assert one(client, "SELECT count(), uniqExact(node, seq) FROM host_ticks") == (20, 20)
    assert one(client, "SELECT count(), countIf(code = 'xid:79') FROM log_events") == (2, 1)
    assert one(client, "SELECT count(), uniqExact(step) FROM steps") == (20, 20)
    assert one(client, "SELECT sum(samples) FROM host_1m") == 20
    assert one(client, "SELECT sum(samples) FROM nic_1m") == 40
    assert one(client, "SELECT sum(steps), sum(samples) FROM steps_1m") == (20, 640)


def test_killed_between_insert_and_commit(bus: MemoryBus, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(bus, ticks(0, 5))
    first = writer_of(bus, client)
    monkeypatch.setattr(first._subscriber, "commit", _die)
    with pytest.raises(Killed):
        settle(first)
    publish(bus, ticks(5, 5))
    settle(writer_of(bus, client))
    assert one(client, "SELECT count(), uniqExact(node, seq) FROM host_ticks") == (20, 20)
    assert one(client, "SELECT sum(samples) FROM host_1m") == 20


def _die() -> None:
    raise Killed


def test_positions_lost_by_the_broker_double_nothing(bus: MemoryBus, client: Any) -> None:
    publish(bus, ticks(0, 5))
    settle(writer_of(bus, client))
    bus._committed.clear()  # the group is forgotten, the topics are not
    publish(bus, ticks(5, 5))
    settle(writer_of(bus, client))
    assert one(client, "SELECT count(), uniqExact(node, seq) FROM host_ticks") == (20, 20)


def test_a_broker_that_began_anew_is_read_anew(client: Any) -> None:
    for first in (0, 5):
        bus = MemoryBus()
        publish(bus, [*known_catalogs(), *ticks(first, 5)])
        settle(writer_of(bus, client))
    assert one(client, "SELECT count(), uniqExact(node, seq) FROM host_ticks") == (20, 20)


def test_a_broker_that_loses_everything_under_a_running_writer(bus: MemoryBus, client: Any) -> None:
    publish(bus, ticks(0, 5))
    settle(writer_of(bus, client))
    bus._committed.clear()
    writer = writer_of(bus, client)  # finds in the journal that offsets 0 to 4 are stored
    settle(writer)
    bus._logs.clear()
    reset = dict.fromkeys(writer._subscriber.positions(), 0)
    writer._subscriber.seek_to(reset)
    publish(bus, [*known_catalogs(), *ticks(5, 5)])
    settle(writer)
    assert one(client, "SELECT count(), uniqExact(node, seq) FROM host_ticks") == (20, 20)


def test_a_writer_that_slept_through_its_eviction_adds_nothing(bus: MemoryBus, client: Any) -> None:
    publish(bus, ticks(0, 5))
    sleeper = writer_of(bus, client, BatchLimits(age_ms=3_600_000))
    sleeper.cycle()
    successor = writer_of(bus, client)
    publish(bus, ticks(5, 2))
    settle(successor)
    sleeper.drain()
    settle(sleeper)
    assert one(client, "SELECT count(), uniqExact(node, seq) FROM host_ticks") == (14, 14)
    assert one(client, "SELECT sum(samples) FROM host_1m") == 14
    publish(bus, ticks(7, 1))
    settle(sleeper)
    assert one(client, "SELECT count(), uniqExact(node, seq) FROM host_ticks") == (16, 16)


def test_a_flood_of_log_lines_closes_a_batch_by_their_number(bus: MemoryBus, client: Any) -> None:
    writer = writer_of(bus, client, BatchLimits(age_ms=3_600_000, messages=10))
    publish(bus, [("tw.logs", b"b", log(second)) for second in range(12)])
    for _ in range(3):
        writer.cycle()
    assert one(client, "SELECT count() FROM log_events") == 12
    publish(bus, [("tw.logs", b"b", log(12))])
    for _ in range(3):
        writer.cycle()
    assert one(client, "SELECT count() FROM log_events") == 12, "one more does not close the next"


def test_what_nobody_can_read_is_a_dead_letter_and_the_rest_goes_on(bus: MemoryBus, client: Any) -> None:
    wrong_rank = msgspec.structs.replace(steps(5, 1), rank=2**40)
    wrong_time = msgspec.structs.replace(log(3), observed_at_ns=7)
    unknown = msgspec.structs.replace(
        tick(9), blocks=(msgspec.structs.replace(tick(9).blocks[0], catalog_id="nowhere"),)
    )
    publish(bus, [*ticks(0, 1), ("tw.steps", b"job", wrong_rank), ("tw.steps", b"job", steps(0, 2)), ("tw.logs", b"b", wrong_time),
                  ("tw.logs", b"b", log(4)), ("tw.ticks", b"b", unknown)])  # fmt: skip
    for poison in (b"", b"\xc1\xff", b"\x93\xa4tick", encode(tick(2))[:-7], b"[1,2,3]" * 1000):
        bus.append("tw.ticks", node_block("n0"), poison)
    metrics = Metrics("store")
    settle(writer_of(bus, client, metrics=metrics), cycles=4)
    assert one(client, "SELECT count() FROM host_ticks") == 2
    assert one(client, "SELECT count() FROM steps") == 2
    assert one(client, "SELECT count() FROM log_events") == 1
    reasons = "".join(row[0] for row in client.query("SELECT reason FROM dead_letters").result_rows)
    assert one(client, "SELECT count() FROM dead_letters") == 8
    for part in ("not a record", "nowhere", "does not fit", "set that node's clock"):
        assert part in reasons
    assert metrics.value("tw_dead_letters_total", topic="tw.ticks") == 6


def test_a_catalogue_may_come_after_its_ticks(client: Any) -> None:
    bus = MemoryBus()
    publish(bus, ticks(0, 2))
    writer = writer_of(bus, client, BatchLimits(age_ms=3_600_000))
    writer.cycle()
    publish(bus, known_catalogs())
    settle(writer)
    assert one(client, "SELECT count() FROM host_ticks") == 4
    assert one(client, "SELECT count() FROM dead_letters") == 0


def test_repeats_of_opinions_are_one_row(bus: MemoryBus, client: Any) -> None:
    again = [("tw.verdicts", b"c", verdict()), ("tw.incidents", b"i0", incident(1, IncidentStatus.OPEN))]
    writer = writer_of(bus, client)
    for _ in range(3):
        publish(bus, again)
        settle(writer)
    publish(bus, [("tw.incidents", b"i0", incident(3, IncidentStatus.CLOSED)), ("tw.incidents", b"i0", incident(2, IncidentStatus.ACTING)),
                  ("tw.incidents", b"i1", incident(1, IncidentStatus.OPEN, "i1"))])  # fmt: skip
    settle(writer)
    assert one(client, "SELECT count() FROM verdicts") == 1
    rows = client.query("SELECT incident_id, status, revision FROM incidents ORDER BY incident_id").result_rows
    assert rows == [("i0", "closed", 3), ("i1", "open", 1)]


def test_a_large_batch_is_recognised_too(bus: MemoryBus, client: Any) -> None:
    publish(bus, [("tw.steps", b"job", steps(first, 2000)) for first in range(0, 60_000, 2000)])
    with pytest.raises(Killed):
        settle(writer_of(bus, Mortal(client, "steps")))
    settle(writer_of(bus, client), cycles=10)
    assert one(client, "SELECT count(), uniqExact(step) FROM steps") == (60_000, 60_000)
    assert one(client, "SELECT sum(steps) FROM steps_1m") == 60_000


@pytest.fixture
def mortal_store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store that this test alone may stop."""
    with StoreProcess(tmp_path_factory.mktemp("mortal")) as process:
        yield process


def test_the_store_goes_away_and_comes_back(
    bus: MemoryBus, mortal_store: StoreProcess, migrated: Callable[[str], Any]
) -> None:
    client = migrated(mortal_store.url("tw"))
    metrics = Metrics("store")
    writer = writer_of(bus, client, metrics=metrics)
    publish(bus, ticks(0, 3))
    settle(writer)
    mortal_store.stop()
    publish(bus, ticks(3, 3))
    for _ in range(3):
        assert writer.cycle() == 0
    assert metrics.value("tw_store_batches_total", outcome="store_failed") == 3
    mortal_store.start()
    publish(bus, ticks(6, 3))
    settle(writer, cycles=6)
    again = connect(mortal_store.url("tw"))
    assert one(again, "SELECT count(), uniqExact(node, seq) FROM host_ticks") == (18, 18)
    assert one(again, "SELECT sum(samples) FROM host_1m") == 18
    again.close()


class Slow:
    """A client whose inserts take their time."""

    def __init__(self, client: Any, clock: SimulatedClock, takes_s: float) -> None:
        self._client = client
        self._clock = clock
        self.takes_s = takes_s

    def insert_arrow(self, table: str, rows: Any, **settings: Any) -> None:
        """Insert."""
        self._clock.sleep(self.takes_s if table == "log_events" else 0.0)
        self._client.insert_arrow(table, rows, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@pytest.mark.parametrize(("takes_s", "waits_s"), [(0.01, 0.5), (0.15, 3.0), (9.0, 10.0)])
def test_batches_grow_where_inserting_takes_long(client: Any, takes_s: float, waits_s: float) -> None:
    bus, clock = MemoryBus(), SimulatedClock(START_NS)
    writer = StoreWriter(bus, Slow(client, clock, takes_s), clock, Metrics("store"), "c", BatchLimits(age_ms=500))
    publish(bus, [("tw.logs", b"b", log(0))])
    written = [writer.cycle()]
    clock.sleep(0.5)
    assert [*written, writer.cycle()] == [0, 1], "nothing is known yet of how long it takes"
    publish(bus, [("tw.logs", b"b", log(1))])
    opened_ns, written = clock.monotonic_ns(), [writer.cycle()]
    while not written[-1] and clock.monotonic_ns() < opened_ns + 20 * NS_PER_S:
        clock.sleep(0.05)
        before_ns = clock.monotonic_ns()
        written.append(writer.cycle())
    assert (before_ns - opened_ns) / NS_PER_S == pytest.approx(
        waits_s, abs=0.25
    )  # a cycle that reads nothing rests for 0.1 s
