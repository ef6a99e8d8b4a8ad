"""Device states: the table's tests, how long they stand, and what a rack has as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from detectors.base import FamilyMatrix, Frame
from detectors.rules.states import DeviceStateDetector, StateSettings
from detectors.rules.statetable import below_peers, parse_row, state_rules
from detectors.synthetic import Scene, SyntheticCluster
from trainwarden.records import Verdict

Script = Callable[[int], Scene | None]


def said(script: Script, seconds: int = 90, nodes: int = 4, settings: StateSettings | None = None) -> list[Verdict]:
    detector = DeviceStateDetector(settings)
    return [v for f in SyntheticCluster(nodes, seed=6, gpus=8).frames(seconds, script) for v in detector.update(f)]


def spoken(verdicts: list[Verdict]) -> list[tuple[str, bool]]:
    return [(v.entity.name, v.clears) for v in verdicts]


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("row_remap_failure", 1, "a row remap failed"), ("row_remap_pending", 1, "waits for a reset"),
        ("ecc_uncorrectable_count", 1, "could not be corrected"), ("ecc_correctable_per_s", 4600, "hundreds a second"),
        ("nvlink_inactive_count", 2, "are inactive"), ("nvlink_recoveries_per_s", 1, "trains again"),
        ("pcie_width_lanes", 8, "narrower than it can be"), ("pcie_gen", 1, "lower generation"),
        ("clocks_event_reasons_bits", 64, "hardware limit"), ("clocks_event_reasons_bits", 32, "software limit"),
        ("clocks_event_reasons_bits", 128, "power supply"), ("thermal_violation_ratio", 0.2, "lost to heat"),
    ],
)  # fmt: skip
def test_each_state_is_said_of_the_node_and_names_device_and_remedy(metric: str, value: float, words: str) -> None:
    verdicts = said(lambda now: Scene(gpu={(2, 5, metric): value}) if now >= 20 else None)
    assert {v.entity.name for v in verdicts} == {"n2"}
    assert any(words in v.text and "gpu5" in v.text and "remedy: " in v.text for v in verdicts)
    assert len({(v.onset_at_ns, v.text) for v in verdicts}) == len(verdicts)


def test_health_has_no_state() -> None:
    assert said(lambda _: None, 120) == []


def test_a_link_that_saves_power_while_idle_is_no_fault() -> None:
    assert said(lambda now: Scene(standing=True) if now >= 20 else None) == []


def test_throttle_reasons_of_an_idle_gpu_are_no_fault() -> None:
    idle = Scene(gpu={(1, 0, "clocks_event_reasons_bits"): 64, (1, 0, "busy_ratio"): 0.0})
    assert said(lambda now: idle if now >= 20 else None) == []


def test_a_passing_state_is_not_said() -> None:
    assert said(lambda now: Scene(gpu={(1, 0, "clocks_event_reasons_bits"): 32}) if now % 10 == 0 else None, 200) == []


def test_a_state_that_ends_is_taken_back_and_a_sticky_one_is_not() -> None:
    narrow = Scene(gpu={(1, 0, "pcie_width_lanes"): 8.0})
    assert spoken(said(lambda now: narrow if 20 <= now < 50 else None, 130)) == [("n1", False), ("n1", True)]
    failed = Scene(gpu={(1, 0, "row_remap_failure"): 1.0})
    assert spoken(said(lambda now: failed if 20 <= now < 50 else None, 130)) == [("n1", False)]


def test_an_old_count_is_no_news_and_its_rise_is() -> None:
    old = Scene(gpu={(1, 0, "ecc_uncorrectable_count"): 3.0})
    assert said(lambda _: old) == []
    new = Scene(gpu={(1, 0, "ecc_uncorrectable_count"): 4.0})
    verdicts = said(lambda now: new if now >= 40 else old)
    assert spoken(verdicts) == [("n1", False)]


def test_a_count_that_starts_again_is_a_reset() -> None:
    old, new = (Scene(gpu={(1, 0, "ecc_uncorrectable_count"): value}) for value in (3.0, 0.0))
    assert said(lambda now: old if now < 40 else new) == []


def test_all_devices_of_a_node_are_one_verdict() -> None:
    hot = Scene(gpu={(1, gpu, "clocks_event_reasons_bits"): 64.0 for gpu in range(8)})
    verdicts = said(lambda now: hot if now >= 20 else None)
    assert spoken(verdicts) == [("n1", False)]
    assert "gpu0, gpu1" in verdicts[0].text


def test_a_gpu_that_no_longer_reports_is_missing_and_a_silent_node_is_not() -> None:
    verdicts = said(lambda now: Scene(lost_gpus={(3, 6)}) if now >= 30 else None)
    assert spoken(verdicts) == [("n3", False)]
    assert "1 of 8 GPUs" in verdicts[0].text
    assert said(lambda now: Scene(silent={3}) if now >= 30 else None) == []


def test_heat_of_a_whole_rack_is_the_room_and_said_once() -> None:
    racks = {number: f"r{number // 4}" for number in range(8)}

    def hot(nodes: range) -> Script:
        bits = {(number, 0, "clocks_event_reasons_bits"): 64.0 for number in nodes}
        return lambda now: Scene(gpu=bits if now >= 20 else {}, racks=racks)

    verdicts = said(hot(range(4, 8)), nodes=8)
    assert spoken(verdicts) == [("n4", False)]
    assert "3 others of rack r1" in verdicts[0].text
    assert spoken(said(hot(range(4, 6)), nodes=8)) == [("n4", False), ("n5", False)]


def test_a_port_below_its_peers_is_named_and_mixed_speeds_are_not() -> None:
    def frames(speeds: dict[str, float]) -> list[Frame]:
        made = []
        for frame in SyntheticCluster(8, seed=2).frames(30):
            ticks = []
            for tick in frame.ticks:
                nic = tick.families["nic"]
                speed = np.array([[speeds.get(node, 400_000.0)] for node, _ in nic.entities], dtype=np.float32)
                wide = replace(nic, metrics=(*nic.metrics, "speed_mbps"), values=np.hstack([nic.values, speed]))
                ticks.append(replace(tick, families={**tick.families, "nic": wide}))
            made.append(replace(frame, ticks=tuple(ticks)))
        return made

    detector = DeviceStateDetector()
    verdicts = [v for f in frames({"n5": 200_000.0}) for v in detector.update(f)]
    assert spoken(verdicts) == [("n5", False)]
    detector = DeviceStateDetector()
    assert [v for f in frames({f"n{n}": 200_000.0 for n in range(4)}) for v in detector.update(f)] == []


def test_below_peers_needs_peers() -> None:
    every = np.ones(3, dtype=bool)
    assert not below_peers(np.array([16, 16, 8], dtype=np.float32), 1.0, every).any()
    many = np.array([16, 16, 16, 16, 8, np.nan], dtype=np.float32)
    assert below_peers(many, 1.0, np.ones(6, dtype=bool)).tolist() == [False, False, False, False, True, False]


def test_a_state_can_be_left_out() -> None:
    waits = Scene(gpu={(2, 3, "row_remap_pending"): 1.0})
    assert said(lambda _: waits, settings=StateSettings(left_out="row_remap_pending")) == []


def test_missing_values_are_in_no_state() -> None:
    blind = {
        (2, gpu, metric): float("nan")
        for gpu in range(8)
        for metric in ("pcie_width_lanes", "row_remap_failure", "busy_ratio")
    }
    assert said(lambda now: Scene(gpu=blind) if now >= 20 else None) == []


def test_rows_of_the_table_are_complete_and_wrong_ones_are_named() -> None:
    assert len({rule.state for rule in state_rules()}) == len(state_rules())
    for rule in state_rules():
        assert rule.meaning, rule.state
        assert rule.remedy, rule.state
        assert rule.source, rule.state
    row = dict.fromkeys(("metric", "against", "gate", "shared", "action", "meaning", "remedy", "source"), "")
    row |= {"state": "x", "family": "gpu", "test": "guess", "limit": "1", "hold_s": "1", "clear_s": "1"}
    with pytest.raises(ValueError, match=r"states.csv line 9 \(x\): test is 'guess'"):
        parse_row(row, 9)


def test_a_family_without_the_metric_switches_the_rule_off() -> None:
    matrix = FamilyMatrix("gpu", (("a", "gpu0"),), ("power_w",), np.ones((1, 1), dtype=np.float32))
    for rule in state_rules():
        assert not rule.holds(matrix, np.zeros(1, dtype=np.float32)).any(), rule.state
