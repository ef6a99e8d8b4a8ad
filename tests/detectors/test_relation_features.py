"""Rounds from frames and from the simulator are the same; the past learns what lasts and forgets nobody at a restart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from collectors.simulated.engine import Simulator
from collectors.simulated.families import FAMILIES
from collectors.simulated.run import build
from collectors.simulated.spec import Spec
from collectors.simulated.state import devices
from detectors.base import AlignedTick, FamilyMatrix
from detectors.relation import features
from detectors.relation.features import LOCAL, OWN, Past, Round
from detectors.relation.gather import Gathered, channels
from detectors.relation.groups import Groups
from detectors.relation.judge import apart, of_some_effect
from detectors.relation.rows import Places
from trainwarden.commands.simulated_rounds import graph_of_job, rounds_of
from trainwarden.records import TopologyEvent
from trainwarden.topology import Topology

NODES = 12

BOTH = [features.RTT, features.ANSWERED]


def seen(local: np.ndarray, gpu: float = 0.5, port: float = 0.0) -> Round:
    node = np.zeros((8, NODES), dtype=np.float32)
    node[LOCAL], node[OWN] = local, np.nan
    return Round(
        0,
        100.0,
        node,
        np.full((NODES, 8), np.log(gpu), dtype=np.float32),
        np.full((5, NODES, 4), port, dtype=np.float32),
    )


def noisy(stream: np.random.Generator, shift: float = 0.0) -> Round:
    local = 1.0 + 0.01 * stream.standard_normal(NODES) + 0.3 * (np.arange(NODES) == 2)
    local[5] += shift
    return seen(local)


def test_unequal_nodes_are_no_news_and_a_change_is() -> None:
    stream, past, nobody = np.random.default_rng(0), Past(), np.zeros(NODES, dtype=np.bool_)
    for _ in range(40):
        found = past.advance(noisy(stream), nobody)
    assert np.abs(found.node[LOCAL]).max() < 5
    assert found.warm
    found = past.advance(noisy(stream, 0.1), nobody)
    assert found.node[LOCAL, 5] > 5
    assert np.abs(np.delete(found.node[LOCAL], 5)).max() < 5


def test_the_past_of_the_accused_stands_still() -> None:
    stream, past = np.random.default_rng(0), Past()
    accused = np.arange(NODES) == 5
    for _ in range(40):
        past.advance(noisy(stream), np.zeros(NODES, dtype=np.bool_))
    kept = past.node[:, 5].copy()
    for _ in range(60):
        past.advance(noisy(stream, 0.1), accused)
    assert past.node[:, 5] == pytest.approx(kept, abs=0.01)
    for _ in range(200):
        past.advance(noisy(stream, 0.1), np.zeros(NODES, dtype=np.bool_))
    assert past.node[LOCAL, 5] == pytest.approx(kept[LOCAL] + 0.1, abs=0.02), "what lasts becomes the usual"


def test_at_a_restart_each_node_keeps_its_past_and_a_newcomer_has_none() -> None:
    stream, past = np.random.default_rng(0), Past()
    for _ in range(20):
        past.advance(noisy(stream), np.zeros(NODES, dtype=np.bool_))
    moved = past.kept([2, 0, -1])
    assert moved.node[LOCAL, :2] == pytest.approx(past.node[LOCAL, [2, 0]])
    assert np.isnan(moved.node[LOCAL, 2])
    assert moved.port.shape == (5, 3, 4)
    assert moved.rounds == past.rounds


def test_one_port_beside_the_others_is_news_and_all_of_a_node_are_not() -> None:
    stream, past, nobody = np.random.default_rng(0), Past(), np.zeros(NODES, dtype=np.bool_)
    for _ in range(30):
        past.advance(noisy(stream), nobody)
    one = noisy(stream)
    one.port[BOTH, 3, 1] = 1.0
    one.port[BOTH, 7] = [1.0, 1.1, 0.95, 1.05]
    found = past.advance(one, nobody).port[features.RTT]
    assert found[3, 1] > 10
    assert np.abs(np.delete(found, 3, axis=0)).max() == 0


def names_of(simulator: Simulator, family: str, node: int) -> list[str]:
    if family == "mesh":
        return [simulator.layout.names[peer] for peer in simulator.layout.peers[node]]
    return list(devices(simulator.layout, family))


def test_frames_and_the_simulator_give_the_same_round() -> None:
    spec = Spec(nodes=40, seed=3, jobs="16:moe,16:dense", rate_hz=0.2)
    fast = build(spec, "leaf_degraded@leaf-000/rail2:20+60x0.6", 100)
    slow = build(spec, "leaf_degraded@leaf-000/rail2:20+60x0.6", 100)
    topology = Topology()
    for node, name in enumerate(slow.layout.names):
        topology.apply(TopologyEvent(entity=f"node:{name}", origin="operator", attributes=slow.layout.facts(node)))
    grid = slow.jobs[1].grid
    graph = graph_of_job(slow.layout, grid)
    places = Places(graph)
    places.learn_rails(topology)
    for rounds in rounds_of(fast, 12):
        interval = slow.advance()
        families = {}
        for name, values in interval.values.items():
            if name != "process":
                rows = [
                    (node, device) for i, node in enumerate(slow.layout.names) for device in names_of(slow, name, i)
                ]
                metrics = tuple(metric.name for metric in FAMILIES[name].metrics)
                families[name] = FamilyMatrix(name, tuple(rows), metrics, values.reshape(-1, len(metrics)))
        tick = AlignedTick(0, 5000, slow.layout.names, np.ones(40, dtype=np.bool_), families)
        gathered = Gathered()
        *sums, rails = channels(tick, places)
        gathered.put_tick(*sums)
        made = gathered.close(0, graph.rank_node, len(graph.nodes))
        expected = rounds[1]
        heard = interval.heard[grid.span]
        assert rails == slow.layout.rail_devices
        assert made.node[3:, heard] == pytest.approx(expected.node[3:, heard], abs=2e-3, nan_ok=True)
        assert made.gpu[heard] == pytest.approx(expected.gpu[heard], abs=1e-5, nan_ok=True)
        assert made.port[:, heard] == pytest.approx(expected.port[:, heard], abs=1e-4, nan_ok=True)


def test_a_round_without_reports_is_unknown_and_no_error() -> None:
    made = Gathered().close(5, np.repeat(np.arange(3), 2), 3)
    assert np.isnan(made.node[LOCAL]).all()
    assert np.isnan(made.step_ms)
    found = Past().advance(replace(made, gpu=np.full((3, 0), np.nan, dtype=np.float32)), np.zeros(3, dtype=np.bool_))
    assert found.node.shape == (8, 3)


def test_who_was_slow_from_the_beginning_stands_apart_and_unequal_peers_do_not() -> None:
    peers = Groups.of(np.repeat([0, 1], 6))
    local = np.log(np.array([1.0, 1.01, 0.99, 1.0, 2.35, 1.0, 1.0, 1.3, 0.8, 1.5, 1.1, 0.9])).astype(np.float32)
    assert np.flatnonzero(apart(local, peers)).tolist() == [4]


def test_a_round_in_which_nobody_speaks_of_ports_and_gpus_forgets_nothing() -> None:
    """The end of a recording, or exporters that restart: nodes are heard, their devices are not, and some ports are being watched."""
    stream, past, nobody = np.random.default_rng(0), Past(), np.zeros(NODES, dtype=np.bool_)
    for _ in range(30):
        past.advance(noisy(stream), nobody)
    before = past.port.copy()
    whole = noisy(stream)
    bare = replace(whole, gpu=whole.gpu[:, :0], port=whole.port[:, :, :0])
    watched = np.zeros((NODES, 4), dtype=np.bool_)
    for _ in range(3):
        found = past.advance(bare, nobody, watched)
    assert found.warm
    assert found.port.shape[1:] == whole.port.shape[1:]
    assert np.isfinite(past.port_scale).all()
    assert past.port == pytest.approx(before)
    more = replace(whole, port=np.zeros((5, NODES, 6), dtype=np.float32))
    assert not past.advance(more, nobody, watched).warm, "other devices are another past"


def test_a_tick_without_devices_drops_nothing_that_was_gathered() -> None:
    gathered, whole = Gathered(), seen(np.zeros(NODES), port=2.0)
    gathered.put_tick(whole.node, whole.gpu, whole.port)
    gathered.put_tick(whole.node, whole.gpu[:, :0], whole.port[:, :, :0])
    made = gathered.close(1, np.arange(NODES), NODES)
    assert made.port == pytest.approx(whole.port)


@pytest.mark.parametrize(
    ("late", "evident"),
    [
        ([0.0, 0.0, 0.0, 0.0, 0.1, 0.1], True),
        ([0.0, 0.0, 0.1, np.nan, 0.1, np.nan], True),
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.1], False),
        ([0.0, 0.0, 0.1, 0.1, 0.1, 0.0], False),
        ([0.1, 0.1, 0.1, 0.1, 0.1, 0.0], True),
        ([0.0, np.nan, np.nan, np.nan, np.nan, 0.1], False),
    ],
)
def test_what_is_late_for_two_rounds_counts_at_once_and_a_pause_does_not(late: list[float], evident: bool) -> None:
    effect = [np.full((4, 1), value, dtype=np.float32) for value in late]
    node = np.full((8, 1), 5.0, dtype=np.float32)
    assert bool(of_some_effect(node, effect)[LOCAL, 0] > 0) is evident
