"""Graphs from layouts, relations learnt where nobody tells, and what relatives say of each other."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.relation.graph import Graph, graph_of
from detectors.relation.groups import Groups
from detectors.relation.learnt import learnt_relation
from trainwarden.records import TopologyEvent
from trainwarden.topology import Topology


def graph(attributes: dict[str, str], nodes: int, gpus: int = 8, racks: int = 4) -> Graph:
    topology = Topology()
    for node in range(nodes):
        topology.apply(
            TopologyEvent(entity=f"node:n{node:02d}", origin="operator", attributes={"rack": f"rack-{node // racks}"})
        )
    ranks = tuple((rank, f"n{rank // gpus:02d}", f"gpu{rank % gpus}") for rank in range(nodes * gpus))
    topology.apply(TopologyEvent(entity="job:j", origin="hook", attributes=attributes, ranks=ranks))
    layout = topology.job("j")
    assert layout is not None
    return graph_of(layout, topology)


def members(graph: Graph, kind: str) -> list[list[int]]:
    relation = graph.relations[kind]
    return [relation.members(number).tolist() for number in range(len(relation.names))]


def test_stages_and_replicas_of_a_pipeline() -> None:
    found = graph({"tp": "8", "pp": "2", "dp": "4", "order": "tp-dp-pp"}, nodes=8)
    assert members(found, "dp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.relations["dp"].names == ("stage 0", "stage 1")
    assert members(found, "pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert "tp" not in found.relations, "tensor groups lie within nodes: nobody is related by them"
    assert found.described


def test_experts_exchange_tokens_within_their_group() -> None:
    found = graph({"tp": "4", "pp": "1", "dp": "16", "ep": "8", "order": "tp-dp-pp"}, nodes=8)
    assert members(found, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert members(found, "dp") == [[0, 4], [1, 5], [2, 6], [3, 7]], "same experts, same work"


def test_a_tensor_group_over_two_nodes_relates_them() -> None:
    assert members(graph({"tp": "16", "dp": "2", "order": "tp-dp-pp"}, nodes=4), "tp") == [[0, 1], [2, 3]]


def test_without_a_layout_there_are_places_and_the_job() -> None:
    found = graph({}, nodes=8)
    assert set(found.relations) == {"rack", "job"}
    assert not found.described
    assert members(found, "rack") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_neighbours_are_named_by_their_strongest_relation() -> None:
    found = graph({"tp": "8", "pp": "2", "dp": "4", "order": "tp-dp-pp"}, nodes=8)
    assert found.neighbours(0, 4) == [("dp", "n01", 1.0), ("dp", "n02", 1.0), ("dp", "n03", 1.0), ("pp", "n04", 0.8)]
    one, other = found.edges("pp")
    assert list(zip(one.tolist(), other.tolist(), strict=True)) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_messages_are_those_of_the_others() -> None:
    stream = np.random.default_rng(1)
    group = stream.integers(-1, 6, 60)
    values = np.round(stream.standard_normal((3, 60)), 1).astype(np.float32)
    groups = Groups.of(group)
    middle, spread = groups.messages(values)
    for node in range(60):
        others = (
            np.flatnonzero((group == group[node]) & (np.arange(60) != node)) if group[node] >= 0 else np.zeros(0, int)
        )
        expected = np.median(values[:, others], axis=1) if others.size else np.zeros(3)
        assert middle[:, node] == pytest.approx(expected, abs=1e-6)
        assert groups.others[node] == pytest.approx(np.log1p(others.size))
        if others.size:
            centre = np.median(values[:, group == group[node]], axis=1, keepdims=True)
            assert spread[:, node] == pytest.approx(
                np.minimum(np.abs(values[:, others] - centre), 4.0).mean(axis=1), abs=1e-5
            )


def test_nodes_that_move_together_are_found() -> None:
    stream = np.random.default_rng(2)
    common = stream.standard_normal((30, 3))
    history = np.repeat(common, 5, axis=1) + 0.3 * stream.standard_normal((30, 15))
    relation = learnt_relation(history.astype(np.float32))
    assert relation is not None
    assert relation.group.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert learnt_relation(history[:10].astype(np.float32)) is None, "ten rounds are too few to tell"


def test_nodes_without_likeness_stay_alone() -> None:
    noise = np.random.default_rng(3).standard_normal((36, 12)).astype(np.float32)
    relation = learnt_relation(noise)
    assert relation is not None
    assert np.bincount(relation.group[relation.group >= 0], minlength=1).max(initial=0) <= 3
