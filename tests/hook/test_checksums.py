"""Checksums of replicas: any flipped bit shows, from the turn of its chunk on, and equal parameters are equal."""

from __future__ import annotations

import json

import pytest
import torch
from trainwarden_hook.checksums import MAX_SLICES, Checksums, plan_chunks
from trainwarden_hook.rows import Row


def parameters(dtype: torch.dtype = torch.float32, seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((40, 7), (7,), (33, 3), (1,))]


def flip(tensor: torch.Tensor, number: int, bit: int) -> None:
    """One bit of one number, as a cosmic ray does it."""
    plain = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    view = tensor.view(-1).view(plain)
    view[number] ^= torch.tensor(1, dtype=plain) << bit


def test_chunks_cover_every_number_once_and_are_small() -> None:
    sizes = [(1000, 4), (3, 2), (5, 8), *[(1, 4)] * 100]
    chunks = plan_chunks(sizes, 64)
    seen = [(n, at) for chunk in chunks for n, start, stop in chunk for at in range(start, stop)]
    assert sorted(seen) == [(n, at) for n, (count, _) in enumerate(sizes) for at in range(count)]
    assert len(seen) == len(set(seen))
    assert all(sum((b - a) * sizes[n][1] for n, a, b in chunk) <= 64 and len(chunk) <= MAX_SLICES for chunk in chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_flipped_bit_anywhere_shows(dtype: torch.dtype) -> None:
    clean = Checksums(parameters(dtype), 1, 1 << 20).take(0)
    assert clean == Checksums(parameters(dtype), 1, 1 << 20).take(0)
    for tensor, number, bit in ((0, 0, 0), (0, 279, 3), (1, 6, 9), (2, 98, 14), (3, 0, 1)):
        other = parameters(dtype)
        flip(other[tensor], number, bit)
        assert Checksums(other, 1, 1 << 20).take(0) != clean


def test_a_difference_shows_from_the_turn_of_its_chunk_on_and_stays() -> None:
    good, bad = parameters(), parameters()
    sums = [Checksums(some, 5, 256) for some in (good, bad)]
    rounds = len(plan_chunks([(p.numel(), 4) for p in good], 256))
    assert rounds > 4

    def differ(step: int) -> bool | None:
        one, other = (checksums.take(step) for checksums in sums)
        return None if one is None else one != other

    early = [differ(step) for step in range(5 * rounds)]
    assert early[:-5] == [None] * (5 * rounds - 5), "nothing is said before every chunk has had a turn"
    assert early[-5] is False
    flip(bad[2], 50, 12)
    later = [differ(step) for step in range(5 * rounds, 15 * rounds, 5)]
    assert later[-1]
    assert later == sorted(later, key=bool), "once it shows it stays"
    flip(bad[2], 50, 12)
    assert [differ(step) for step in range(15 * rounds, 20 * rounds, 5)][-1] is False


def test_what_cannot_be_hashed_stops_nothing() -> None:
    checksums = Checksums([torch.zeros(8)], 1)
    checksums._parameters = [torch.zeros(8).to_sparse()]
    assert [checksums.take(step) for step in range(5)] == [None] * 5
    assert checksums.failures == 3
    assert Checksums([], 1).take(0) is None


def test_the_row_carries_every_digit() -> None:
    row = Row('{"t":"step"', 1, False, 0, 0, 10, 10, 0, 0, 0, 0, [0, 0, 0, 0], 0, 0, checksum=float((1 << 24) - 1))
    assert json.loads(row.body())["param_checksum"] == (1 << 24) - 1
    row.checksum = None
    assert "param_checksum" not in json.loads(row.body())
