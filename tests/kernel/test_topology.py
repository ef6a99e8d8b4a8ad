"""Topology: valid time, precedence and contradictions."""

from __future__ import annotations

from trainwarden.records import TopologyEvent
from trainwarden.topology import Topology


def job(attempt: int, ranks: dict[int, str], origin: str = "hook", at: int = 1) -> TopologyEvent:
    """A placement event."""
    return TopologyEvent(entity="job:j", attempt=attempt, origin=origin, valid_from_ns=at,
                         ranks=tuple((rank, node, "cpu") for rank, node in ranks.items()))  # fmt: skip


def test_nodes_of_one_attempt_add_up() -> None:
    topology = Topology()
    for rank, node in enumerate(("n0", "n1", "n2")):
        assert topology.apply(job(1, {rank: node})) is None
    layout = topology.job("j")
    assert layout is not None
    assert layout.nodes == ("n0", "n1", "n2")
    assert layout.ranks_on("n1") == (1,)
    assert topology.job_of("n2") == layout


def test_a_newer_attempt_replaces_an_older_one_and_not_the_reverse() -> None:
    topology = Topology()
    topology.apply(job(1, {0: "n0", 1: "n1"}))
    topology.apply(job(2, {0: "n1"}, at=2))
    topology.apply(job(1, {1: "n0"}, at=3))
    layout = topology.job("j")
    assert layout is not None
    assert (layout.attempt, layout.nodes) == (2, ("n1",))
    assert topology.job_of("n0") is None


def test_two_nodes_that_claim_one_rank_are_a_contradiction() -> None:
    topology = Topology()
    topology.apply(job(1, {0: "n0"}))
    sentence = topology.apply(job(1, {0: "n1"}))
    assert sentence is not None
    assert "rank 0 is claimed by n0 and by n1" in sentence


def test_an_operator_outranks_the_hook() -> None:
    topology = Topology()
    topology.apply(TopologyEvent(entity="node:n0", origin="operator", valid_from_ns=1, attributes={"rack": "r1"}))
    topology.apply(TopologyEvent(entity="node:n0", origin="inferred", valid_from_ns=9, attributes={"rack": "r9"}))
    assert topology.attributes("n0") == {"rack": "r1"}


def test_a_removed_node_is_forgotten() -> None:
    topology = Topology()
    topology.apply(TopologyEvent(entity="node:n0", valid_from_ns=1, attributes={"rack": "r1"}))
    topology.apply(TopologyEvent(entity="node:n0", removed=True))
    assert topology.nodes() == ()


def test_a_nameless_entity_is_a_sentence() -> None:
    assert "expected node:<name>" in str(Topology().apply(TopologyEvent(entity="rack", origin="hook")))


def test_what_was_known_already_leaves_the_layout_that_is_there() -> None:
    topology = Topology()
    for rank, node in enumerate(("n0", "n1")):
        topology.apply(job(1, {rank: node}))
    before = topology.job("j")
    topology.apply(job(1, {1: "n1"}, at=5))
    assert topology.job("j") is before


def test_a_copy_goes_its_own_way_and_shares_what_did_not_change() -> None:
    topology = Topology()
    topology.apply(job(1, {0: "n0"}))
    topology.apply(TopologyEvent(entity="node:n0", attributes={"rack": "r1"}))
    before = topology.copy()
    topology.apply(TopologyEvent(entity="node:n0", attributes={"rack": "r2"}, valid_from_ns=2))
    topology.apply(TopologyEvent(entity="node:n9"))
    assert topology.job("j") is before.job("j")
    topology.apply(job(1, {1: "n1"}))
    layout = before.job("j")
    assert layout is not None
    assert (before.attributes("n0"), before.nodes(), layout.nodes) == ({"rack": "r1"}, ("n0",), ("n0",))
    assert topology.attributes("n0") == {"rack": "r2"}
