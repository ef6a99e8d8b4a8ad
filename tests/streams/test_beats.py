"""Nodes whose clock is behind by a part of a second: nobody waits for them, and nobody else is moved."""

from __future__ import annotations

import pytest

from detectors.base import Frame
from streams.align import Aligner, AlignSettings
from streams.beats import EPOCH_NS, Beats
from tests.streams.synthetic import START_NS, host_catalog, tick
from trainwarden.clock import NS_PER_MS, NS_PER_S

NODES = tuple(f"n{number}" for number in range(12))
CUT_NS = NS_PER_S // 4


def epoch(beats: Beats, late_ms: dict[str, int], from_ns: int, boot: str = "b") -> None:
    """Half a minute in which each node's soonest tick comes so late."""
    beats.settle(from_ns)
    for second in range(30):
        for node in NODES:
            beats.note(node, boot, (late_ms.get(node, 0) + 40 * (second % 5)) * NS_PER_MS)
    beats.settle(from_ns + EPOCH_NS)


def moved(beats: Beats, boot: str = "b") -> set[str]:
    return {node for node in NODES if beats.later(node, boot)}


def test_who_is_always_late_is_moved_on_and_comes_back_only_well_below() -> None:
    beats = Beats(1000)
    for number, (late_ms, expected) in enumerate(((500, 0), (700, 1), (500, 1), (300, 0), (500, 0))):
        epoch(beats, {"n3": late_ms}, number * 2 * EPOCH_NS)
        assert moved(beats) == ({"n3"} if expected else set())


def test_what_all_have_in_common_and_what_many_have_moves_nobody() -> None:
    beats = Beats(1000)
    epoch(beats, dict.fromkeys(NODES, 900), 0)
    assert moved(beats) == set()
    epoch(beats, dict.fromkeys(NODES[:5], 900), 2 * EPOCH_NS)
    assert moved(beats) == set()


def test_another_boot_and_a_single_prompt_tick_are_not_taken_for_late() -> None:
    beats = Beats(1000)
    epoch(beats, {"n3": 900}, 0)
    assert moved(beats, "another") == set()
    beats.settle(2 * EPOCH_NS)
    for second in range(30):
        for node in NODES:
            beats.note(node, "b", 0 if node != "n4" or second == 7 else NS_PER_S)
    beats.settle(3 * EPOCH_NS)
    assert moved(beats) == set()


def test_an_epoch_in_which_our_clock_went_back_decides_nothing() -> None:
    beats = Beats(1000)
    beats.settle(10 * EPOCH_NS)
    for _ in range(30):
        beats.note("n3", "b", NS_PER_S)
        beats.note("n4", "b", 0)
        beats.note("n5", "b", 0)
    beats.settle(2 * EPOCH_NS)
    assert moved(beats) == set()


def frames(aligner: Aligner, begin: int, end: int, behind_ms: int) -> list[Frame]:
    """Four cuts a second; n3 dates its ticks so far into the past, and all come 50 ms after the second."""
    found = []
    for cut in range(4 * begin, 4 * end):
        if cut % 4 == 0:
            for node in NODES:
                shift_ns = -behind_ms * NS_PER_MS if node == "n3" else 0
                aligner.add("tw.ticks", 0, cut * 20 + int(node[1:]), tick(node, cut // 4, shift_ns=shift_ns))
        frame = aligner.cut(START_NS + cut * CUT_NS + CUT_NS)
        found += [frame] if frame is not None else []
    return found


def waits_ms(found: list[Frame]) -> list[float]:
    return [(frame.now_ns - one.at_ns) / NS_PER_MS for frame in found for one in frame.ticks]


@pytest.mark.parametrize("behind_ms", [300, 900, 1000, 1400])
def test_nobody_waits_for_a_clock_that_is_behind_once_it_is_known(behind_ms: int) -> None:
    aligner = Aligner(AlignSettings())
    aligner.add("tw.catalog", 0, 0, host_catalog())
    before = frames(aligner, 0, 30, behind_ms)
    assert max(waits_ms(before[8:])) >= 1250
    frames(aligner, 30, 34, behind_ms)
    after = frames(aligner, 34, 60, behind_ms)
    assert set(waits_ms(after)) == {250}
    last = [one for frame in after for one in frame.ticks][-1]
    assert last.present.all()
    assert {*last.families["host"].column("load1")} == {(last.at_ns - START_NS) / NS_PER_S}


def test_a_successor_goes_on_with_the_same_frames() -> None:
    aligner = Aligner(AlignSettings())
    aligner.add("tw.catalog", 0, 0, host_catalog())
    frames(aligner, 0, 20, 500)
    state = aligner.snapshot()
    successor = Aligner(AlignSettings())
    successor.restore(state)
    one, other = (frames(each, 20, 40, 500) for each in (aligner, successor))
    assert [(f.now_ns, [t.at_ns for t in f.ticks]) for f in one] == [
        (f.now_ns, [t.at_ns for t in f.ticks]) for f in other
    ]
    assert aligner.snapshot() == successor.snapshot()
