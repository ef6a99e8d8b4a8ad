"""1,250 nodes with eight probes each: quiet on heavy-tailed health while a job has good and bad hours, right where something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from detectors.base import AlignedTick, FamilyMatrix, Frame
from detectors.mesh.links import MeshLinkDetector
from trainwarden.clock import NS_PER_S
from trainwarden.records import StepReport, StepRow, TopologyEvent, Verdict
from trainwarden.topology import Topology

START_NS = 1_700_000_000 * NS_PER_S
NODES, BELOW = 1250, 32
STEPS = (1, 35, 2, 97, 3, 162, 5, 229)
Numbers = NDArray[np.float64]
Extra = Callable[[int, NDArray[np.int64]], Numbers]
"""(second, probes × (prober, target, rail)) → milliseconds more."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@cache
def room() -> tuple[Topology, NDArray[np.int64]]:
    topology = Topology()
    probes = np.array([(i, (i + step) % NODES, rail) for i in range(NODES) for rail, step in enumerate(STEPS)])
    for i in range(NODES):
        rails = " ".join(f"n{b}={rail}" for _, b, rail in probes[8 * i : 8 * i + 8])
        facts = {"leaf": f"leaf{i // BELOW}", "probe_rails": rails}
        topology.apply(TopologyEvent(entity=f"node:n{i}", origin="scheduler", valid_from_ns=START_NS, attributes=facts))
    ranks = tuple((i, f"n{i}", "gpu0") for i in range(NODES))
    topology.apply(TopologyEvent(entity="job:j", origin="scheduler", valid_from_ns=START_NS, ranks=ranks))
    return topology, probes


def nothing(second: int, probes: NDArray[np.int64]) -> Numbers:
    return np.zeros(len(probes))


def frames(seconds: int, extra: Extra, step_ms: Callable[[int], float], seed: int = 0) -> Iterator[Frame]:
    rng, (topology, probes) = np.random.default_rng(seed), room()
    nodes, everybody = tuple(f"n{i}" for i in range(NODES)), np.ones(NODES, dtype=bool)
    keys = tuple((f"n{a}", f"n{b}") for a, b, _ in probes.tolist())
    base = 0.08 * np.exp(0.3 * rng.normal(size=len(probes)))
    for second in range(seconds):
        at_ns = START_NS + (second + 1) * NS_PER_S
        usual = base * np.exp(0.25 * np.clip(rng.standard_t(3, len(probes)), -9, 9)) + (
            rng.random(len(probes)) < 0.01
        ) * rng.exponential(5, len(probes))
        lost = (rng.random(len(probes)) < 0.001).astype(float)
        rtt = usual + extra(second, probes)
        values = np.stack([rtt, rtt * (1 + rng.exponential(0.5, len(probes))), np.full(len(probes), 3.0), lost], axis=1)
        matrix = FamilyMatrix(
            "mesh", keys, ("rtt_ms", "rtt_max_ms", "sent_count", "lost_count"), values.astype(np.float32)
        )
        row = StepRow(
            step=second,
            phase="train",
            started_at_ns=at_ns - NS_PER_S,
            duration_ms=step_ms(second) * (1 + 0.02 * rng.normal()),
        )
        report = StepReport(node="n0", observed_at_ns=at_ns, job="j", rank=0, world=NODES, rows=(row,))
        yield Frame(at_ns, (AlignedTick(at_ns, 1000, nodes, everybody, {"mesh": matrix}),), (report,), (), topology)


def said(made: Iterator[Frame]) -> list[Verdict]:
    detector = MeshLinkDetector()
    return [v for frame in made for v in detector.update(frame)]


def moody(second: int) -> float:
    """A job that is half as fast again, or stalls, for minutes at a time, for reasons that are not the network's."""
    return 1000.0 * (1.7 if second % 400 > 340 else 1.0) + (400.0 if second % 200 > 170 and second % 4 == 0 else 0.0)


def test_health_is_quiet_while_a_job_has_bad_minutes() -> None:
    """17 node-days of health with heavy tails and lost probes."""
    verdicts = said(frames(1200, nothing, moody))
    assert verdicts == [], [v.text for v in verdicts]


def test_one_node_two_nodes_a_leaf_a_rail_and_everything() -> None:
    def spoken(where: Callable[[NDArray[np.int64]], NDArray[np.bool_]], more_ms: float) -> set[tuple[str, str]]:
        def extra(second: int, probes: NDArray[np.int64]) -> Numbers:
            return where(probes) * (more_ms if second >= 40 else 0.0)

        verdicts = said(frames(52, extra, lambda second: 1000.0 if second < 40 else 1700.0, seed=3))
        assert all(v.window_end_ns <= START_NS + 50 * NS_PER_S for v in verdicts[:1]), "too late"
        return {(v.kind, v.entity.name) for v in verdicts}

    assert spoken(lambda p: np.isin(p[:, :2], (700,)).any(axis=1), 5.0) == {("link_slow", "n700")}
    assert spoken(lambda p: np.isin(p[:, :2], (64, 900)).any(axis=1), 5.0) == {
        ("link_slow", "n64"),
        ("link_slow", "n900"),
    }
    assert spoken(lambda p: np.isin(p[:, :2] // BELOW, (5,)).any(axis=1), 0.15) == {("subnet_slow", "leaf5")}
    assert spoken(lambda p: p[:, 2] == 6, 0.15) == {("subnet_slow", "rail6")}
    assert spoken(lambda p: np.ones(len(p), dtype=bool), 5.0) == {("fabric_slow", "fabric")}
