"""Who explains bad probes in a large mesh: nodes, ports, leaves, a leaf's switch of one rail, rails, the fabric, or nobody."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from detectors.mesh import blame as blame_module
from detectors.mesh.blame import Explanation, blame, explain
from detectors.mesh.parts import Parts, facts_of, nodes_of, parts_of
from trainwarden.records import TopologyEvent
from trainwarden.topology import Topology

NODES, BELOW = 1250, 32
STEPS = (1, 35, 2, 97, 3, 162, 5, 229)
Mask = NDArray[np.bool_]


@cache
def mesh() -> tuple[Parts, NDArray[np.str_]]:
    """1,250 nodes, eight peers each, the k-th over rail k; 32 nodes below a leaf."""
    names = [f"n{i}" for i in range(NODES)]
    topology, keys = Topology(), []
    for i, name in enumerate(names):
        peers = [names[(i + step) % NODES] for step in STEPS]
        facts = {
            "leaf": f"leaf{i // BELOW}",
            "probe_rails": " ".join(f"{peer}={rail}" for rail, peer in enumerate(peers)),
        }
        topology.apply(TopologyEvent(entity=f"node:{name}", origin="scheduler", valid_from_ns=1, attributes=facts))
        keys += [(name, peer) for peer in peers]
    nodes = nodes_of(keys)
    parts = parts_of(keys, nodes, facts_of(nodes, topology))
    return parts, np.array([*parts.names, ""])[parts.through]


def through(*names: str) -> Mask:
    return np.asarray(np.isin(mesh()[1], names).any(axis=1))


def touching(*nodes: int) -> Mask:
    return through(*(f"n{i}" for i in nodes))


def found(bad: Mask, hit: float = 1.0, noise: float = 0.0, weak: bool = False, seed: int = 0) -> Explanation:
    rng = np.random.default_rng(seed)
    seen = (bad & (rng.random(len(bad)) < hit)) | (rng.random(len(bad)) < noise)
    return blame(mesh()[0], seen, weak=weak)


def test_one_node_of_many_is_named() -> None:
    assert found(touching(700)) == Explanation(nodes=("n700",))
    assert found(touching(700), hit=0.9, noise=0.001).nodes == ("n700",)


@pytest.mark.parametrize("pair", [(7, 900), (7, 8), (64, 95)])
def test_two_bad_nodes_at_once_stay_two_also_below_one_leaf(pair: tuple[int, int]) -> None:
    result = found(touching(*pair))
    assert set(result.nodes) == {f"n{i}" for i in pair}
    assert not result.leaves


def test_a_leaf_is_blamed_and_none_of_its_nodes() -> None:
    assert found(through("leaf3"), hit=0.9, noise=0.001) == Explanation(leaf="leaf3", leaves=("leaf3",))


def test_two_leaves_and_a_leaf_beside_a_node() -> None:
    assert set(found(through("leaf3", "leaf17")).leaves) == {"leaf3", "leaf17"}
    both = found(through("leaf3") | touching(900))
    assert (both.leaves, both.nodes) == (("leaf3",), ("n900",))


def test_two_thirds_of_the_hosts_are_needed_for_a_leaf() -> None:
    first = 3 * BELOW
    assert found(touching(*range(first, first + 26))).leaves == ("leaf3",)
    half = found(touching(*range(first, first + 16)))
    assert not half.leaves
    assert not half.nodes, "half a leaf is neither its switch nor sixteen nodes that failed at once"


def test_a_leafs_switch_of_one_rail_is_told_from_the_leaf_and_from_the_rail() -> None:
    assert found(through("leaf3/rail2"), hit=0.9).leaves == ("leaf3/rail2",)
    assert found(through("rail5"), hit=0.8, noise=0.001) == Explanation(rail="rail5", rails=("rail5",))


def test_a_port_is_its_node_over_one_rail() -> None:
    result = found(through("n7\x1f3"))
    assert (result.nodes, result.rails_of) == (("n7",), {"n7": "3"})


def test_everything_is_the_fabric_and_random_noise_is_nobody() -> None:
    everything = np.ones(NODES * len(STEPS), dtype=bool)
    assert found(everything, hit=0.8) == Explanation(fabric=True)
    for seed in range(20):
        assert found(~everything, noise=0.002, seed=seed) == Explanation()


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1, 0.2, 0.3, 0.5])
def test_scattered_bad_probes_are_nobodys_fault(share: float) -> None:
    """Among ten thousand ports some have all their probes bad by chance."""
    for seed in range(5):
        result = found(np.ones(NODES * len(STEPS), dtype=bool), hit=share, seed=seed)
        assert (result.nodes, result.leaves, result.rails) == ((), (), ()), result
    beside = found(touching(700), noise=min(share, 0.1))
    assert beside.nodes == ("n700",)


def test_weak_signs_name_shared_parts_only() -> None:
    assert found(through("leaf3"), hit=0.8, noise=0.03, weak=True).leaves == ("leaf3",)
    assert found(through("rail5"), hit=0.8, noise=0.03, weak=True).rails == ("rail5",)
    assert found(touching(7), noise=0.02, weak=True) == Explanation()
    nothing = np.zeros(NODES * len(STEPS), dtype=bool)
    for seed in range(20):
        assert found(nothing, noise=0.05, weak=True, seed=seed) == Explanation()


def test_half_of_all_probes_bad_is_settled_in_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node looks a little guilty: no round for each of them."""
    rounds = 0
    counts = blame_module._Search._counts

    def counted(self: blame_module._Search) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        nonlocal rounds
        rounds += 1
        return counts(self)

    monkeypatch.setattr(blame_module._Search, "_counts", counted)
    everything = np.ones(NODES * len(STEPS), dtype=bool)
    for share in (0.3, 0.5, 0.58):
        found(everything, hit=share)
    assert rounds <= 3 * 18


def test_two_leaves_that_only_reach_each_other_badly_are_not_told_apart() -> None:
    names = [f"n{i}" for i in range(12)]
    topology = Topology()
    for i, name in enumerate(names):
        topology.apply(
            TopologyEvent(
                entity=f"node:{name}", origin="scheduler", valid_from_ns=1, attributes={"leaf": f"leaf{i // 6}"}
            )
        )
    keys = [(a, b) for a in names for b in names if a != b]
    crossing = np.array([int(a[1:]) // 6 != int(b[1:]) // 6 for a, b in keys])
    result = explain(keys, crossing, topology)
    assert not result.leaves
    assert not result.nodes


def test_what_is_not_known_says_nothing() -> None:
    parts, _ = mesh()
    bad = touching(700)
    known = ~touching(*range(0, 600))
    assert blame(parts, bad, known).nodes == ("n700",)
    assert blame(parts, np.zeros(len(bad), dtype=bool), np.zeros(len(bad), dtype=bool)) == Explanation()


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_small_meshes_blame_one_node_or_nobody(nodes: int) -> None:
    names = "abcdefgh"[:nodes]
    keys = [(a, b) for a in names for b in names if a != b]
    result = explain(keys, np.array(["b" in pair for pair in keys]), Topology())
    assert result.nodes == (("b",) if nodes > 2 else ())
    assert explain(keys, np.ones(len(keys), dtype=bool), Topology()).fabric is (nodes > 2)
