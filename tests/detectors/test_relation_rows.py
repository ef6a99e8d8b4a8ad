"""Rows of a family by node, device and rail: the same as looking at every row, whoever is late."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base import FamilyMatrix
from detectors.relation import rows as rows_module
from detectors.relation.graph import Graph
from detectors.relation.rows import Keys, Places, Rows
from trainwarden.records import TopologyEvent
from trainwarden.topology import Topology

NODES = tuple(f"n{i}" for i in range(9))


def family(name: str, entities: Keys) -> FamilyMatrix:
    return FamilyMatrix(name, entities, ("x",), np.arange(len(entities), dtype=np.float32)[:, None])


def plain(entities: Keys, nodes: tuple[str, ...]) -> list[tuple[int, int, str]]:
    """(row, node number, device), as whoever looks at every row finds them."""
    return [
        (row, i, device)
        for i, name in enumerate(nodes)
        for row, (owner, device) in enumerate(entities)
        if owner == name
    ]


def ticks(seed: int) -> list[Keys]:
    """Rows of ten ticks: some node is late in each, and one gets a new device."""
    stream = np.random.default_rng(seed)
    found = []
    for tick in range(10):
        late = set(stream.choice(NODES, 2).tolist())
        devices = {name: ["b", "a", *(["c"] if tick > 5 and name == "n3" else [])] for name in NODES}
        found.append(tuple((name, device) for name in NODES if name not in late for device in devices[name]))
    return found


@pytest.mark.parametrize("most", [rows_module.MOST_NAMES, 4])
def test_rows_of_two_jobs_are_found_whoever_is_late(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where names are forgotten again and again, because there are more of them than are kept."""
    monkeypatch.setattr(rows_module, "MOST_NAMES", most)
    shared = Rows()
    jobs = [Places(Graph(nodes, {}), shared) for nodes in (("n7", "n2", "n3"), ("n0", "gone"))]
    for entities in ticks(1):
        for places in jobs:
            rows, nodes, devices, names = places.of(family("gpu", entities))
            named = [names[device] for device in devices.tolist()]
            assert list(zip(rows.tolist(), nodes.tolist(), named, strict=True)) == plain(entities, places.graph.nodes)
            assert list(names) == sorted(set(named))


def test_the_same_rows_are_looked_at_once() -> None:
    shared, entities = Rows(), ticks(1)[0]
    assert shared.see(family("gpu", entities)) is shared.see(family("gpu", entities))
    assert shared.see(family("gpu", ticks(1)[1])).entities == ticks(1)[1]
    assert shared.see(family("gpu", entities)).entities is entities


def test_probes_lie_at_the_rail_that_the_topology_names() -> None:
    topology = Topology()
    for i, name in enumerate(NODES):
        peers = " ".join(f"n{(i + 1 + rail) % 9}={rail}" for rail in range(3)) + " elsewhere=x"
        topology.apply(TopologyEvent(entity=f"node:{name}", origin="operator", attributes={"probe_rails": peers}))
    places = Places(Graph(("n4", "n1"), {}))
    places.learn_rails(topology)
    probes = [(f"n{i}", f"n{(i + 1 + rail) % 9}") for i in range(9) for rail in range(3)]
    entities = (*probes, ("n1", "elsewhere"))
    (asked, asked_cells), (answered, answered_cells) = places.probed(family("mesh", entities), 2)
    assert [entities[row] for row in asked.tolist()] == [("n4", "n5"), ("n4", "n6"), ("n1", "n2"), ("n1", "n3")]
    assert asked_cells.tolist() == [0, 1, 2, 3]
    assert [entities[row] for row in answered.tolist()] == [("n2", "n4"), ("n3", "n4"), ("n0", "n1"), ("n8", "n1")]
    assert answered_cells.tolist() == [1, 0, 2, 3]


def test_a_device_that_is_named_twice_is_one() -> None:
    entities = (("n1", "a"), ("n1", "a"), ("n2", "a"))
    rows, nodes, devices, names = Places(Graph(("n2", "n1"), {})).of(family("gpu", entities))
    assert (rows.tolist(), nodes.tolist(), devices.tolist(), names) == ([2, 0, 1], [0, 1, 1], [0, 0, 0], ("a",))
