"""Snapshots of large clusters: packed otherwise, in many pieces, and never trusted blindly."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from streams import state
from streams.matrices import pack, unpack
from trainwarden.records import StateSnapshot

LARGE = random.Random(1).randbytes(3 * state.PIECE_BYTES) + bytes(state.LARGE_BYTES)


def written(payload: bytes | tuple[bytes, ...], turn: int = 1, seq: int = 7, boot_id: str = "b") -> list[StateSnapshot]:
    return state.pieces("detect", payload, {"tw.ticks/0": 5}, turn=turn, seq=seq, at_ns=seq * 10, cluster="c", boot_id=boot_id,
                        code_version="v")  # fmt: skip


@pytest.mark.parametrize("payload", [b"small", LARGE], ids=["small", "large"])
def test_what_was_written_is_read_back_in_whatever_order_it_comes(payload: bytes) -> None:
    pieces = written(payload)
    random.Random(2).shuffle(pieces)
    found = state.newest("detect", pieces)
    assert found == state.Resume(7, payload, {"tw.ticks/0": 5}, "v", 70)


@pytest.mark.parametrize("size", [10, len(LARGE)])
def test_a_state_in_parts_is_read_back_as_one(size: int) -> None:
    parts = (b"a" * 3, LARGE[:size], b"", LARGE[size:][:7], b"z")
    found = state.newest("detect", written(parts))
    assert found is not None
    assert found.payload == b"".join(parts)


def test_a_small_state_stays_readable_to_builds_that_know_three_fields() -> None:
    assert [len(unpack(piece.payload)) for piece in written(b"small")] == [3]
    assert {len(unpack(piece.payload)) for piece in written(LARGE)} == {4}


def test_a_torn_large_snapshot_leaves_the_one_before_it() -> None:
    before, torn = written(LARGE, turn=1, seq=7), written(LARGE, turn=2, seq=8)
    found = state.newest("detect", [*before, *torn[:-1]])
    assert found is not None
    assert found.seq == 7


@pytest.mark.parametrize("size", [len(LARGE) + 1, len(LARGE) - 1, -1, 1 << 60, "many"])
def test_a_size_that_is_not_true_is_passed_over_and_takes_no_memory(size: object) -> None:
    lying = [
        changed(piece, payload=pack([*unpack(piece.payload)[:3], size])) for piece in written(LARGE, turn=2, seq=8)
    ]
    found = state.newest("detect", [*written(b"before"), *lying])
    assert found is not None
    assert replace(found, code_version="") == state.Resume(7, b"before", {"tw.ticks/0": 5}, "", 70)
