"""Wire form: golden bytes, evolution in both directions, refusal of what is no record."""

from __future__ import annotations

import contextlib
import json
import string
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.samples import SAMPLES
from trainwarden import records
from trainwarden.errors import DecodeError

GOLDEN: dict[str, str] = json.loads(Path(__file__).with_name("golden_v1.json").read_text())
KINDS: list[type[records.Record]] = list(get_args(records.AnyRecord))


def same(left: records.Record, right: records.Record) -> bool:
    """Equality by wire form: NaN is no different from NaN."""
    return type(left) is type(right) and records.encode(left) == records.encode(right)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_every_kind_has_its_golden_bytes(sample: records.Record) -> None:
    expected = GOLDEN[type(sample).__name__]
    assert records.encode(sample).hex() == expected
    assert records.encode(records.decode(bytes.fromhex(expected))).hex() == expected


def test_no_kind_is_without_golden_bytes() -> None:
    assert set(GOLDEN) == {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
class TestEveryRecord:
    """What holds for each kind of record."""

    def test_comes_back_as_it_went(self, kind: type[records.Record]) -> None:
        record = kind(cluster="c", node="n", seq=1, observed_at_ns=2, boot_id="b")
        assert same(records.decode(records.encode(record)), record)

    def test_the_header_is_first_on_the_wire(self, kind: type[records.Record]) -> None:
        wire = msgspec.msgpack.decode(records.encode(kind(cluster="c", node="n", seq=1, observed_at_ns=2, boot_id="b")))
        assert wire[1:7] == [records.SCHEMA, "c", "n", 1, 2, "b"]

    def test_a_newer_writer_with_one_more_field_is_read(self, kind: type[records.Record]) -> None:
        wire = msgspec.msgpack.decode(records.encode(kind(node="n")))
        assert same(records.decode(msgspec.msgpack.encode([*wire, "from the future"])), kind(node="n"))

    def test_an_older_writer_with_fewer_fields_is_read(self, kind: type[records.Record]) -> None:
        wire = msgspec.msgpack.decode(records.encode(kind(node="n")))
        assert same(records.decode(msgspec.msgpack.encode(wire[:7])), kind(node="n"))

    def test_another_major_version_is_refused(self, kind: type[records.Record]) -> None:
        wire = msgspec.msgpack.decode(records.encode(kind()))
        with pytest.raises(DecodeError, match="schema 2"):
            records.decode(msgspec.msgpack.encode([wire[0], 2, *wire[2:]]))


def test_an_unknown_tag_is_refused_by_name() -> None:
    with pytest.raises(DecodeError, match="'ghost'"):
        records.decode(msgspec.msgpack.encode(["ghost", 1]))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_record_or_a_decode_error(payload: bytes) -> None:
    with contextlib.suppress(DecodeError):
        assert isinstance(records.decode(payload), records.Record)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40), st.integers(1, 5))
def test_a_block_gives_back_its_rows(values: list[float], devices: int) -> None:
    flat = [v for _ in range(devices) for v in values]
    block = records.Block("gpu", "id", tuple(f"gpu{i}" for i in range(devices)), records.pack_floats(flat))
    assert block.rows() == [(f"gpu{i}", tuple(values)) for i in range(devices)]


@pytest.mark.parametrize(("devices", "size"), [((), 8), (("a", "b"), 12), (("a",), 3)])
def test_a_block_that_does_not_divide_is_refused(devices: tuple[str, ...], size: int) -> None:
    with pytest.raises(DecodeError, match="do not divide"):
        records.Block("gpu", "id", devices, bytes(size)).rows()


@given(st.lists(st.text(alphabet=string.printable), min_size=1, max_size=4))
def test_ids_depend_on_their_parts_only(parts: list[str]) -> None:
    assert records.stable_id(*parts) == records.stable_id(*parts)
    assert records.stable_id(*parts, "more") != records.stable_id(*parts)


def test_decode_as_refuses_another_kind() -> None:
    with pytest.raises(DecodeError, match="a LogEvent where Tick"):
        records.decode_as(records.Tick, records.encode(records.LogEvent()))


@pytest.mark.parametrize(
    "record",
    [
        records.Tick(seq=2**63),
        records.Tick(observed_at_ns=2**64 - 1),
        records.Tick(placements=(records.Placement("j", 2**63, 0),)),
        records.StepReport(rows=(records.StepRow(2**63, "train", 0, 1.0),)),
        records.FrameCut(positions={"tw.ticks/0": 2**63}),
        records.TopologyEvent(ranks=((2**63, "n0", "cpu"),)),
        records.Incident(revision=2**64 - 1),
    ],
)
def test_a_number_beyond_64_signed_bits_is_no_record(record: records.Record) -> None:
    """Arrays, snapshots and the store hold no such number: found out there, it would stop a whole worker."""
    with pytest.raises(DecodeError, match="not a record"):
        records.decode(records.encode(record))
