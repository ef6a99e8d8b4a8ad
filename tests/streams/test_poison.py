"""What nobody should have written to the worker's own topics: it is passed over or refused, and the worker goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from detectors.base import Detector, Frame
from streams import state
from streams.detect import Pipeline
from streams.stage import OWNER, CorrelatorStage, RawStage
from streams.units import REST, units
from trainwarden.bus import Message
from trainwarden.bus.dead import KEPT_BYTES
from trainwarden.clock import SystemClock
from trainwarden.config import Config, from_table
from trainwarden.records import (
    Block,
    Catalog,
    DeadLetter,
    Delivery,
    Placement,
    Record,
    Sheet,
    StateSnapshot,
    StepReport,
    StepRow,
    Summary,
    Tick,
    TopologyEvent,
    Verdict,
    decode,
    encode,
)
from trainwarden.selfmetrics import Metrics


def config() -> Config:
    return from_table({"kafka": {"url": "memory://poison"}})


def message(topic: str, value: bytes) -> Message:
    return Message(topic, 0, 7, b"k", value, 0)


@pytest.mark.parametrize(
    "poison",
    [
        StateSnapshot(owner=f"{OWNER}/0/0", payload=b"\xc1 garbage", observed_at_ns=9 * 10**18),
        StateSnapshot(owner=f"{OWNER}/0/0", payload=b"", observed_at_ns=9 * 10**18),
        StateSnapshot(owner=f"{OWNER}/0/0", payload=encode(Tick()), observed_at_ns=9 * 10**18),
        StateSnapshot(owner=f"{OWNER}/0/x", payload=b"", observed_at_ns=9 * 10**18),
        StateSnapshot(owner=f"{OWNER}/", payload=b""),
        StateSnapshot(owner="", payload=b""),
    ],
)
def test_a_snapshot_that_nobody_can_read_gives_way_to_the_one_before(poison: StateSnapshot) -> None:
    good = state.pieces(
        OWNER, b"state", {"tw.ticks/0": 5}, turn=1, seq=3, at_ns=4, cluster="c", boot_id="b", code_version="1"
    )
    found = state.newest(OWNER, [*good, poison])
    assert found is not None
    assert (found.seq, found.payload) == (3, b"state")


def test_the_state_of_another_build_costs_the_baselines_and_not_the_worker() -> None:
    stage = RawStage(config(), Pipeline(config()), SystemClock(), "b")
    positions = {"tw.ticks/0": 5, "tw.catalog/0": 9, "tw.cuts/0": 2}
    read_from = stage.resume(state.Resume(12, b"\x81\xa7aligner\x01", positions, "older"))
    assert read_from == {"tw.ticks/0": 5}, "catalogues are read anew, or every tick would wait for them"
    assert not stage.catching_up
    assert stage.cut(1).frame is None


@pytest.mark.parametrize(
    ("topic", "record", "reason"),
    [
        ("tw.verdicts", Tick(), "a Tick on tw.verdicts, expected Verdict"),
        ("tw.actions", Catalog(), "a Catalog on tw.actions, expected Plan or ActionResult or Delivery"),
        ("tw.actions", Verdict(), "a Verdict on tw.actions, expected Plan or ActionResult or Delivery"),
    ],
)
def test_a_record_on_the_wrong_topic_is_a_dead_letter(topic: str, record: Record, reason: str) -> None:
    stage = CorrelatorStage(config(), SystemClock())
    stage.take(message(topic, encode(record)))
    (output,) = stage.tick()
    letter = decode(output.value)
    assert isinstance(letter, DeadLetter)
    assert (letter.topic, letter.offset, letter.reason) == (topic, 7, reason)


def test_deliveries_on_the_actions_topic_are_nobodys_business_here() -> None:
    stage = CorrelatorStage(config(), SystemClock())
    stage.take(message("tw.actions", encode(Delivery())))
    assert stage.tick() == []


def rows(step: int = 1, started_at_ns: int = 10**18) -> tuple[StepRow, ...]:
    return (StepRow(step, "train", started_at_ns, 60.0),)


@pytest.mark.parametrize(
    ("report", "fits"),
    [
        (StepReport(job="j", rank=0, world=2, rows=rows()), True),
        (StepReport(job="j", rank=3, world=0, rows=rows()), True),
        (StepReport(job="j", rank=-1, world=2, rows=rows()), False),
        (StepReport(job="j", rank=2, world=2, rows=rows()), False),
        (StepReport(job="j", rank=0, world=2**40, rows=rows()), False),
        (StepReport(job="j", attempt=-1, rank=0, world=2, rows=rows()), False),
        (StepReport(job="j", rank=0, world=2, rows=rows(step=-1)), False),
        (StepReport(job="j", rank=0, world=2, rows=rows(started_at_ns=-5)), False),
    ],
)
def test_steps_that_no_job_can_have_made_are_dead_letters(report: StepReport, fits: bool) -> None:
    stage = RawStage(config(), Pipeline(config()), SystemClock(), "b")
    stage.take([message("tw.steps", encode(report))])
    letters = [decode(o.value) for o in stage.cut(2 * 10**18).outputs if o.topic == "tw.dead"]
    assert [letter.offset for letter in letters] == ([] if fits else [7])


@pytest.mark.parametrize(("rank", "fits"), [(0, True), (2**20 - 1, True), (-1, False), (2**20, False), (10**15, False)])
def test_ranks_that_no_job_can_have_are_placed_nowhere(rank: int, fits: bool) -> None:
    """A detector that follows processes makes room for every rank below: one forged placement would end it."""
    stage = RawStage(config(), Pipeline(config()), SystemClock(), "b")
    stage.take([message("tw.ticks", encode(Tick(node="n", placements=(Placement("j", 1, rank),))))])
    event = TopologyEvent(entity="job:j", origin="hook", attempt=1, ranks=((rank, "n", "gpu0"),))
    stage.take([message("tw.topology", encode(event))])
    refused = [letter.topic for letter in map(decode, (o.value for o in stage.cut(2 * 10**18).outputs if o.topic == "tw.dead"))
               if "no job has such a rank" in letter.reason]  # fmt: skip
    assert sorted(refused) == ([] if fits else ["tw.ticks", "tw.topology"])


WHOLE = Summary(
    block=1, at_ns=10**18, nodes=("a", "b"), present=b"\1\0", boots=("x", ""), heard=bytes(16), succeeds=("", ""),
    sheets=(Sheet("f", ("m", "n"), (), (("a", ("d", "e")),), bytes(16)),),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, ""),
        ({"boots": (), "heard": b"", "succeeds": ()}, ""),
        ({"present": b"\1"}, "has 1 present, expected 2"),
        ({"boots": ("x",)}, "has 1 boots, expected 0 or 2"),
        ({"heard": bytes(15)}, "has 15 heard, expected 16"),
        ({"succeeds": ("x",)}, "has 1 succeeds, expected 0 or 2"),
        ({"nodes": ("a", "a")}, "has 1 different nodes, expected 2"),
        ({"sheets": (Sheet("f", ("m",), (), (("a", ("d",)),), bytes(7)),)}, "has 7 bytes of f, expected 4"),
        ({"sheets": (Sheet("f", (), (), (("a", ("d",)),), b""),)}, "has 0 metrics of f, expected 1"),
        ({"inferred": (TopologyEvent(entity="job:j", ranks=((-1, "n", "g"),)),)}, "no job has such a rank"),
    ],
)
def test_a_summary_whose_pieces_do_not_fit_is_a_dead_letter_and_ends_no_worker(
    changed: dict[str, Any], found: str
) -> None:
    rest = next(unit for unit in units(2) if unit.share == REST)
    stage = RawStage(config(), rest.pipeline(config(), Metrics("t")), SystemClock(), "b", role=rest.role)
    stage.take([message("tw.summaries", encode(replace(WHOLE, **changed)))])
    outputs = [output for second in range(40) for output in stage.cut(10**18 + second * 10**9).outputs]
    reasons = [decode(output.value).reason for output in outputs if output.topic == "tw.dead"]
    assert [found in reason for reason in reasons] == [True] * bool(found)


class Numbers(Detector):
    """Says what it computed with numpy as it is."""

    name = "numbers"
    kinds = ("compute_slow",)

    def update(self, frame: Frame) -> list[Verdict]:
        odd: Any = np.float32(1.5)
        return [Verdict(verdict_id="v", kind="compute_slow", score=odd)]

    def snapshot(self) -> bytes:
        return b""

    def restore(self, payload: bytes) -> None:
        return None


class One:
    """A registry of one detector."""

    def all(self) -> dict[str, type[Detector]]:
        return {"numbers": Numbers}


def test_a_detector_whose_verdict_cannot_be_written_is_switched_off_alone() -> None:
    pipeline = Pipeline(config(), One())  # type: ignore[arg-type]
    stage = RawStage(config(), pipeline, SystemClock(), "b")
    report = StepReport(job="j", rank=0, world=2, rows=rows())
    stage.take([message("tw.steps", encode(report))])
    result = stage.cut(2 * 10**18)
    assert result.frame is not None
    assert result.verdicts == ()
    assert "numbers" in pipeline.disabled


def test_the_dead_letter_of_a_large_record_is_cut() -> None:
    """A letter larger than the broker takes would be sent for ever, and nothing behind it."""
    stage = RawStage(config(), Pipeline(config()), SystemClock(), "b")
    large = Tick(node="n", observed_at_ns=5, blocks=(Block("f", "c", ("d",), b"x" * 900_000),))
    stage.take([message("tw.ticks", encode(large))])
    limit_ns = 10**18
    letters = []
    for second in (0, 100):
        outputs = stage.cut(limit_ns + second * 10**9).outputs
        letters += [decode(o.value) for o in outputs if o.topic == "tw.dead"]
    assert len(letters) == 1
    assert len(letters[0].payload) == KEPT_BYTES
    assert "cut from" in letters[0].reason
