"""Agreement on a save between ranks: the newest that anyone holds, and nobody's own copy is spoilt on the way."""

from __future__ import annotations

import multiprocessing
import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainwarden_hook.offers import Holdings, Offer
from trainwarden_hook.packing import Header, Plan
from trainwarden_hook.restore import agree
from trainwarden_hook.sums import checksum

from trainwarden.embedded.ports import free_port

pytestmark = pytest.mark.torch


def candidate(step: int, note: str) -> Holdings:
    """A save whose index differs in length by the note, as those of different ranks do."""
    plan = Plan({"model": {"w": torch.full((1000,), float(step))}, "extra": {"note": note}})
    payload = memoryview(bytearray(plan.payload_bytes))
    plan.write_index(payload)
    plan.write_tensors(payload)
    header = Header(step, 3, 0, 1, len(plan.index), plan.payload_bytes, checksum(payload), 0, 0)
    return Holdings([Offer(header, payload, "memory", f"the memory of step {step}")])


def one_rank(rank: int, port: int, mine: Holdings, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    before = [zlib.crc32(offer.payload) for offer in mine.offers]
    restored = agree(mine)
    intact = [zlib.crc32(offer.payload) for offer in mine.offers] == before
    told = None if restored is None else (restored.step, restored.source, restored.state["extra"]["note"])
    answers.put((rank, told, intact, restored is None or float(restored.state["model"]["w"].mean()) == restored.step))
    dist.destroy_process_group()


def run(candidates: list[Holdings]) -> dict[int, tuple[Any, ...]]:
    port = free_port()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=one_rank, args=(rank, port, mine, answers)) for rank, mine in enumerate(candidates)]
    for process in ranks:
        process.start()
    found = dict((rank, rest) for rank, *rest in (answers.get(timeout=120) for _ in ranks))
    for process in ranks:
        process.join(120)
    return {rank: tuple(found[rank]) for rank in sorted(found)}


def test_a_rank_without_the_save_gets_it_and_those_that_have_it_keep_their_own() -> None:
    assert run([candidate(20, "a"), candidate(20, "b" * 500), Holdings()]) == {
        0: ((20, "memory", "a"), True, True),
        1: ((20, "memory", "b" * 500), True, True),
        2: ((20, "peer", "a"), True, True),
    }


def test_the_newest_save_wins_whoever_holds_it() -> None:
    found = run([candidate(10, "old"), candidate(20, "new"), candidate(15, "mid")])
    assert {rank: told[0] for rank, told in found.items()} == {
        0: (20, "peer", "new"),
        1: (20, "memory", "new"),
        2: (20, "peer", "new"),
    }


def test_no_save_anywhere_is_a_fresh_start() -> None:
    assert {told[0] for told in run([Holdings(), Holdings(), Holdings()]).values()} == {None}
