"""Codes that come back, and opinions that are taken back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from detectors.base import AlignedTick, Detector, Frame
from detectors.rules.codes import CodeDetector
from detectors.rules.recurring import RecurringCodeDetector, Series
from trainwarden.clock import NS_PER_S
from trainwarden.records import LogEvent, TopologyEvent, Verdict
from trainwarden.topology import Topology

START_NS = 1_700_000_000 * NS_PER_S
HOUR_S = 3600


def place(nodes: int) -> Topology:
    topology = Topology()
    for number in range(nodes):
        topology.apply(TopologyEvent(entity=f"node:n{number}", origin="scheduler", valid_from_ns=START_NS))
    return topology


def event(second: float, node: str, code: str, severity: str = "warning", **more: object) -> LogEvent:
    attributes = {"pci": str(more.pop("pci", ""))}
    return LogEvent(node=node, observed_at_ns=START_NS + int(second * NS_PER_S), code=code, severity=severity, attributes=attributes,
                    **more)  # type: ignore[arg-type]  # fmt: skip


def heard(detector: Detector, events: Iterable[LogEvent], nodes: int = 8, until_s: float = 0.0) -> list[Verdict]:
    topology, said = place(nodes), []
    for one in events:
        said += detector.update(Frame(one.observed_at_ns, (), (), (one,), topology))
    at_ns = START_NS + int(until_s * NS_PER_S)
    tick = AlignedTick(at_ns, 1000, (), np.zeros(0, dtype=np.bool_), {})
    return said + (detector.update(Frame(at_ns, (tick,), (), (), topology)) if until_s else [])


def test_third_loss_of_carrier_within_an_hour_is_news_and_the_second_is_not() -> None:
    lost = [event(second, "n3", "link_down", "error") for second in (0, 900, 1800)]
    assert heard(RecurringCodeDetector(), lost[:2]) == []
    verdicts = heard(RecurringCodeDetector(), lost)
    assert [(v.kind, v.entity.name) for v in verdicts] == [("recurring_code", "n3")]
    assert "link_down 3 times within 1 h" in verdicts[0].text
    assert verdicts[0].onset_at_ns == START_NS


def test_a_burst_is_one_event_and_a_slow_drip_is_none() -> None:
    assert (
        heard(RecurringCodeDetector(), [event(second, "n3", "link_down", "error") for second in range(0, 3000, 20)])
        == []
    )
    assert (
        heard(RecurringCodeDetector(), [event(hour * HOUR_S, "n3", "link_down", "error") for hour in range(20)]) == []
    )


def test_a_program_that_crashes_again_and_again_says_nothing_of_the_node() -> None:
    same = [event(hour * HOUR_S, "n1", "xid:31", job="pretrain") for hour in range(9)]
    assert heard(RecurringCodeDetector(), same) == []
    apart = [event(hour * HOUR_S, "n1", "xid:31", job=f"job{hour}") for hour in range(3)]
    assert [v.entity.name for v in heard(RecurringCodeDetector(), apart)] == ["n1"]


def test_what_every_node_reports_has_a_shared_cause() -> None:
    storm = [
        event(60 * turn + number, f"n{number}", "nfs_not_responding") for turn in range(0, 20, 2) for number in range(8)
    ]
    assert heard(RecurringCodeDetector(), storm) == []
    alone = [event(120 * turn, "n5", "nfs_not_responding") for turn in range(6)]
    assert {v.entity.name for v in heard(RecurringCodeDetector(), alone)} == {"n5"}


def test_corrected_memory_errors_count_by_line_and_by_repeat() -> None:
    assert heard(RecurringCodeDetector(), [event(0, "n2", "edac_corrected", "info", repeat=20)]) == []
    verdicts = heard(
        RecurringCodeDetector(), [event(h * HOUR_S, "n2", "edac_corrected", "info", repeat=6) for h in range(4)]
    )
    assert [v.entity.name for v in verdicts] == ["n2"]


def test_lemon_node_has_many_small_things() -> None:
    small = [("hung_task", 3), ("disk_error", 2), ("pcie_error", 2)]
    events = [event(h * HOUR_S, "n6", code) for code, count in small for h in range(count)]
    events.sort(key=lambda e: e.observed_at_ns)
    assert heard(RecurringCodeDetector(), events) == []
    events.append(event(4 * HOUR_S, "n6", "nvlink_error"))
    verdicts = heard(RecurringCodeDetector(), events)
    assert [v.entity.name for v in verdicts] == ["n6"]
    assert "many small things" in verdicts[0].text


def test_a_node_that_stays_quiet_is_well_again() -> None:
    lost = [event(second, "n3", "link_down", "error") for second in (0, 900, 1800)]
    assert [v.clears for v in heard(RecurringCodeDetector(), lost, until_s=2000)] == [False]
    verdicts = heard(RecurringCodeDetector(), lost, until_s=3 * HOUR_S)
    assert [v.clears for v in verdicts] == [False, True]


def test_memory_of_codes_is_bounded() -> None:
    detector = RecurringCodeDetector()
    heard(detector, [event(number, f"n{number}", "hung_task") for number in range(6000)], nodes=2)
    assert len(detector.snapshot()) < 4096 * 150


def test_a_storm_on_every_node_is_counted_in_one_pass() -> None:
    """1,250 nodes report in one frame: the work is linear, which a count of comparisons shows where a clock could not."""
    detector, topology = RecurringCodeDetector(), place(1250)
    calls = 0
    score = Series.score

    def counted(self: Series, now_ns: int) -> float:
        nonlocal calls
        calls += 1
        return score(self, now_ns)

    Series.score = counted  # type: ignore[method-assign]
    try:
        for turn in range(3):
            events = tuple(
                event(turn * 200 + number / 1000, f"n{number}", "link_down", "error") for number in range(1250)
            )
            assert detector.update(Frame(START_NS, (), (), events, topology)) == []
    finally:
        Series.score = score  # type: ignore[method-assign]
    assert calls <= 3 * 1250 * 8


def test_a_suspect_code_is_taken_back_after_its_quiet_time_and_a_fatal_one_is_not() -> None:
    events = [event(0, "n1", "xid:31", pci="0000:3b:00"), event(1, "n2", "xid:79", "critical")]
    verdicts = heard(CodeDetector(), events, until_s=HOUR_S + 10)
    assert [(v.kind, v.entity.name, v.clears) for v in verdicts] == [
        ("suspect_code", "n1", False), ("fatal_code", "n2", False), ("suspect_code", "n1", True),
    ]  # fmt: skip
    assert len(heard(CodeDetector(), events, until_s=HOUR_S - 10)) == 2


def test_a_code_that_comes_again_stands_longer_under_its_first_onset() -> None:
    verdicts = heard(CodeDetector(), [event(s, "n1", "xid:31") for s in (0, 3000)], until_s=5000)
    assert [v.clears for v in verdicts] == [False, False]
    verdicts = heard(CodeDetector(), [event(s, "n1", "xid:31") for s in (0, 3000)], until_s=7000)
    assert verdicts[-1].clears
    assert verdicts[-1].onset_at_ns == START_NS


def test_the_driver_takes_its_order_back_for_this_device_only() -> None:
    order = event(0, "n1", "xid:154", "critical", pci="0000:3b:00")
    other = event(5, "n1", "xid:154", "info", pci="0000:5e:00")
    same = event(9, "n1", "xid:154", "info", pci="0000:3b:00")
    assert [v.clears for v in heard(CodeDetector(), [order, other])] == [False]
    assert [v.clears for v in heard(CodeDetector(), [order, other, same])] == [False, True]


def test_a_suspect_code_of_many_nodes_at_once_is_told_once_and_a_fatal_one_of_each() -> None:
    def at_once(code: str, severity: str, nodes: int) -> list[Verdict]:
        events = tuple(event(number / 100, f"n{number}", code, severity) for number in range(nodes))
        return CodeDetector().update(Frame(START_NS, (), (), events, place(40)))

    told = at_once("link_down", "error", 32)
    assert [v.entity.name for v in told] == ["n0"]
    assert "so did 31 other nodes" in told[0].text
    assert len(at_once("link_down", "error", 3)) == 3
    assert len(at_once("xid:79", "critical", 32)) == 32
