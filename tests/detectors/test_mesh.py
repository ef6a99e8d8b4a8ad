"""Links, leaves and fabric: what the probe matrix and the carrier say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from detectors.mesh.blame import explain
from detectors.mesh.links import MeshLinkDetector
from detectors.synthetic import Scene, SyntheticCluster
from trainwarden.clock import NS_PER_S
from trainwarden.records import EntityKind, Verdict
from trainwarden.topology import Topology

Script = Callable[[int], Scene | None]


def said(script: Script, seconds: int = 50, nodes: int = 4) -> list[Verdict]:
    detector = MeshLinkDetector()
    return [v for frame in SyntheticCluster(nodes, seed=4).frames(seconds, script) for v in detector.update(frame)]


def spoken(verdicts: list[Verdict]) -> list[tuple[str, str]]:
    return sorted({(v.kind, v.entity.name) for v in verdicts if not v.clears})


def delay_s(verdicts: list[Verdict], second: int = 30) -> float:
    return verdicts[0].window_end_ns / NS_PER_S - 1_700_000_000 - second


def test_slow_row_and_column_is_that_nodes_link() -> None:
    verdicts = said(lambda now: Scene(rtt_ms={2: 15.0}, network_ms=400.0) if now >= 30 else None)
    assert spoken(verdicts) == [("link_slow", "n2")]
    assert delay_s(verdicts) < 8


def test_small_delay_counts_only_when_the_job_suffers() -> None:
    assert spoken(said(lambda now: Scene(rtt_ms={2: 2.0}) if now >= 30 else None)) == []
    assert spoken(said(lambda now: Scene(rtt_ms={2: 2.0}, network_ms=100.0) if now >= 30 else None)) == [
        ("link_slow", "n2")
    ]


def test_lost_probes_are_a_link_that_is_down() -> None:
    verdicts = said(lambda now: Scene(dead_links={1}, standing=True) if now >= 30 else None, 40)
    assert spoken(verdicts) == [("link_down", "n1")]
    assert delay_s(verdicts) <= 3


def test_peer_that_does_not_answer_while_its_job_goes_on_is_starved_not_cut_off() -> None:
    assert said(lambda now: Scene(dead_links={1}) if now >= 30 else None, 60) == []


def test_peer_that_never_answered_is_not_up_yet() -> None:
    assert said(lambda now: Scene(dead_links={3}, standing=True) if now < 60 else None, 90) == []


def test_slow_probes_that_no_job_feels_name_nobody() -> None:
    assert said(lambda now: Scene(rtt_ms={2: 15.0}) if now >= 30 else None, 60) == []


def test_missing_carrier_names_the_link_without_probes() -> None:
    assert spoken(said(lambda now: Scene(no_carrier={1}) if now >= 30 else None, 40)) == [("link_down", "n1")]


def test_interface_that_never_had_a_carrier_is_not_in_use() -> None:
    assert said(lambda now: Scene(no_carrier={1})) == []


def test_one_flap_is_a_blip_and_two_are_a_flapping_link() -> None:
    assert said(lambda now: Scene(no_carrier={1}) if now == 30 else None, 60) == []
    assert spoken(said(lambda now: Scene(no_carrier={1}) if now in (30, 36) else None, 60)) == [("link_down", "n1")]


def test_five_flaps_are_one_opinion() -> None:
    verdicts = said(lambda now: Scene(no_carrier={1}) if now in (30, 35, 40, 45, 50) else None, 90)
    assert len({v.onset_at_ns for v in verdicts}) == 1
    assert [v.clears for v in verdicts][-1]
    assert sum(v.clears for v in verdicts) == 1


def test_everything_slow_is_the_fabric_and_blames_nobody() -> None:
    everywhere = Scene(rtt_ms={number: 8.0 for number in range(4)}, network_ms=400.0)
    verdicts = said(lambda now: everywhere if now >= 30 else None)
    assert spoken(verdicts) == [("fabric_slow", "fabric")]
    assert verdicts[0].entity.kind is EntityKind.FABRIC


def test_slow_probes_without_a_slow_job_are_no_fabric_fault() -> None:
    assert said(lambda now: Scene(rtt_ms={number: 8.0 for number in range(4)}) if now >= 30 else None) == []


def test_leaf_is_named_when_most_of_its_nodes_suffer() -> None:
    leaves = {number: f"leaf{number // 4}" for number in range(12)}

    def script(now: int) -> Scene:
        slow = {number: 8.0 for number in range(4, 8)} if now >= 30 else {}
        return Scene(rtt_ms=slow, network_ms=300.0 if slow else 0.0, leaves=leaves)

    verdicts = said(script, nodes=12)
    assert spoken(verdicts) == [("subnet_slow", "leaf1")]
    assert verdicts[0].entity.kind is EntityKind.LEAF


@pytest.mark.parametrize("hung_s", [2, 4, 12])
def test_a_collector_that_hangs_while_its_job_suffers_from_something_else_has_no_lossy_link(hung_s: int) -> None:
    """Its probes are lost, and those that it finds when it wakes are late; stalls of the job are no proof that they matter."""

    def script(now: int) -> Scene:
        slow_ms = 100.0 if now >= 35 else 0.0
        if 40 <= now < 40 + hung_s:
            return Scene(dead_links={1}, silent={1}, network_ms=slow_ms)
        waking = 40 + hung_s <= now < 43 + hung_s
        return Scene(rtt_ms={1: 2000.0} if waking else {}, network_ms=slow_ms)

    assert said(script, 80) == []


def test_silent_node_is_not_called_a_link_that_is_down() -> None:
    assert spoken(said(lambda now: Scene(dead_links={3}, silent={3}, standing=True) if now >= 30 else None, 45)) == []


def test_two_nodes_cannot_tell_whose_link_it_is() -> None:
    assert spoken(said(lambda now: Scene(rtt_ms={1: 20.0}, network_ms=300.0) if now >= 30 else None, nodes=2)) == []


def test_recovered_link_is_taken_back() -> None:
    verdicts = said(lambda now: Scene(rtt_ms={2: 15.0}, network_ms=300.0) if 30 <= now < 45 else None, 70)
    assert verdicts[-1].clears


@pytest.mark.parametrize("guilty", ["a", "d"])
def test_central_prober_names_a_node(guilty: str) -> None:
    keys = [("controller", name) for name in "abcd"]
    bad = np.array([target == guilty for _, target in keys])
    assert explain(keys, bad, Topology()).nodes == (guilty,)


def test_central_prober_that_sees_everything_slow_blames_the_fabric() -> None:
    keys = [("controller", name) for name in "abcd"]
    assert explain(keys, np.ones(4, dtype=bool), Topology()).fabric


def test_one_bad_pair_is_nobodys_fault() -> None:
    keys = [(a, b) for a in "abcdef" for b in "abcdef" if a != b]
    bad = np.array([set(pair) == {"a", "b"} for pair in keys])
    found = explain(keys, bad, Topology())
    assert not found.nodes
    assert not found.fabric
