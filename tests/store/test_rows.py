"""Records as rows: absent is NULL, times that no clock can show are refused, a rank's samples carry its rank."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from streams.store import words
from streams.store.columns import arrow_type, table_of
from streams.store.lean import LeanBlock, LeanTick, decode_lean
from streams.store.rows import rows_of
from streams.store.steps import StepTable, fits
from streams.store.ticks import TickTables, key_order
from streams.store.words import Owners, placement_of
from tests.store.make_records import START_NS, block, catalogs, incident, log, one_of_each, steps, tick
from trainwarden.clock import NS_PER_MS
from trainwarden.errors import DecodeError
from trainwarden.records import (
    Block,
    Catalog,
    IncidentStatus,
    Metric,
    Placement,
    Tick,
    catalog_id_of,
    encode,
    pack_floats,
)

ARRIVED_MS = START_NS // NS_PER_MS + 3_600_000
_LABELS = [("ts", pa.timestamp("ms", "UTC")), ("cluster", pa.string()), ("job", pa.string()), ("attempt", pa.uint32()),
           ("rank", pa.int32()), ("node", pa.string()), ("device", pa.string()), ("seq", pa.uint64()), ("boot_id", pa.string()),
           ("spooled", pa.bool_()), ("arrived_at", pa.timestamp("ms", "UTC"))]  # fmt: skip
SCHEMAS = {
    "host_ticks": pa.schema(
        [*_LABELS, ("cpu_busy_ratio", pa.float32()), ("load1", pa.float32()), ("not_reported", pa.float32())]
    ),
    "other_ticks": pa.schema([*_LABELS, ("family", pa.string()), ("metric", pa.string()), ("value", pa.float32())]),
    "gaps": pa.schema([*_LABELS, ("source", pa.string()), ("reason", pa.string())]),
}
_REALS = ("duration_ms", "local_ms", "data_ms", "forward_ms", "backward_ms", "wait_ms", "optimizer_ms", "checkpoint_ms", "cpu_ms", "loss",
          "grad_norm_local", "grad_norm", "param_checksum")  # fmt: skip
STEPS = pa.schema([("ts", pa.timestamp("us", "UTC")), *((name, pa.string()) for name in ("cluster", "job", "node", "phase", "boot_id")),
                   ("attempt", pa.uint32()), ("rank", pa.int32()), ("world", pa.uint32()), ("step", pa.uint64()),
                   *((name, pa.float32()) for name in _REALS), ("handed_over_at", pa.timestamp("us", "UTC")), ("samples", pa.uint32()),
                   ("finite", pa.bool_()), ("seq", pa.uint64()), ("arrived_at", pa.timestamp("ms", "UTC"))])  # fmt: skip


def lean(tick: Tick) -> Any:
    """The tick as the store reads it."""
    raw = [msgspec.Raw(msgspec.msgpack.encode(block.devices)) for block in tick.blocks]
    blocks = (LeanBlock(b.family, b.catalog_id, r, b.values) for b, r in zip(tick.blocks, raw, strict=True))
    fields = msgspec.structs.asdict(tick) | {"blocks": tuple(blocks)}
    return LeanTick(**fields | {"placements": msgspec.Raw(msgspec.msgpack.encode(tick.placements))})


def tick_tables(*ticks: Any) -> dict[str, Any]:
    known = {catalog.catalog_id: catalog for catalog in catalogs()}
    tables = TickTables(SCHEMAS, known.get)
    for one in ticks:
        tables.add(lean(one), ARRIVED_MS)
    return tables.tables()


def test_absent_is_null_and_never_zero() -> None:
    rows = tick_tables(tick(3), tick(4))["host_ticks"].to_pylist()
    assert [row["cpu_busy_ratio"] for row in rows] == [0.5, None]
    assert "not_reported" not in rows[0], "the store's own default, NULL, is cheaper"


def test_metrics_without_a_column_are_kept_by_name() -> None:
    rows = tick_tables(tick(1))["other_ticks"].to_pylist()
    kept = {(row["family"], row["metric"], row["device"]): row["value"] for row in rows}
    assert kept[("host", "brand_new_metric", "host")] == 7.0
    assert kept[("gpu", "power_w", "gpu0")] == 300.0
    assert ("host", "load1", "host") not in kept
    assert ("nic", "tx_bytes_per_s", "eth1") in kept
    assert ("nic", "rx_bytes_per_s", "eth1") not in kept, "it was not reported"
    assert not any(math.isnan(value) for value in kept.values())


def test_failed_sources_are_rows() -> None:
    assert [(row["source"], row["reason"]) for row in tick_tables(tick(0), tick(1))["gaps"].to_pylist()] == [
        ("rdma", "absent")
    ]


@pytest.mark.parametrize(
    ("device", "placements", "expected"),
    [
        ("rank3", (Placement("a", 1, 2), Placement("a", 1, 3)), ("a", 1, 3)),
        ("gpu1", (Placement("a", 1, 2, "gpu0"), Placement("b", 4, 0, "gpu1")), ("b", 4, 0)),
        ("host", (Placement("a", 1, 2), Placement("a", 1, 3)), ("a", 1, -1)),
        ("host", (Placement("a", 1, 2),), ("a", 1, 2)),
        ("host", (Placement("a", 1, 2), Placement("b", 1, 0)), ("", 0, -1)),
        ("host", (), ("", 0, -1)),
    ],
)
def test_whose_samples(device: str, placements: tuple[Placement, ...], expected: tuple[str, int, int]) -> None:
    assert placement_of(placements, device) == expected


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Block("host", "nowhere", ("host",), b"\0" * 16), "nowhere"),
        (Block("host", block("host", ["host"], [0.0] * 4).catalog_id, ("host",), b"\0" * 12), "3 columns"),
        (Block("host", block("host", ["host"], [0.0] * 4).catalog_id, ("host",), b"\0" * 13), "13 bytes"),
        (Block("host", block("host", ["host"], [0.0] * 4).catalog_id, (), b""), "0 devices"),
    ],
)
def test_a_tick_is_taken_whole_or_not_at_all(broken: Block, message: str) -> None:
    good = tick(1)
    tables = TickTables(SCHEMAS, {catalog.catalog_id: catalog for catalog in catalogs()}.get)
    with pytest.raises(DecodeError, match=message):
        tables.add(lean(msgspec.structs.replace(good, blocks=(*good.blocks, broken))), ARRIVED_MS)
    assert tables.tables() == {}


@pytest.mark.parametrize("at_ns", [0, -5, 1, START_NS + 40 * 24 * 3600 * 10**9, 2**63])
def test_times_no_clock_can_show_are_refused(at_ns: int) -> None:
    with pytest.raises(DecodeError, match="set that node's clock"):
        list(rows_of(msgspec.structs.replace(log(1), observed_at_ns=at_ns), ARRIVED_MS))
    with pytest.raises(DecodeError, match="set that node's clock"):
        tick_tables(msgspec.structs.replace(tick(1), observed_at_ns=at_ns))


def test_local_time_ends_when_the_last_bucket_is_handed_over() -> None:
    report = steps(7, 1)
    ((_, row),) = rows_of(report, ARRIVED_MS)
    assert (row["step"], row["local_ms"], row["checkpoint_ms"]) == (7, 20.0, None)
    silent = msgspec.structs.replace(report, rows=(msgspec.structs.replace(report.rows[0], arrived_at_ns=0),))
    ((_, row),) = rows_of(silent, ARRIVED_MS)
    assert (row["local_ms"], row["handed_over_at"]) == (None, None)


def test_the_culprit_reads_like_a_name() -> None:
    ((_, row),) = rows_of(incident(1, IncidentStatus.OPEN), ARRIVED_MS)
    assert (row["culprit"], row["culprit_node"], row["status"]) == ("node:n2", "n2", "open")
    assert row["decided_at"] is None


def test_every_kept_kind_gives_rows() -> None:
    empty = [type(record).__name__ for _, _, record in one_of_each() if not list(rows_of(record, ARRIVED_MS))]
    assert empty == ["Tick"], "ticks go through TickTables, everything else through rows_of"


@pytest.mark.parametrize(
    ("store_type", "expected"),
    [
        ("LowCardinality(String)", pa.string()),
        ("Nullable(DateTime64(6, 'UTC'))", pa.timestamp("us", "UTC")),
        ("Map(LowCardinality(String), String)", pa.map_(pa.string(), pa.string())),
        ("Array(Array(Int32))", pa.list_(pa.list_(pa.int32()))),
        ("SimpleAggregateFunction(min, Nullable(Float32))", pa.float32()),
        ("DateTime('UTC')", pa.timestamp("s", "UTC")),
    ],
)
def test_types(store_type: str, expected: Any) -> None:
    assert arrow_type(store_type) == expected


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(ValueError, match="IPv6"):
        arrow_type("IPv6")


def test_a_value_that_does_not_fit_raises() -> None:
    with pytest.raises(pa.ArrowException):
        table_of(pa.schema([("rank", pa.int32())]), [{"rank": 2**40}])


@pytest.mark.parametrize(
    "changes",
    [
        {"placements": (Placement("j", -5, 0),)},
        {"placements": (Placement("j", 0, 2**40),)},
        {"seq": -1},
    ],
)
def test_a_tick_with_a_number_that_no_column_holds_is_refused_alone(changes: dict[str, Any]) -> None:
    known = {catalog.catalog_id: catalog for catalog in catalogs()}
    tables = TickTables(SCHEMAS, known.get)
    tables.add(lean(tick(3)), ARRIVED_MS)
    with pytest.raises(DecodeError):
        tables.add(lean(msgspec.structs.replace(tick(4), **changes)), ARRIVED_MS)
    assert len(tables.tables()["host_ticks"]) == 1


def test_nodes_with_different_columns_share_a_table() -> None:
    old, new = ((Metric("load1", "1"),), (Metric("cpu_busy_ratio", "ratio"), Metric("load1", "1"), Metric("odd", "1")))
    known = {
        catalog_id_of("host", metrics): Catalog(
            catalog_id=catalog_id_of("host", metrics), family="host", metrics=metrics
        )
        for metrics in (old, new)
    }
    tables, (first, second) = TickTables(SCHEMAS, known.get), known
    for node, catalog_id, values in (("a", first, (1.0,)), ("b", second, (0.5, 2.0, 9.0)), ("c", first, (3.0,))):
        told = Block("host", catalog_id, ("host",), pack_floats(values))
        tables.add(lean(Tick(node=node, observed_at_ns=START_NS, blocks=(told,))), ARRIVED_MS)
    rows = tables.tables()["host_ticks"].to_pylist()
    assert [(row["node"], row["load1"], row["cpu_busy_ratio"]) for row in rows] == [
        ("a", 1.0, None), ("b", 2.0, 0.5), ("c", 3.0, None),
    ]  # fmt: skip
    (other,) = tables.tables()["other_ticks"].to_pylist()
    assert (other["node"], other["metric"], other["value"]) == ("b", "odd", 9.0)


def test_whose_device_it_is_follows_the_newest_placement() -> None:
    owners, before, after = Owners(), (Placement("a", 0, 0, "gpu0"),), (Placement("b", 1, 4, "gpu0"),)

    def whose(placements: tuple[Placement, ...], device: str) -> tuple[str, int, int]:
        node = owners.of("n", msgspec.msgpack.encode(placements))
        ((_, job, attempt, rank),) = node.layout(msgspec.msgpack.encode([device])).owned.tolist()
        return owners.words.ranked(np.array([job])).words[0], attempt, rank

    assert whose(before, "gpu0") == whose(before, "gpu0") == ("a", 0, 0)
    assert whose(after, "gpu0") == ("b", 1, 4)
    for number in range(1000):
        whose(after, f"gpu{number}")
    assert whose(before, "gpu0") == ("a", 0, 0)


def test_names_that_nobody_says_twice_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "KEPT_WORDS", 50)
    known, owners = {catalog.catalog_id: catalog for catalog in catalogs()}, Owners()
    for batch in range(5):
        tables = TickTables(SCHEMAS, known.get, owners)
        for number in range(40):
            tables.add(lean(tick(1, f"n{batch}-{number}")), ARRIVED_MS)
        rows = tables.tables()["host_ticks"].to_pylist()
        assert {row["node"] for row in rows} == {f"n{batch}-{number}" for number in range(40)}
        assert {row["device"] for row in rows} == {"host"}
    assert len(owners.words) < 100


def test_rows_leave_in_the_order_of_the_key() -> None:
    said = [(seq, node) for seq in range(130) for node in ("n2", "n10", "n1")]
    random.Random(1).shuffle(said)
    rows = tick_tables(*(tick(seq, node) for seq, node in said))["host_ticks"].to_pylist()
    keys = [(r["job"], r["ts"].replace(second=0, microsecond=0), r["node"], r["device"], r["ts"]) for r in rows]
    assert keys == sorted(keys)
    assert sorted((r["seq"], r["node"]) for r in rows) == sorted(said), "each row keeps its own labels"
    assert all((r["load1"] is None) == (r["load1"] != 1.0) for r in rows)


@pytest.mark.parametrize("far_ms", [0, 2**55])
def test_the_key_orders_also_what_no_number_holds(far_ms: int) -> None:
    draw = np.random.default_rng(3)
    job, node, device = (draw.integers(0, count, 500) for count in (3, 2000, 700))
    ts = draw.integers(1_700_000_000_000, 1_700_000_300_000, 500)
    ts[0] += far_ms
    columns = list(zip(job, ts // 60_000, node, device, ts, strict=True))
    assert [columns[row] for row in key_order(job, ts, node, device)] == sorted(columns)


def test_steps_by_column_are_the_steps_by_row() -> None:
    names = [*next(rows_of(steps(0, 1), ARRIVED_MS))[1]]
    reports = [steps(7, 3, rank) for rank in (2, 0, 1)]
    silent = msgspec.structs.replace(
        reports[0], rows=(msgspec.structs.replace(reports[0].rows[0], arrived_at_ns=0, loss=1e300, wait_ms=math.nan),)
    )
    table = StepTable(STEPS, Owners())
    for report in (*reports, silent, msgspec.structs.replace(reports[0], rows=())):
        table.add(report, ARRIVED_MS)
    by_row = table_of(STEPS, [row for report in (*reports, silent) for _, row in rows_of(report, ARRIVED_MS)])
    found = table.table()
    assert found is not None
    assert set(names) == set(found.schema.names)
    key = ("job", "attempt", "step", "rank", "ts")
    expected = sorted(by_row.to_pylist(), key=lambda row: tuple(row[name] for name in key))
    assert found.to_pylist() == expected
    with pytest.raises(DecodeError, match="set that node's clock"):
        table.add(steps(0, 1), 0)


@pytest.mark.parametrize("odd", [{"rank": 2**40}, {"attempt": -1}, {"world": 2**32}, {"seq": -1}])
def test_a_step_without_room_is_told_apart(odd: dict[str, int]) -> None:
    report = steps(0, 2)
    assert fits(report)
    assert not fits(msgspec.structs.replace(report, **odd))
    assert not fits(msgspec.structs.replace(report, rows=(msgspec.structs.replace(report.rows[0], samples=2**32),)))


def test_what_the_store_reads_is_what_was_sent() -> None:
    for _, _, record in one_of_each():
        read = decode_lean(encode(record))
        if isinstance(record, Tick):
            assert read == lean(record)
        elif not isinstance(record, bytes):
            assert encode(read) == encode(record)


@pytest.mark.parametrize("place", ["devices", "placements"])
def test_bytes_that_nobody_can_read_are_refused_where_they_are_looked_at(place: str) -> None:
    raw = msgspec.Raw(msgspec.msgpack.encode([3]))
    good = lean(tick(1))
    if place == "devices":
        broken = msgspec.structs.replace(good, blocks=(msgspec.structs.replace(good.blocks[0], devices=raw),))
    else:
        broken = msgspec.structs.replace(good, placements=raw)
    tables = TickTables(SCHEMAS, {catalog.catalog_id: catalog for catalog in catalogs()}.get)
    with pytest.raises(DecodeError, match="not a record"):
        tables.add(decode_lean(msgspec.msgpack.encode(broken)), ARRIVED_MS)
    assert tables.tables() == {}
