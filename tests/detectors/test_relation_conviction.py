"""Isolating asks more than naming: odds that add up, witnesses of two kinds, no crowd, and neighbours that are not late as well."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.relation.attribution import KINDS, STEADY, Cause, attribute, node_gains, own_of_group
from detectors.relation.conviction import convict, late_among_others, witnessed_node, witnessed_port
from detectors.relation.features import CLOCK, DATA, ERRORS, LOCAL, MARKS, OWN, RTT, SPEED, Past, Round
from detectors.relation.graph import Graph, Relation
from detectors.relation.judge import LATE, LONG, Evidence
from detectors.relation.opinions import AT_ONCE, FIRST_RESTLESS, GONE_ROUNDS, RESTLESS, Opinions
from detectors.state import decode_state, encode_state

NODES, RAILS = 64, ("0", "1", "2", "3")
PRICES = dict.fromkeys((*KINDS, "steady"), 12.0)


def relation(kind: str, size: int) -> Relation:
    group = np.arange(NODES) // size
    return Relation(kind, group, tuple(f"{kind}-{i}" for i in range(int(group.max()) + 1)))


GRAPH = Graph(
    tuple(f"n{i:02d}" for i in range(NODES)),
    {"rack": relation("rack", 8), "leaf": relation("leaf", 32), "job": relation("job", NODES)},
)


def nothing() -> Evidence:
    return Evidence(np.zeros((8, NODES), dtype=np.float32), np.zeros((4, NODES, 4), dtype=np.float32))


def effects(late: dict[int, float]) -> list[np.ndarray]:
    found = np.zeros((4, NODES), dtype=np.float32)
    for node, much in late.items():
        found[LATE, node] = much
    return [found] * 6


def isolated(evidence: Evidence, late: dict[int, float], rounds: int = 14) -> dict[str, int]:
    """Names whose node may be isolated, with the round in which that was so first."""
    opinions = Opinions(restless=0.0)
    found: dict[str, int] = {}
    for number in range(1, rounds + 1):
        standing, _ = opinions.take(attribute(evidence, GRAPH, opinions.prices(PRICES), RAILS), number)
        convict(standing, evidence, effects(late), GRAPH)
        found |= {o.name: number for o, _ in standing if o.isolates and o.name not in found}
    return found


def slow(*nodes: int, witness: bool = True) -> Evidence:
    found = nothing()
    found.node[LOCAL, list(nodes)] = 8.0
    found.node[OWN, list(nodes)] = 7.0 if witness else 0.0
    return found


def test_a_slow_node_is_isolated_when_odds_have_added_up_and_not_before() -> None:
    found = isolated(slow(9), {9: 0.1})
    assert list(found) == ["n09"]
    assert 6 <= found["n09"] <= 10


def test_what_only_step_clocks_say_isolates_nobody() -> None:
    assert isolated(slow(9, witness=False), {9: 0.1}) == {}


def test_a_crowd_has_a_cause_that_is_not_understood() -> None:
    assert sorted(isolated(slow(9, 40), {9: 0.1, 40: 0.1})) == ["n09", "n40"]
    assert isolated(slow(9, 40, 60), {9: 0.1, 40: 0.1, 60: 0.1}) == {}


def test_neighbours_that_are_late_as_well_protect_a_node() -> None:
    late = np.zeros(NODES, dtype=np.float32)
    late[8:16] = 0.1
    assert not late_among_others(late, 9, GRAPH)
    late[8:16] = 0.0
    late[9] = 0.1
    assert late_among_others(late, 9, GRAPH)
    assert isolated(slow(9), dict.fromkeys(range(8, 16), 0.1)) == {}


@pytest.mark.parametrize(
    ("shown", "enough"),
    [({RTT: 12.0}, False), ({RTT: 12.0, MARKS: 8.0}, True), ({ERRORS: 8.0}, True), ({SPEED: 8.0}, True), ({MARKS: 12.0}, False)],
)  # fmt: skip
def test_a_port_needs_counters_of_its_own(shown: dict[int, float], enough: bool) -> None:
    port = np.zeros(4, dtype=np.float32)
    for channel, value in shown.items():
        port[channel] = value
    assert witnessed_port(port) is enough


@pytest.mark.parametrize(
    ("shown", "enough"),
    [({LOCAL: 9.0}, False), ({LOCAL: 9.0, OWN: 4.0}, True), ({LOCAL: 9.0, CLOCK: 4.0}, True), ({CLOCK: 9.0}, False),
     ({LOCAL: 5.0, DATA: 5.0}, True)],
)  # fmt: skip
def test_a_node_needs_witnesses_of_two_kinds(shown: dict[int, float], enough: bool) -> None:
    node = np.zeros(8, dtype=np.float32)
    for channel, value in shown.items():
        node[channel] = value
    assert witnessed_node(node) is enough


def test_in_an_expert_group_the_one_that_computes_most_is_slow() -> None:
    graph = Graph(GRAPH.nodes, {**GRAPH.relations, "ep": relation("ep", 4)})
    evidence = nothing()
    evidence.node[LOCAL, 8:12] = 8.0
    evidence.node[OWN, 10] = 5.0
    assert own_of_group(evidence.node, graph)[LOCAL, 8:12].tolist() == [0.0, 0.0, 8.0, 0.0]
    assert [c.key for c in attribute(evidence, graph, PRICES, RAILS)] == [("node", "n10")]


def test_accusing_is_dearer_where_somebody_always_stands_out() -> None:
    calm, restless = Opinions(), Opinions()
    for _ in range(100):
        calm.steady(nothing().node)
        calm.learn(False)
        restless.steady(slow(3, 4).node)
        restless.learn(False)
    assert Opinions().prices(PRICES)["restless"] == RESTLESS * FIRST_RESTLESS
    assert calm.prices(PRICES)["restless"] < 1.0
    assert restless.prices(PRICES)["restless"] > 100.0
    assert {kind: restless.prices(PRICES)[kind] for kind in PRICES} == PRICES


def test_in_a_restless_job_a_node_is_named_whose_clock_says_why() -> None:
    prices = {**PRICES, "restless": 60.0}
    late, why = slow(9, witness=False), slow(9, witness=False)
    why.node[CLOCK, 9] = 9.0
    assert attribute(late, GRAPH, prices, RAILS) == []
    assert [c.key for c in attribute(why, GRAPH, prices, RAILS)] == [("node", "n09")]


def test_a_crowd_that_stands_out_now_makes_a_job_restless_at_once_and_two_do_not() -> None:
    two, crowd = slow(9, 30), slow(9, 30, 50)
    assert {c.key for c in attribute(two, GRAPH, PRICES, RAILS)} == {("node", "n09"), ("node", "n30")}
    assert attribute(crowd, GRAPH, PRICES, RAILS) == []
    means = node_gains(crowd.node)
    assert attribute(crowd, GRAPH, PRICES, RAILS, means) == [], "means of gains as well"


def test_what_gains_much_more_than_its_price_is_said_at_once_and_a_port_is_not() -> None:
    sure, port = attribute(slow(9), GRAPH, PRICES, RAILS), nothing()
    port.port[[RTT, MARKS], 9, 1] = 9.0
    assert [o.name for o, _ in Opinions().take(sure, 1)[0]] == ["n09"]
    opinions, causes = Opinions(), attribute(port, GRAPH, PRICES, RAILS)
    assert causes[0].gain > AT_ONCE
    assert opinions.take(causes, 1)[0] == []
    assert [o.name for o, _ in opinions.take(causes, 2)[0]] == ["n09/1"]


def test_what_a_shared_cause_leaves_behind_is_no_cause_of_its_own() -> None:
    rack = Cause("rack", "rack-1", tuple(range(8, 16)), -1, 50.0)
    inside, outside = (Cause("node", f"n{i:02d}", (i,), -1, 30.0) for i in (9, 30))
    opinions = Opinions()
    for number in range(3):
        opinions.take([rack], number)
    assert [o.name for o, _ in opinions.take([inside, outside], 4)[0]] == ["n30"]
    for number in range(GONE_ROUNDS):
        opinions.take([], 5 + number)
    assert [o.name for o, _ in opinions.take([inside], 20)[0]] == ["n09"], "a fault of its own, later"


def test_who_was_accused_beside_a_shared_cause_stays_so_when_that_ends() -> None:
    rack, inside = Cause("rack", "rack-1", tuple(range(8, 16)), -1, 50.0), Cause("node", "n09", (9,), -1, 30.0)
    opinions = Opinions()
    opinions.take([rack, inside], 1)
    opinions.take([rack, inside], 2)
    assert [o.name for o, _ in opinions.take([inside], 3)[0]] == ["n09"]


def test_what_stands_out_while_somebody_is_accused_teaches_nothing() -> None:
    opinions = Opinions()
    opinions.take([Cause("node", "n03", (3,), -1, 20.0)], 1)
    opinions.steady(slow(3).node)
    opinions.learn(False)
    assert opinions.restless == FIRST_RESTLESS


def restless_job(opinions: Opinions, rounds: int, *, sick: int = -1) -> list[list[tuple[str, str]]]:
    """Rounds in which ever other innocents stand out by 5 deviations, and one node by 4.5 in all of them; who is blamed in each."""
    found = []
    for number in range(rounds):
        evidence = nothing()
        evidence.node[LOCAL, [(7 * number) % NODES, (7 * number + 3) % NODES]] = 5.0
        if sick >= 0:
            evidence.node[LOCAL, sick] = 4.5
            evidence.node[OWN, sick] = 4.5
        steady = opinions.steady(own_of_group(evidence.node, GRAPH))
        causes = attribute(evidence, GRAPH, opinions.prices(PRICES), RAILS, steady)
        opinions.learn(bool(causes))
        opinions.take(causes, number)
        found.append([cause.key for cause in causes])
    return found


def test_who_is_sick_stays_so_while_healthy_imbalance_moves_around() -> None:
    opinions = Opinions()
    assert restless_job(opinions, 60) == [[]] * 60
    assert opinions.prices(PRICES)["restless"] > 30.0, "a single round's gain of 20 is nothing in this job"
    blamed = restless_job(opinions, 8, sick=20)
    assert blamed[: STEADY - 1] == [[]] * (STEADY - 1)
    assert blamed[STEADY:] == [[("node", "n20")]] * (8 - STEADY)


def test_a_mean_counts_only_as_far_as_the_round_bears_it_out() -> None:
    opinions = Opinions(restless=20.0, restless_steady=0.0)
    for _ in range(STEADY):
        steady = opinions.steady(slow(9).node)
    assert [c.key for c in attribute(slow(9), GRAPH, opinions.prices(PRICES), RAILS, steady)] == [("node", "n09")]
    assert attribute(nothing(), GRAPH, opinions.prices(PRICES), RAILS, steady) == []
    computes_more = nothing()
    computes_more.node[OWN, 9] = 5.0
    assert attribute(computes_more, GRAPH, opinions.prices(PRICES), RAILS, steady) == []


def test_evidence_over_more_rounds_is_counted_once() -> None:
    opinions = Opinions(restless=20.0, restless_steady=0.0)
    steady = np.zeros(NODES, dtype=np.float32)
    steady[9] = 50.0
    by_mean = attribute(slow(9), GRAPH, opinions.prices(PRICES), RAILS, steady)[0]
    assert by_mean.rounds == LONG + STEADY - 1
    assert attribute(slow(9), GRAPH, PRICES, RAILS)[0].rounds == LONG


def test_who_stands_out_alone_does_not_make_his_own_accusation_dearer() -> None:
    opinions = Opinions()
    for _ in range(100):
        opinions.steady(slow(3).node)
        opinions.learn(False)
    assert opinions.prices(PRICES)["restless_steady"] < 1.0
    assert opinions.prices(PRICES)["restless"] < 1.0


def test_what_nodes_gained_lately_is_in_the_snapshot() -> None:
    opinions = Opinions()
    for _ in range(STEADY):
        opinions.steady(slow(3).node)
    again = decode_state(encode_state(opinions), Opinions)
    assert again.steady(slow(3).node).tolist() == opinions.steady(slow(3).node).tolist()


def port_round(number: int, asked: float, answered: float) -> Round:
    stream = np.random.default_rng(number)
    port = np.zeros((5, 8, 4), dtype=np.float32)
    port[[RTT, 4]] = -1.0 + 0.01 * stream.standard_normal((2, 8, 4))
    port[RTT, 2, 1] += asked
    port[4, 2, 1] += answered
    return Round(number, 1000.0, np.zeros((8, 8), dtype=np.float32), np.zeros((8, 2), dtype=np.float32), port)


@pytest.mark.parametrize(("asked", "answered", "sick"), [(0.5, 0.45, True), (0.5, 0.0, False), (0.0, 0.5, False)])
def test_a_trip_that_is_slow_in_one_direction_is_the_other_ends(asked: float, answered: float, sick: bool) -> None:
    past, nobody = Past(), np.zeros(8, dtype=np.bool_)
    for number in range(20):
        past.advance(port_round(number, 0.0, 0.0), nobody)
    found = past.advance(port_round(20, asked, answered), nobody).port[RTT, 2, 1]
    assert (found > 5.0) == sick


def test_the_accused_learn_what_all_learn_and_nothing_else() -> None:
    past, held = Past(), np.arange(8) == 2
    nobody = np.zeros(8, dtype=np.bool_)
    values = np.zeros((8, 8), dtype=np.float32)
    gpu, port = np.zeros((8, 2), dtype=np.float32), np.zeros((5, 8, 0), dtype=np.float32)
    for number in range(20):
        past.advance(Round(number, 1.0, values, gpu, port), nobody)
    everybody = values + np.float32(0.001)
    everybody[LOCAL, 2] = 0.2
    for number in range(60):
        past.advance(Round(number, 1.0, everybody, gpu, port), held)
    assert past.node[LOCAL, 2] == pytest.approx(past.node[LOCAL, 3], abs=1e-6)
    assert past.node[LOCAL, 3] > 0.0005
