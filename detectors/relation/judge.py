"""From rounds to evidence: what each node and port shows beyond what its past, its relatives and chance explain.

`Judge` is one job's state. The evidence of an element is the sum of its residuals over the last rounds, in units that are standard
normal in health (calibrated on the model's healthy rounds), so that evidences add up in likelihoods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.relation.features import DATA, LOCAL, OWN, Innovations, Past, Round
from detectors.relation.graph import Graph
from detectors.relation.groups import Groups
from detectors.state import Array
from models.relation import form
from models.relation.form import RELATIONS, Served

F32 = NDArray[np.float32]
Frozen = tuple[NDArray[np.bool_], NDArray[np.bool_] | None]
"""Nodes, and nodes × rails, whose past is not learnt now."""

SHORT, LONG = 2, 6
"""Rounds over which residuals are summed: ten seconds for what is strong, thirty for what is weak."""
RESIDUAL_LIMIT = 5.0
"""No single round convicts: a pause of seconds says as much as a slowness of some per cent, and must last as long."""
CAP = 12.0
APART, APART_DEVIATIONS, APART_FLOOR, APART_PEERS = float(np.log(1.2)), 8.0, 0.016, 4
"""Log of the ratio and robust deviations by which a node stands apart, least spread of its peers, and their least number."""
EFFECTS, LATE = 3, 3
LEAST_EFFECT = np.array([0.012, 0.010, 0.03], dtype=np.float32)
"""Less than so much longer own time (share), input wait (share of a step) or computing (share) is no fault, however sure it is."""
EXCUSED = np.array([0.25, 0.25, 0.15, 0, 0, 0, 0, 0], dtype=np.float32)
"""Where all relatives move together, they need not move by the same: so much of the common move, one may move more."""


@dataclass(frozen=True)
class Calibration:
    """Sums of residuals → standard normal, per channel and span: what healthy sums exceed with probabilities 10^-levels.

    Attributes
    ----------
    node, port
        2 (short, long) × channels × levels, ascending.
    normal
        The standard normal's quantiles at the same levels.
    """

    node: F32
    port: F32
    normal: F32

    def evidence(self, sums: F32, table: F32) -> F32:
        """channels × entities → the same in standard units, within ±12."""
        out = np.empty_like(sums)
        for channel, row in enumerate(sums):
            quantiles = np.concatenate([[0.0], table[channel]])
            known = np.interp(np.abs(row), quantiles, np.concatenate([[0.0], self.normal]))
            beyond = np.maximum(np.abs(row) - table[channel, -1], 0.0)
            out[channel] = np.sign(row) * np.minimum(known + beyond, CAP)
        return out


@dataclass
class Related:
    """Groups of the model's relations, made once per graph."""

    graph: Graph
    groups: dict[str, Groups] = field(init=False)

    def __post_init__(self) -> None:
        wanted = {name: self.graph.relations[name].group for name in RELATIONS if name in self.graph.relations}
        if "dp" not in wanted and "learnt" in self.graph.relations:
            wanted["dp"] = self.graph.relations["learnt"].group
        self.groups = {name: Groups.of(group) for name, group in wanted.items()}

    def messages(self, node: F32, wanted: Sequence[str] = RELATIONS) -> Mapping[str, tuple[F32, F32, F32]]:
        """What is told of each node's relatives by the relations in `wanted`."""
        known = np.nan_to_num(node)
        groups = [(name, self.groups[name]) for name in wanted if name in self.groups]
        return {name: (*each.messages(known), each.others) for name, each in groups}


class Sums(msgspec.Struct):
    """Residuals of the last rounds: rounds × channels × entities, NaN where unknown; `effect` in the channels' own units."""

    node: list[Array] = []
    port: list[Array] = []
    effect: list[Array] = []

    def put(self, node: F32, port: F32, effect: F32) -> None:
        """Add a round."""
        self.node = [*self.node, node][-LONG:]
        self.port = [*self.port, port][-LONG:]
        self.effect = [*self.effect, effect][-LONG:]


@dataclass(frozen=True)
class Evidence:
    """What does not fit, in standard normal units of health, larger is sicker: channels × nodes, and channels × nodes × rails."""

    node: F32
    port: F32


class Judge(msgspec.Struct):
    """One job: past, and residuals of the last rounds. Arrays follow the nodes of the graph it was last given."""

    past: Past = msgspec.field(default_factory=Past)
    sums: Sums = msgspec.field(default_factory=Sums)
    nodes: list[str] = []

    def settle(self, graph: Graph) -> None:
        """Carry what was learnt over to the nodes of a new attempt."""
        if self.nodes == list(graph.nodes):
            return
        old = {name: number for number, name in enumerate(self.nodes)}
        self.past = self.past.kept([old.get(name, -1) for name in graph.nodes])
        self.sums, self.nodes = Sums(), list(graph.nodes)

    def residuals(self, seen: Round, related: Related, served: Served | None, frozen: Frozen) -> Innovations:
        """Take a round in; its residuals join the sums."""
        found = self.past.advance(seen, *frozen)
        if found.warm:
            away, scale, late = standardised(found, related, served)
            shown = np.concatenate([away[:EFFECTS], late[None]])
            effect = (shown * self.past.scale[[LOCAL, DATA, OWN, LOCAL], None]).astype(np.float32)
            residual = np.clip(away / scale, -RESIDUAL_LIMIT, RESIDUAL_LIMIT).astype(np.float32)
            self.sums.put(residual, np.clip(found.port, -RESIDUAL_LIMIT, RESIDUAL_LIMIT), effect)
        return found

    def evidence(self, calibration: Calibration, related: Related | None = None) -> Evidence:
        """Of the last rounds; the stronger of the short and the long span. With `related`, nodes that stand apart from peers who do
        the same work are evident by that, though nobody ever saw them better."""
        count, rails = len(self.nodes), self.past.port.shape[2]
        node = stronger(self.sums.node, calibration.node, calibration, count)
        node = of_some_effect(node, self.sums.effect)
        if related is not None and related.graph.described and "dp" in related.groups and self.sums.node:
            node[LOCAL, apart(self.past.node[LOCAL], related.groups["dp"])] = CAP
        same = [part.reshape(len(part), -1) for part in self.sums.port if part.shape[1:] == (count, rails)]
        port = stronger(same, calibration.port, calibration, count * rails)
        return Evidence(node, port.reshape(len(port), count, rails))


def standardised(found: Innovations, related: Related, served: Served | None) -> tuple[F32, F32, F32]:
    """Innovation minus expectation and its scale, channels × nodes, and how late each node is beside those who do the same work.

    Without a net, the expectation is the median of those who do the same work, or of the whole job for what work does not explain, and
    the scale is their spread. Nobody is sicker than his peers because they recovered: except for the share of computing, which falls
    for all who wait, a node has to be worse than its own past.
    """
    messages = related.messages(found.node, form.BASES if served is None else RELATIONS)
    base, spread = nearest(messages, found.node)
    if served is None:
        middle, scale = base, np.maximum(1.25 * spread, 1.0)
    else:
        given, begin = form.inputs(found.node, found.before, messages)
        middle, scale = (part.T for part in served.expect(given, begin))
    away = found.node - middle
    away = np.sign(away) * np.maximum(np.abs(away) - EXCUSED[:, None] * np.abs(base), 0.0)
    worse = np.where(away > 0, np.minimum(away, np.maximum(found.node, 0.0)), away)
    worse[OWN] = away[OWN]
    return worse, scale, found.node[LOCAL] - base[LOCAL]


def nearest(messages: Mapping[str, tuple[F32, F32, F32]], like: F32) -> tuple[F32, F32]:
    """channels × nodes: median and spread of who is to be compared, which is the same work for what depends on work, and the job else."""
    base, spread = np.zeros_like(like), np.zeros_like(like)
    for name in form.BASES:
        if name in messages:
            middle, wide, others = messages[name]
            use = np.broadcast_to(others > 0, like.shape).copy()
            use[OWN + 1 :] &= name == "job"
            base, spread = np.where(use, middle, base), np.where(use, wide, spread)
    return base, spread


def apart(local: Array, peers: Groups) -> NDArray[np.bool_]:
    """Nodes whose usual own time (log) is far above that of peers who keep together; not where more than a third would be."""
    known = np.where(np.isfinite(local), local, np.nanmedian(local) if np.isfinite(local).any() else 0.0).astype(
        np.float32
    )
    middle, spread = (rows[0] for rows in peers.messages(known[None]))
    above = np.where(np.isfinite(local), known - middle, 0.0)
    found = (
        (above > APART)
        & (above > APART_DEVIATIONS * 1.25 * np.maximum(spread, APART_FLOOR))
        & (peers.others > np.log(APART_PEERS))
    )
    crowd = np.bincount(peers.group, weights=found[peers.rows]) if peers.rows.size else np.zeros(1)
    found[peers.rows] &= 3 * crowd[peers.group] <= peers.size
    return np.asarray(found)


def of_some_effect(node: F32, effect: list[Array]) -> F32:
    """Evidence (or sums) without that of channels whose effect is too small to matter, both in the middle of the last rounds and in each
    of the last two; and who is not late beside those who do the same work is not slow, however much it seems to compute."""
    if not effect:
        return node
    found = node.copy()
    enough = _enough(middle_effect(effect)) | _enough(last_effect(effect))
    found[:EFFECTS] = np.where(enough, node[:EFFECTS], np.minimum(node[:EFFECTS], 0.0))
    return found


def _enough(effect: F32) -> NDArray[np.bool_]:
    enough = effect[:EFFECTS] >= LEAST_EFFECT[:, None]
    enough[OWN] &= effect[LATE] >= LEAST_EFFECT[LOCAL]
    return np.asarray(enough)


def last_effect(effect: list[Array]) -> F32:
    """Effects × nodes: the smaller of the last two that are known, 0 where there are not two: what began lately shows here before it is in
    the middle, and a pause of one round does not."""
    recent = np.stack(effect[-LONG:])
    known = np.isfinite(recent)
    after = np.cumsum(known[::-1], axis=0)[::-1]
    least = np.where(known & (after <= 2), recent, np.inf).min(axis=0)
    return np.where(after[0] >= 2, least, 0.0).astype(np.float32)


def middle_effect(effect: list[Array]) -> F32:
    """Effects × nodes: the middle of the last rounds, the lower of two, 0 where none is known."""
    recent = np.sort(np.stack(effect[-LONG:]), axis=0)
    known = np.isfinite(recent).sum(axis=0)
    return np.asarray(
        np.nan_to_num(np.take_along_axis(recent, np.maximum(known - 1, 0)[None] // 2, axis=0)[0]), dtype=np.float32
    )


def sums_of(parts: list[Array], span: int) -> F32:
    """Sum over the last `span` rounds, over the root of the number of known ones: channels × entities, 0 where nothing is known."""
    recent = np.stack(parts[-span:])
    known = np.isfinite(recent)
    return np.asarray(np.nan_to_num(recent).sum(axis=0) / np.sqrt(np.maximum(known.sum(axis=0), 1)), dtype=np.float32)


def stronger(parts: list[Array], tables: F32, calibration: Calibration, count: int) -> F32:
    """The evidence of the span in which it is stronger."""
    if not parts:
        return np.zeros((tables.shape[1], count), dtype=np.float32)
    one, other = (calibration.evidence(sums_of(parts, span), tables[i]) for i, span in enumerate((SHORT, LONG)))
    return np.where(np.abs(one) > np.abs(other), one, other)
