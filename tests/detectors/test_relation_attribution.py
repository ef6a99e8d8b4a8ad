"""The fewest causes that explain the evidence: nodes, ports, switches, places, two at once, nobody."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.relation.attribution import KINDS, attribute
from detectors.relation.features import CLOCK, INLET, LOCAL, OWN, RTT, TEMP
from detectors.relation.graph import Graph, Relation
from detectors.relation.judge import Evidence
from detectors.relation.opinions import Opinions

PRICES = dict.fromkeys(KINDS, 15.0)
RAILS = ("mlx5_0/1", "mlx5_1/1", "mlx5_2/1", "mlx5_3/1")
NODES = 128


def relation(kind: str, size: int) -> Relation:
    group = np.arange(NODES) // size
    return Relation(kind, group, tuple(f"{kind}-{i}" for i in range(int(group.max()) + 1)))


GRAPH = Graph(
    tuple(f"n{i:03d}" for i in range(NODES)),
    {"rack": relation("rack", 8), "pdu": relation("pdu", 16), "leaf": relation("leaf", 32), "zone": relation("zone", 64),
     "ep": relation("ep", 4), "job": relation("job", NODES)},
)  # fmt: skip


def calm(seed: int = 0) -> Evidence:
    stream = np.random.default_rng(seed)
    return Evidence(
        stream.standard_normal((8, NODES)).astype(np.float32), stream.standard_normal((4, NODES, 4)).astype(np.float32)
    )


def named(evidence: Evidence) -> list[tuple[str, str]]:
    return [cause.key for cause in attribute(evidence, GRAPH, PRICES, RAILS)]


def test_nobody_is_blamed_for_chance() -> None:
    assert [named(calm(seed)) for seed in range(10)] == [[]] * 10


def test_a_slow_node_is_named_and_its_echo_is_not() -> None:
    found = calm()
    found.node[LOCAL, 40:44] = 7.0
    found.node[OWN, 42] = 8.0
    assert named(found) == [("node", "n042")]


def test_heat_alone_is_no_slowness() -> None:
    found = calm()
    found.node[TEMP, 5] = 12.0
    assert named(found) == []


def test_two_nodes_at_once_are_kept_apart() -> None:
    found = calm()
    found.node[LOCAL, [3, 90]] = 8.0
    assert sorted(named(found)) == [("node", "n003"), ("node", "n090")]


def test_a_port_is_a_matter_of_its_node() -> None:
    found = calm()
    found.port[:2, 17, 2] = 6.0
    assert named(found) == [("port", "n017/mlx5_2/1")]


@pytest.mark.parametrize(
    ("nodes", "expected"), [(slice(64, 96), ("leaf", "leaf-2/rail1")), (slice(0, NODES), ("rail", "rail1"))]
)
def test_one_switch_or_one_rail_explains_many_ports(nodes: slice, expected: tuple[str, str]) -> None:
    found = calm()
    found.port[RTT, nodes, 1] += 4.0
    assert named(found) == [expected]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(slice(8, 16), ("rack", "rack-1")), (slice(32, 48), ("pdu", "pdu-2")), (slice(64, 128), ("zone", "zone-1"))],
)
def test_a_place_is_named_instead_of_its_nodes(nodes: slice, expected: tuple[str, str]) -> None:
    found = calm()
    found.node[[LOCAL, CLOCK, INLET], nodes] += 3.5
    assert named(found) == [expected]


def test_a_node_and_a_switch_at_once() -> None:
    found = calm()
    found.port[RTT, 0:32, 3] += 5.0
    found.node[LOCAL, 77] = 9.0
    assert sorted(named(found)) == [("leaf", "leaf-0/rail3"), ("node", "n077")]


def test_candidates_have_probabilities_that_add_up() -> None:
    found = calm()
    found.node[LOCAL, 30] = 8.0
    found.node[LOCAL, 31] = 7.9
    first = attribute(found, GRAPH, PRICES, RAILS)[0]
    assert first.key == ("node", "n030")
    assert first.probability + sum(p for *_, p in first.others) == pytest.approx(1.0, abs=1e-3)
    assert ("nobody", "") in {(kind, name) for kind, name, _ in first.others}


def test_an_opinion_needs_two_rounds_and_ends_after_six() -> None:
    found = calm()
    found.node[LOCAL, 42] = 7.0
    causes = attribute(found, GRAPH, PRICES, RAILS)
    opinions = Opinions()
    assert opinions.take(causes, 1) == ([], [])
    standing, over = opinions.take(causes, 2)
    assert [opinion.name for opinion, _ in standing] == ["n042"]
    assert not over
    ends = [opinions.take([], 3 + i)[1] for i in range(6)]
    assert [len(end) for end in ends] == [0, 0, 0, 0, 0, 1]


def test_what_is_accused_is_not_learnt() -> None:
    found = calm()
    found.port[:2, 17, 2] = 6.5
    opinions = Opinions()
    opinions.take(attribute(found, GRAPH, PRICES, RAILS), 1)
    whole, ports = opinions.frozen(calm(), NODES)
    assert not whole.any()
    assert ports is not None
    assert np.argwhere(ports).tolist() == [[17, 2]]
