"""A node that moved its traffic off a dead link by itself is not taken out for that link, and for nothing else is it spared."""

from __future__ import annotations

import pytest

from streams.causes import Finding, choose
from trainwarden.policy import Policy
from trainwarden.records import Entity, EntityKind, Verdict


def finding(kind: str, node: str = "n1", cleared: bool = False) -> Finding:
    verdict = Verdict(kind=kind, entity=Entity(EntityKind.NODE, node, node), confidence=0.9)
    return Finding(verdict, 0, 0, 0, cleared=cleared)


@pytest.mark.parametrize(
    ("kinds", "leading"),
    [
        (("link_down", "link_rerouted"), "link_rerouted"),
        (("link_slow", "link_rerouted"), "link_rerouted"),
        (("node_lost", "link_rerouted"), "node_lost"),
        (("rank_frozen", "link_rerouted"), "rank_frozen"),
        (("fatal_code", "link_down", "link_rerouted"), "fatal_code"),
    ],
)
def test_who_leads(kinds: tuple[str, ...], leading: str) -> None:
    findings = [finding(kind) for kind in kinds]
    assert choose(findings, Policy()).verdict.kind == leading
    assert choose(findings[::-1], Policy()).verdict.kind == leading


def test_a_way_round_that_is_over_hides_nothing_and_one_of_another_node_neither() -> None:
    assert choose([finding("link_down"), finding("link_rerouted", cleared=True)], Policy()).verdict.kind == "link_down"
    assert choose([finding("link_down"), finding("link_rerouted", "n2")], Policy()).verdict.kind == "link_down"
