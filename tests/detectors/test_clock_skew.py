"""Clock skew: the node that is off is named, its peers are not, and a measure that is off everywhere names nobody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from detectors.base import AlignedTick, FamilyMatrix, Frame
from detectors.contract import run
from detectors.synthetic import SyntheticCluster, node_entity
from detectors.telemetry.clock_skew import METRIC, ClockSkewDetector
from trainwarden.records import Verdict


def frames(offsets_ms: list[list[float]]) -> list[Frame]:
    """One tick a second; offsets of nodes 0, 1, ... in each."""
    made = []
    plain = [frame for frame in SyntheticCluster(len(offsets_ms[0])).frames(len(offsets_ms)) if frame.ticks]
    for frame, offsets in zip(plain, offsets_ms, strict=True):
        made.append(replace(frame, ticks=(_tick(frame.ticks[0], offsets),), steps=()))
    return made


def _tick(tick: AlignedTick, offsets: list[float]) -> AlignedTick:
    names = tuple((node, "host") for node in tick.nodes)
    values = np.array([[offset] for offset in offsets], dtype=np.float32)
    return replace(tick, families={"host": FamilyMatrix("host", names, (METRIC,), values)})


def said(offsets_ms: list[list[float]]) -> list[Verdict]:
    return run(ClockSkewDetector(), frames(offsets_ms))


def test_the_node_that_is_off_is_named_once_and_cleared_when_it_is_right_again() -> None:
    verdicts = said([[0.1, -350.0, 0.2, 0.0]] * 20 + [[0.1, 3.0, 0.2, 0.0]] * 15)
    assert [(v.entity, v.clears) for v in verdicts] == [(node_entity(1), False), (node_entity(1), True)]
    assert "350 ms behind" in verdicts[0].text
    assert verdicts[0].onset_at_ns == frames([[0.0] * 4])[0].ticks[0].at_ns


def test_a_short_excursion_says_nothing() -> None:
    assert not said([[0.1, 900.0, 0.2, 0.0]] * 9 + [[0.1, 1.0, 0.2, 0.0]] * 20)


def test_when_most_are_off_nobody_is_named() -> None:
    assert not said([[400.0, 400.0, 400.0, 0.0]] * 30)


def test_unknown_offsets_neither_count_nor_clear() -> None:
    nan = float("nan")
    verdicts = said([[0.0, 300.0, 0.0, 0.0]] * 6 + [[0.0, nan, 0.0, 0.0]] * 50 + [[0.0, 300.0, 0.0, 0.0]] * 4)
    assert [v.clears for v in verdicts] == [False]


def test_healthy_clocks_leave_no_state() -> None:
    detector = ClockSkewDetector()
    run(detector, frames([[0.1, 0.2, -0.4, 5.0]] * 50))
    assert len(detector.snapshot()) < 64
