"""Who is to blame: the fewest causes that explain all evidence of a job.

A cause covers elements of the evidence: a node its own channels, a port its own, a leaf switch the ports of its nodes on one rail, a rail
that rail's ports everywhere, a rack, power unit or cooling zone the nodes in it. If it is at work, what it covers is shifted by a common
amount; the gain in log-likelihood of the best shift, less a price for each kind of cause, is its net gain. Of nodes the mean of the last
rounds' gains is looked at as well, at a price of its own. Causes are taken greedily, each time with what is already explained left out;
where nothing has a net gain, nobody is to blame: what remains is imbalance or chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from detectors.relation.features import CLOCK, CPU, DATA, ERRORS, INLET, LOCAL, MARKS, OWN, POWER, RTT, SPEED, TEMP
from detectors.relation.graph import Graph, Relation
from detectors.relation.groups import Groups
from detectors.relation.judge import LONG, Evidence

F32 = NDArray[np.float32]
Ints = NDArray[np.int64]

KINDS = ("node", "port", "leaf", "rail", "rack", "pdu", "zone")
SLOW = (LOCAL, DATA, OWN)
AROUND = (CLOCK, TEMP, INLET, POWER, CPU)
"""What explains why a node is slow, and is no slowness by itself."""
EXPLAINED = (CLOCK, CPU)
"""What makes a node slow by itself. Who is late for such a reason is no part of a job's restlessness, and need not stand out from it."""
SHARED = (LOCAL, CLOCK, TEMP, INLET, POWER)
SUSPECT = 1.5
DISTINCT = 3.0
"""By so much the time in kernels of one member of an expert group has to exceed that of the others to be its own."""
COMMON_SHIFT = 1.0
"""What neighbours share without a common cause (weather, phases of a step, other jobs' traffic): a shared cause must shift them by more."""
STEADY, BORNE_OUT = 4, 2.0
"""Rounds over which gains of nodes are averaged; such a mean counts up to so many times what the node gains now (for what another cause
explains is gone from that), and where step clocks say now that the node is late: who only computes more is restless and not slow."""
CROWDED = 1.5
"""Restless is a job at least as much as the third of its nodes stands out now, so many times: two may be sick at once."""
MOST_CAUSES = 4
LEAST_MEMBERS = 3
SHARE = 0.6
NAMED = 5


@dataclass(frozen=True)
class Cause:
    """A candidate.

    Attributes
    ----------
    members
        Nodes that it covers.
    rail
        The rail that it is about, -1 for none.
    gain
        Log-likelihood gained, less its price.
    channels
        What shows it, strongest first.
    rounds
        Over which its evidence was gathered: the next round's is the same for the most part.
    probability
        Among the causes that explain the same evidence, nobody included.
    others
        (kind, name, probability) of those.
    """

    kind: str
    name: str
    members: tuple[int, ...]
    rail: int
    gain: float
    channels: tuple[str, ...] = ()
    rounds: int = LONG
    probability: float = 0.0
    others: tuple[tuple[str, str, float], ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """What makes it the same cause in the next round."""
        return self.kind, self.name


def attribute(
    evidence: Evidence, graph: Graph, prices: Mapping[str, float], rails: tuple[str, ...], steady: F32 | None = None
) -> list[Cause]:
    """The causes that explain a job's evidence, in the order in which they were taken; `steady` is what nodes gained in the mean of the
    last rounds (`Opinions.steady`), where that is known."""
    left = Evidence(own_of_group(evidence.node, graph), evidence.port.copy())
    found: list[Cause] = []
    while len(found) < MOST_CAUSES:
        parts = list(_parts(left, graph, prices, rails, steady))
        if max((float(part.gains.max(initial=-np.inf)) for part in parts), default=0.0) <= 0.0:
            break
        every = (cause for part in parts for cause in part.causes())
        ranked = sorted(every, key=lambda cause: (-cause.gain, cause.key))
        found.append(_weighed(ranked))
        _explain(left, ranked[0], graph)
    return found


@dataclass(frozen=True)
class _Part:
    """Gains of one kind of cause, prices paid, and what makes causes of the best few: only asked for where somebody gains anything."""

    gains: F32
    causes: Callable[[], Iterator[Cause]]


def candidates(left: Evidence, graph: Graph, prices: Mapping[str, float], rails: tuple[str, ...]) -> Iterator[Cause]:
    """The best few causes of each kind, their prices paid."""
    for part in _parts(left, graph, prices, rails, None):
        yield from part.causes()


def _parts(
    left: Evidence, graph: Graph, prices: Mapping[str, float], rails: tuple[str, ...], steady: F32 | None
) -> Iterator[_Part]:
    yield _nodes(left, graph, prices, steady)
    if left.port.shape[2]:
        yield _ports(left, graph, prices, rails)
        yield from _switches(left, graph, prices, rails)
    for kind in ("rack", "pdu", "zone"):
        if kind in graph.relations:
            yield _places(left, graph.relations[kind], prices)


def own_of_group(node: F32, graph: Graph) -> F32:
    """Evidence in which time in kernels counts for one member of each expert group only: tokens are exchanged within them, so that all
    are as long in kernels as the slowest. It is the one that computes most, if any does, whoever waits for input, or who is late alone."""
    relation = graph.relations.get("ep")
    if relation is None:
        return node.copy()
    found = node.copy()
    inside = np.flatnonzero(relation.group >= 0)
    group = relation.group[inside]
    most = np.full(len(relation.names), -np.inf)
    np.maximum.at(most, group, node[OWN, inside])
    middle = Groups.of(relation.group).messages(node[LOCAL][None])[0][0, inside]
    itself = (node[OWN, inside] > SUSPECT) & (node[OWN, inside] >= most[group])
    apart = (node[DATA, inside] > SUSPECT) | (node[LOCAL, inside] - middle > DISTINCT)
    found[LOCAL, inside] = np.where(itself | apart, node[LOCAL, inside], np.minimum(node[LOCAL, inside], 0.0))
    return found


def node_gains(node: F32) -> F32:
    """Gain of blaming each node alone: its slowness, and as much again where its surroundings explain it."""
    slow = 0.5 * np.square(np.maximum(node[list(SLOW)], 0.0)).sum(axis=0)
    around = 0.5 * np.square(np.maximum(node[list(AROUND)], 0.0)).sum(axis=0)
    return np.asarray(slow + np.minimum(around, slow), dtype=np.float32)


def unexplained(node: F32) -> F32:
    """Share of each node's slowness for which its clock or processor give no reason."""
    slow = 0.5 * np.square(np.maximum(node[list(SLOW)], 0.0)).sum(axis=0)
    reason = 0.5 * np.square(np.maximum(node[list(EXPLAINED)], 0.0)).sum(axis=0)
    return np.asarray(1.0 - np.minimum(reason, slow) / np.maximum(slow, 1e-6), dtype=np.float32)


def borne_out(steady: F32, gains: F32) -> F32:
    """Means of gains, as far as the gains of now bear them out."""
    return np.asarray(np.minimum(steady, np.float32(BORNE_OUT) * gains))


def _nodes(left: Evidence, graph: Graph, prices: Mapping[str, float], steady: F32 | None) -> _Part:
    now, beyond = node_gains(left.node), unexplained(left.node)
    alone = gains = now - prices["node"] - beyond * max(prices.get("restless", 0.0), CROWDED * third(now * beyond))
    if steady is not None:
        late = left.node[[LOCAL, DATA]].max(axis=0) > SUSPECT
        price = prices["steady"] + beyond * max(prices.get("restless_steady", 0.0), CROWDED * third(steady * beyond))
        gains = np.maximum(alone, np.where(late, borne_out(steady, now), np.float32(0.0)) - price)

    def causes() -> Iterator[Cause]:
        names = ("local", "data", "own", "clock", "temp", "inlet", "power", "cpu")
        for node in _largest(gains):
            seen = (c for c in (*SLOW, *AROUND) if left.node[c, node] > SUSPECT)
            shown = tuple(names[c] for c in sorted(seen, key=lambda c: -left.node[c, node]))
            rounds = LONG if gains[node] == alone[node] else LONG + STEADY - 1
            yield Cause("node", graph.nodes[node], (node,), -1, float(gains[node]), shown, rounds)

    return _Part(gains, causes)


def third(values: F32) -> float:
    """The third largest, 0 of fewer."""
    return float(np.partition(values, -3)[-3]) if len(values) > 2 else 0.0


def port_gains(port: F32) -> F32:
    """Gain of blaming each port alone: what its counters say, and as much again of the round trip, which two ends and the way between
    share; a round trip alone counts half."""
    counted = 0.5 * np.square(np.maximum(port[[MARKS, ERRORS, SPEED]], 0.0)).sum(axis=0)
    trip = 0.5 * np.square(np.maximum(port[RTT], 0.0))
    return np.asarray(counted + np.maximum(np.minimum(trip, counted), 0.5 * trip), dtype=np.float32)


def _ports(left: Evidence, graph: Graph, prices: Mapping[str, float], rails: tuple[str, ...]) -> _Part:
    gains = port_gains(left.port) - prices["port"]

    def causes() -> Iterator[Cause]:
        for place in _largest(gains.ravel()):
            node, rail = divmod(place, gains.shape[1])
            shown = _shown(left.port[:, node, rail])
            yield Cause("port", f"{graph.nodes[node]}/{rails[rail]}", (node,), rail, float(gains[node, rail]), shown)

    return _Part(gains, causes)


def _switches(left: Evidence, graph: Graph, prices: Mapping[str, float], rails: tuple[str, ...]) -> Iterator[_Part]:
    everywhere = Relation("job", np.zeros(len(graph.nodes), dtype=np.int64), ("",))
    for kind, relation in (("rail", everywhere), ("leaf", graph.relations.get("leaf"))):
        if relation is not None and not (kind == "rail" and len(relation.names) > 1):
            yield _switches_of(kind, relation, left, prices[kind], rails)


def _switches_of(kind: str, relation: Relation, left: Evidence, price: float, rails: tuple[str, ...]) -> _Part:
    raised = (left.port.max(axis=0) > SUSPECT).astype(np.float32)
    gains, sizes, shares = _shared(left.port, raised, relation)
    net = _paid(gains, (sizes >= LEAST_MEMBERS) & (shares >= SHARE), price)

    def causes() -> Iterator[Cause]:
        for rail in range(left.port.shape[2]):
            for number in _largest(net[:, rail], 2):
                members = relation.members(number)
                name = f"rail{rail}" if kind == "rail" else f"{relation.names[number]}/rail{rail}"
                shown = _shown(left.port[:, members, rail].mean(axis=1))
                yield Cause(kind, name, tuple(members.tolist()), rail, float(net[number, rail]), shown)

    return _Part(net, causes)


def _places(left: Evidence, relation: Relation, prices: Mapping[str, float]) -> _Part:
    slow = left.node[[LOCAL, OWN, CLOCK]].max(axis=0)
    shown = left.node[list(SHARED)]
    gains, sizes, shares = (
        a[:, 0] for a in _shared(shown[..., None], (slow > SUSPECT).astype(np.float32)[:, None], relation)
    )
    whole = sizes >= len(relation.group)
    net = _paid(gains, (sizes >= LEAST_MEMBERS) & (shares >= SHARE) & ~whole, prices[relation.kind])

    def causes() -> Iterator[Cause]:
        names = np.array(["local", "clock", "temp", "inlet", "power"])
        for number in _largest(net, 2):
            members = relation.members(number)
            means = shown[:, members].mean(axis=1)
            order = [i for i in np.argsort(-means).tolist() if means[i] > 0.5]
            by = tuple(names[order].tolist())
            yield Cause(relation.kind, relation.names[number], tuple(members.tolist()), -1, float(net[number]), by)

    return _Part(net, causes)


def _paid(gains: F32, plausible: NDArray[np.bool_], price: float) -> F32:
    return np.asarray(np.where(plausible, gains, 0.0) - price, dtype=np.float32)


def _shared(values: F32, raised: F32, relation: Relation) -> tuple[F32, F32, F32]:
    """Of each group and rail: gain of a common shift, number of members, share of members that are raised; from channels × nodes × rails,
    and nodes × rails."""
    known = relation.group >= 0
    group, count, rails = relation.group[known], len(relation.names), values.shape[2]
    cell = (group[:, None] * rails + np.arange(rails)).ravel()

    def sums(row: F32) -> NDArray[np.float64]:
        found = np.bincount(cell, weights=row[known].ravel(), minlength=count * rails)
        return np.asarray(found, dtype=np.float64).reshape(count, rails)

    sizes = np.maximum(np.bincount(group, minlength=count), 1).astype(np.float32)[:, None]
    totals = np.stack([sums(row) for row in values])
    gains = (0.5 * sizes * np.square(np.maximum(totals / sizes - COMMON_SHIFT, 0.0))).sum(axis=0)
    shares = sums(raised) / sizes
    return gains.astype(np.float32), sizes, shares.astype(np.float32)


def _explain(left: Evidence, cause: Cause, graph: Graph) -> None:
    """Leave out what a cause explains, and its echo: who shares kernels or replicas with a member shows some of it as well."""
    members = np.array(cause.members)
    echo = np.zeros(len(graph.nodes), dtype=np.bool_)
    for kind in ("ep", "pp"):
        group = graph.group_of(kind)
        echo |= np.isin(group, group[members]) & (group >= 0)
    echo[members] = False
    if cause.rail >= 0 and cause.kind != "node":
        left.port[:, members, cause.rail] = 0.0
        if "ep" in graph.relations:  # tokens are exchanged inside kernels: there, a slow network makes own time longer
            echo[members] = True
            left.node[LOCAL, echo] = np.minimum(left.node[LOCAL, echo], 0.0)
        return
    loudest = left.node[list(SLOW)][:, members].max(axis=1)
    left.node[:, members] = 0.0
    if cause.kind == "node":
        left.port[:, members] = 0.0
    for channel, most in zip(SLOW, loudest.tolist(), strict=True):
        fainter = echo & (left.node[channel] <= most + 1.0) & (left.node[channel] > 0.0)
        left.node[channel, fainter] = 0.0


def _weighed(ranked: list[Cause]) -> Cause:
    """The first of the candidates, with its probability among those that overlap with it, and nobody."""
    best = ranked[0]
    mine = set(best.members)
    rivals = [cause for cause in ranked[1:] if cause.gain > -20.0 and mine & set(cause.members)][:NAMED]
    weights = np.exp(np.clip(np.array([0.0, *(cause.gain - best.gain for cause in rivals), -best.gain]), -50.0, 0.0))
    weights /= weights.sum()
    others = [(c.kind, c.name, round(float(w), 4)) for c, w in zip(rivals, weights[1:-1], strict=True)]
    others.append(("nobody", "", round(float(weights[-1]), 4)))
    return replace(best, probability=float(weights[0]), others=tuple(others))


def _largest(gains: F32, count: int = 3) -> list[int]:
    """Places of the largest gains, those that gain anything like their price."""
    some = np.argpartition(-gains, min(count, len(gains)) - 1)[:count] if len(gains) else np.zeros(0, dtype=np.int64)
    return [int(i) for i in some if gains[i] > -20.0]


def _shown(values: F32) -> tuple[str, ...]:
    names = {RTT: "rtt", MARKS: "marks", ERRORS: "errors", SPEED: "speed"}
    return tuple(names[i] for i in np.argsort(-values).tolist() if values[i] > SUSPECT)
