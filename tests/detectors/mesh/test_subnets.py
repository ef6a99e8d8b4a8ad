"""Leaves and rails through the detector: sparse probes, a job that suffers, carriers that go together."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from detectors.base import AlignedTick, FamilyMatrix, Frame
from detectors.mesh.links import MeshLinkDetector
from detectors.synthetic import Scene, SyntheticCluster
from trainwarden.clock import NS_PER_S
from trainwarden.records import EntityKind, Reach, StepReport, StepRow, TopologyEvent, Verdict
from trainwarden.topology import Topology

START_NS = 1_700_000_000 * NS_PER_S
NODES, BELOW = 64, 8
STEPS = (1, 11, 2, 19)
Extra = Callable[[int, int, int, int], float]
"""(second, prober, target, rail) → milliseconds that a probe takes longer; infinite = lost."""


def cluster() -> tuple[Topology, list[tuple[int, int, int]]]:
    topology = Topology()
    probes = [(i, (i + step) % NODES, rail) for i in range(NODES) for rail, step in enumerate(STEPS)]
    for i in range(NODES):
        rails = " ".join(f"n{b}={rail}" for a, b, rail in probes if a == i)
        facts = {"leaf": f"leaf{i // BELOW}", "probe_rails": rails}
        topology.apply(TopologyEvent(entity=f"node:n{i}", origin="scheduler", valid_from_ns=START_NS, attributes=facts))
    ranks = tuple((i, f"n{i}", "gpu0") for i in range(NODES))
    topology.apply(TopologyEvent(entity="job:j", origin="scheduler", valid_from_ns=START_NS, ranks=ranks))
    return topology, probes


def frames(seconds: int, extra: Extra, step_ms: Callable[[int], float]) -> Iterator[Frame]:
    rng, (topology, probes) = np.random.default_rng(8), cluster()
    nodes = tuple(f"n{i}" for i in range(NODES))
    keys = tuple((f"n{a}", f"n{b}") for a, b, _ in probes)
    step = 0
    for second in range(seconds):
        at_ns = START_NS + (second + 1) * NS_PER_S
        more = np.array([extra(second, *probe) for probe in probes])
        rtt = np.where(np.isfinite(more), 0.1 * np.exp(0.2 * rng.normal(size=len(probes))) + more, np.nan)
        lost = np.where(np.isfinite(more), 0.0, 3.0)
        values = np.stack([rtt, rtt, np.full(len(probes), 3.0), lost], axis=1).astype(np.float32)
        matrix = FamilyMatrix("mesh", keys, ("rtt_ms", "rtt_max_ms", "sent_count", "lost_count"), values)
        tick = AlignedTick(at_ns, 1000, nodes, np.ones(NODES, dtype=bool), {"mesh": matrix})
        rows = []
        for _ in range(5):
            step += 1
            rows.append(
                StepRow(
                    step=step, phase="train", started_at_ns=at_ns - NS_PER_S, duration_ms=step_ms(second) + rng.normal()
                )
            )
        report = StepReport(node="n0", observed_at_ns=at_ns, job="j", rank=0, world=NODES, rows=tuple(rows))
        yield Frame(at_ns, (tick,), (report,), (), topology)


def said(extra: Extra, slow_ms: float = 260.0, seconds: int = 60) -> list[Verdict]:
    detector = MeshLinkDetector()
    return [v for f in frames(seconds, extra, lambda now: slow_ms if now >= 30 else 200.0) for v in detector.update(f)]


def spoken(verdicts: list[Verdict]) -> list[tuple[str, str, str]]:
    return sorted({(v.kind, v.entity.kind.value, v.entity.name) for v in verdicts if not v.clears})


def leaf(node: int) -> int:
    return node // BELOW


def test_a_leaf_a_third_of_a_millisecond_slow_is_named_while_the_job_suffers() -> None:
    def extra(now: int, a: int, b: int, rail: int) -> float:
        return 0.3 if now >= 30 and 3 in (leaf(a), leaf(b)) else 0.0

    verdicts = said(extra)
    assert spoken(verdicts) == [("subnet_slow", "leaf", "leaf3")]
    assert verdicts[0].window_end_ns <= START_NS + 41 * NS_PER_S
    assert verdicts[0].job == "j"


def test_what_no_job_feels_is_said_only_when_it_is_unmistakable() -> None:
    def extra(more_ms: float) -> Extra:
        return lambda now, a, b, rail: more_ms if now >= 30 and 3 in (leaf(a), leaf(b)) else 0.0

    assert said(extra(0.12), slow_ms=200.0) == []
    assert spoken(said(extra(0.5), slow_ms=200.0)) == [("subnet_slow", "leaf", "leaf3")]


def test_a_rail_is_named_and_no_leaf() -> None:
    assert spoken(said(lambda now, a, b, rail: 0.4 if now >= 30 and rail == 2 else 0.0)) == [
        ("subnet_slow", "rail", "rail2")
    ]


def test_a_leafs_switch_of_one_rail_is_named() -> None:
    def extra(now: int, a: int, b: int, rail: int) -> float:
        return 5.0 if now >= 30 and rail == 1 and 6 in (leaf(a), leaf(b)) else 0.0

    assert spoken(said(extra)) == [("subnet_slow", "leaf", "leaf6/rail1")]


def test_two_switches_of_a_leaf_are_the_leaf() -> None:
    def extra(now: int, a: int, b: int, rail: int) -> float:
        return 5.0 if now >= 30 and rail in (1, 3) and 6 in (leaf(a), leaf(b)) else 0.0

    assert spoken(said(extra)) == [("subnet_slow", "leaf", "leaf6")]


def crosses(a: int, b: int, below: int) -> bool:
    return (leaf(a) == below) != (leaf(b) == below)


@pytest.mark.parametrize(("ways", "more_ms"), [(4, 0.5), (4, 12.0), (3, 3.0), (2, 3.0)])
def test_some_ways_out_of_a_leaf_are_the_leafs_and_no_nodes(ways: int, more_ms: float) -> None:
    """Equal-cost ways: each flow keeps to the one that a hash gives it, and one of so many is slow."""

    def extra(now: int, a: int, b: int, rail: int) -> float:
        bad = crosses(a, b, 2) and zlib.crc32(f"{a}|{b}|{rail}".encode()) % ways == 0
        return more_ms if now >= 30 and bad else 0.0

    assert {(v.kind, v.entity.name.partition("/")[0]) for v in said(extra)} == {("subnet_slow", "leaf2")}


def test_slow_pairs_all_over_are_no_leafs() -> None:
    """As many flows as above, hashed on one another wherever they are."""

    def extra(now: int, a: int, b: int, rail: int) -> float:
        return 12.0 if now >= 30 and zlib.crc32(f"{a}|{b}|{rail}".encode()) % 28 == 0 else 0.0

    assert said(extra) == []


def test_a_congested_leaf_whose_queues_come_and_go_is_named_and_none_of_its_nodes() -> None:
    rng = np.random.default_rng(9)

    def extra(now: int, a: int, b: int, rail: int) -> float:
        through = now >= 30 and 3 in (leaf(a), leaf(b))
        return 2.0 * rng.exponential() if through and rng.random() < 0.6 else 0.0

    assert spoken(said(extra)) == [("subnet_slow", "leaf", "leaf3")]


@pytest.mark.parametrize(("slow_ms", "expected"), [(260.0, [("link_slow", "node", "n25")]), (200.0, [])])
def test_one_port_that_is_a_little_slow_is_told_while_its_job_is_slower(
    slow_ms: float, expected: list[tuple[str, str, str]]
) -> None:
    def extra(now: int, a: int, b: int, rail: int) -> float:
        return 0.5 if now >= 30 and rail == 1 and 25 in (a, b) else 0.0

    verdicts = said(extra, slow_ms)
    assert spoken(verdicts) == expected
    assert all(v.reach is Reach.NOTIFY and "over rail 1" in v.text for v in verdicts)


def test_a_slow_node_below_a_leaf_stays_a_node_and_two_stay_two() -> None:
    def extra(now: int, a: int, b: int, rail: int) -> float:
        return 8.0 if now >= 30 and {25, 27} & {a, b} else 0.0

    assert spoken(said(extra)) == [("link_slow", "node", "n25"), ("link_slow", "node", "n27")]


def test_everything_raised_is_not_laid_on_a_leaf() -> None:
    assert [v for v in said(lambda now, a, b, rail: 0.4 if now >= 30 else 0.0) if v.kind == "subnet_slow"] == []


def test_lost_probes_through_a_leaf_are_its_fault() -> None:
    def extra(now: int, a: int, b: int, rail: int) -> float:
        return float("inf") if now >= 30 and 2 in (leaf(a), leaf(b)) else 0.0

    verdicts = said(extra)
    assert spoken(verdicts) == [("subnet_slow", "leaf", "leaf2")]
    assert "are lost" in verdicts[0].text


def test_a_leaf_that_recovers_is_taken_back_and_what_was_slow_is_not_learnt() -> None:
    def extra(now: int, a: int, b: int, rail: int) -> float:
        return 0.3 if 30 <= now < 150 and 3 in (leaf(a), leaf(b)) else 0.0

    detector = MeshLinkDetector()
    made = frames(180, extra, lambda now: 260.0 if 30 <= now < 150 else 200.0)
    verdicts = [v for f in made for v in detector.update(f)]
    assert [v.clears for v in verdicts][-1]
    assert sum(v.clears for v in verdicts) == 1
    assert verdicts[-1].window_end_ns > START_NS + 150 * NS_PER_S


def test_carriers_that_go_with_their_leaf_blame_the_leaf() -> None:
    leaves = {number: f"leaf{number // 4}" for number in range(12)}

    def script(now: int) -> Scene:
        return Scene(no_carrier=set(range(4, 8)) if now >= 30 else set(), leaves=leaves)

    detector = MeshLinkDetector()
    verdicts = [v for f in SyntheticCluster(12, seed=4).frames(50, script) for v in detector.update(f)]
    assert {(v.kind, v.entity.kind, v.entity.name) for v in verdicts} == {("subnet_slow", EntityKind.LEAF, "leaf1")}


def test_one_carrier_below_a_leaf_is_that_nodes_link() -> None:
    leaves = {number: f"leaf{number // 4}" for number in range(12)}
    detector = MeshLinkDetector()
    made = SyntheticCluster(12, seed=4).frames(
        50, lambda now: Scene(no_carrier={5} if now >= 30 else set(), leaves=leaves)
    )
    assert {(v.kind, v.entity.name) for f in made for v in detector.update(f)} == {("link_down", "n5")}


def test_answers_that_come_far_too_late_now_and_then_count_like_lost_ones() -> None:
    """The median hides a probe that waited for a retransmission; the longest of the interval shows it."""

    def at(now: int, number: int, frame: Frame) -> Frame:
        if now < 40 or now % 4:
            return frame
        matrix = frame.ticks[0].families["mesh"]
        values = matrix.values.copy()
        hit = [i for i, (_, target) in enumerate(matrix.entities) if target == "n9"]
        values[hit[number % len(hit)], 1] = 210.0
        values[hit[(number + 1) % len(hit)], 1] = 400.0
        families = {"mesh": FamilyMatrix("mesh", matrix.entities, matrix.metrics, values)}
        tick = frame.ticks[0]
        return Frame(
            frame.now_ns,
            (AlignedTick(tick.at_ns, 1000, tick.nodes, tick.present, families),),
            frame.steps,
            (),
            frame.topology,
        )

    detector = MeshLinkDetector()
    made = frames(80, lambda *_: 0.0, lambda now: 450.0 if now >= 40 and now % 2 == 0 else 200.0)
    verdicts = [v for now, f in enumerate(made) for v in detector.update(at(now, now // 4, f))]
    assert spoken(verdicts) == [("link_slow", "node", "n9")]
