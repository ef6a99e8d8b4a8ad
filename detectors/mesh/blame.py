"""Which nodes, ports, leaf, rail or fabric explain a set of bad probes: the fewest parts whose removal leaves a healthy mesh.

Each part that a probe passes is a suspect. A suspect gains by each bad probe through it that nobody explains yet, loses by each good one,
and starts with the odds against it: a node fails more often than a switch, a switch more often than a rail or the whole fabric. Without
that, central parts, which every probe passes, would be blamed for everything. A shared part also needs at least two thirds of the hosts
below it as witnesses, and a host counts once however many probes it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.mesh.parts import LEAF, NODE, PORT, RAIL, SWITCH, Parts, facts_of, nodes_of, parts_of
from trainwarden.topology import Topology

_PRIOR = np.log(np.array([1e-2, 1e-4, 1e-4, 3e-5, 5e-3]))
"""Odds by kind of part: node, leaf, switch, rail, port."""
_FABRIC_PRIOR = float(np.log(1e-5))
_HURT, _HURT_ANYWAY = 0.8, 1e-3
"""Share of bad probes through a broken part, and through healthy ones, for strong signs."""
_LEAST_RAISED, _TIMES_ELSEWHERE, _WEAK_BACKGROUND = 0.25, 3.0, 0.01
"""Weak signs: a part is suspect from this share of raised probes on, and this many times the share of all; the least share of all."""
_GUILTY_SHARE, _BELOW_SHARE, _FABRIC_SHARE = 0.6, 2 / 3, 0.6
_LEAST_BACKGROUND, _CHANCE = 3e-4, 0.05
"""A part is blamed when it had so many bad probes by chance, at the rate at which unexplained ones are bad, with at most this risk among
all parts of its kind (Chernoff's bound on the Poisson tail)."""
_MOST, _MOST_TRIED = 16, 64
_LEAST_WITNESSES = 3
_PLAIN_BACKGROUND = 3e-3
"""Least share of probes that are bad with plain signs and for no reason."""
_MOSTLY, _LEAST_ENDS = 0.8, 4
"""Of ways through a part: the share of all bad probes that pass it, and the nodes that they begin or end at below it."""


@dataclass(frozen=True)
class Explanation:
    """Nodes to blame, or leaves (a leaf's switch of one rail too), or rails, or everything; all empty when the probes do not tell.

    `rails_of` says over which rail a node is bad where it is well over its others.
    """

    nodes: tuple[str, ...] = ()
    leaf: str = ""
    rail: str = ""
    fabric: bool = False
    leaves: tuple[str, ...] = ()
    rails: tuple[str, ...] = ()
    rails_of: dict[str, str] = field(default_factory=dict)


def explain(keys: Sequence[tuple[str, str]], bad: NDArray[np.bool_], topology: Topology) -> Explanation:
    """Explain bad pairs.

    Two nodes that see only each other cannot tell whose link it is.

    Examples
    --------
    >>> keys = [(a, b) for a in "abcd" for b in "abcd" if a != b]
    >>> explain(keys, np.array(["c" in pair for pair in keys]), Topology()).nodes
    ('c',)
    >>> explain(keys, np.ones(len(keys), dtype=bool), Topology()).fabric
    True
    """
    nodes = nodes_of(keys)
    return blame(parts_of(keys, nodes, facts_of(nodes, topology)), bad)


def blame_ways(parts: Parts, bad: NDArray[np.bool_], known: NDArray[np.bool_]) -> Explanation:
    """The shared part of which only some ways are bad (uplinks that carry the flows that a hash gives them), or nothing.

    Asked when neither a node nor all of a shared part explains the bad probes: nearly all of them must pass the part, from and to many.
    """
    search = _WaySearch(parts, bad & known, known)
    search.run()
    return search.conclusion()


def blame(
    parts: Parts, bad: NDArray[np.bool_], known: NDArray[np.bool_] | None = None, weak: bool = False
) -> Explanation:
    """Explain bad probes.

    Parameters
    ----------
    bad, known
        Over the probes of `parts`; those that are not known say nothing.
    weak
        The signs are weak (a little slower than usual): only shared parts are named by them, never a node.
    """
    told = np.ones(len(bad), dtype=np.bool_) if known is None else known | bad
    if not bad.any():
        return Explanation()
    search = _WeakSearch(parts, bad & told, told) if weak else _Search(parts, bad & told, told)
    search.run()
    return search.conclusion()


class _Search:
    """Greedy: the suspect that explains most, until none is worth its odds."""

    def __init__(self, parts: Parts, bad: NDArray[np.bool_], told: NDArray[np.bool_]) -> None:
        self._parts, self._bad, self._told = parts, bad, told
        self._for, self._against = float(np.log(_HURT / _HURT_ANYWAY)), float(np.log((1 - _HURT) / (1 - _HURT_ANYWAY)))
        self._left = told.copy()
        self._total = parts.counts(told)
        self._open = self._suspects()
        self._chosen: list[int] = []
        self._seen_of: dict[int, tuple[int, int]] = {}
        self._gain_of: dict[int, float] = {}
        self._tied = False

    def run(self) -> None:
        if self._is_hopeless():
            return
        self._search()
        while self._drop_chance():
            pass

    def _search(self) -> None:
        while len(self._chosen) < _MOST and (self._bad & self._left).any():
            hits, total = self._counts()
            gain = np.where(self._open & self._may_be_guilty(hits, total), self._gain(hits, total), -np.inf)
            best = self._best(gain)
            if best < 0:
                return
            self._tied = self._tied or self._is_tied(best, gain, hits)
            self._choose(best, float(gain[best]))
            self._seen_of[best] = int(hits[best]), int(total[best])

    def _drop_chance(self) -> bool:
        """Take back the chosen part that chance explains best, if it does: bad probes that nothing explains are everywhere, and among so
        many parts some have several. Whether one was taken back."""  # fmt: skip
        kinds, counts = self._parts.kinds, np.bincount(self._parts.kinds, minlength=5)
        rest = float((self._bad & self._left).sum()) / max(int(self._left.sum()), 1)
        margins = []
        for part in self._chosen:
            hits, total = self._seen_of[part]
            expected = total * max(rest, _LEAST_BACKGROUND)
            margins.append(
                hits * np.log(max(hits / expected, 1.0))
                - max(hits - expected, 0.0)
                - np.log(counts[kinds[part]] / _CHANCE)
            )
        if not margins or min(margins) >= 0:
            return False
        part = self._chosen.pop(int(np.argmin(margins)))
        back = self._parts.passing(part) & self._told & ~self._parts.passing(*self._chosen)
        self._total = self._total + self._parts.counts(back & ~self._left)
        self._left |= back
        return True

    def _best(self, gain: NDArray[np.float64]) -> int:
        """The suspect that explains most and has its witnesses; -1 when none is worth its odds. Shared parts without are closed."""
        for _ in range(_MOST_TRIED):
            best = int(np.argmax(gain))
            if gain[best] <= 0:
                return -1
            if self._parts.kinds[best] in (NODE, PORT) or self._has_spatial_evidence(best):
                return best
            self._open[best], gain[best] = False, -np.inf
        return -1

    def conclusion(self) -> Explanation:
        parts, kinds = self._parts, self._parts.kinds
        probed = int((parts.targets & self._seen()).sum())
        if self._everywhere(probed):
            return Explanation(fabric=probed > 2)
        nodes = self._apart([c for c in self._chosen if kinds[c] == NODE])
        ports = [c for c in self._chosen if kinds[c] == PORT]
        if not self._has_witness() or (len(nodes) + len(ports) > 1 and 4 * (len(nodes) + len(ports)) > probed):
            return Explanation()
        switches = [parts.names[c] for c in self._chosen if kinds[c] == SWITCH]
        leaves = _without_siblings(switches, [parts.names[c] for c in self._chosen if kinds[c] == LEAF])
        rails = tuple(parts.names[c] for c in self._chosen if kinds[c] == RAIL)
        rails_of = dict(self._port(c) for c in ports)
        whole = tuple(parts.names[c] for c in nodes)
        named = (*whole, *(name for name in rails_of if name not in whole))
        return Explanation(named, next(iter(leaves), ""), next(iter(rails), ""), False, leaves, rails, rails_of)

    def _port(self, part: int) -> tuple[str, str]:
        """Node and rail of a port."""
        node = self._parts.nodes[int(self._parts.hosts(part)[0])]
        return node, self._parts.names[part][len(node) + 1 :]

    def _is_hopeless(self) -> bool:
        """Most probes are bad and no part explains most of them: no use in naming parts one by one."""
        bad = int(self._bad.sum())
        return bad >= _FABRIC_SHARE * int(self._told.sum()) and int(self._counts()[0].max()) < 0.5 * bad

    def _suspects(self) -> NDArray[np.bool_]:
        suspects = np.ones(len(self._parts.kinds), dtype=np.bool_)
        suspects[: len(self._parts.nodes)] = self._parts.targets
        return suspects

    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bad and all probes through each part that nobody explains yet; a probe counts once for a part."""
        return self._parts.counts(self._left & self._bad), self._total

    def _gain(self, hits: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(hits * self._for + (total - hits) * self._against + _PRIOR[self._parts.kinds])

    def _may_be_guilty(self, hits: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.bool_]:
        """A node with most of its probes bad, a port with all of them and at least two; shared parts are looked at one by one."""
        kinds = self._parts.kinds
        node, port = hits >= _GUILTY_SHARE * total, (hits >= 2) & (hits == total)
        return np.asarray((hits > 0) & np.where(kinds == NODE, node, np.where(kinds == PORT, port, True)))

    def _has_spatial_evidence(self, part: int) -> bool:
        """Two thirds of the hosts below it suffer, at least two of them, and enough probes elsewhere are there to compare with."""
        places, host = self._parts.places(part), self._parts.hosts(part)
        probes = places // self._parts.through.shape[1]
        mine, bad = self._left[probes], (self._left & self._bad)[probes]
        if int(self._told.sum()) - np.unique(probes[mine]).size < _LEAST_WITNESSES:
            return False
        count = len(self._parts.nodes)
        return self._is_spread(np.bincount(host[bad], minlength=count), np.bincount(host[mine], minlength=count))

    def _is_spread(self, hurt: NDArray[np.int64], seen: NDArray[np.int64]) -> bool:
        """Whether enough of the hosts below a part suffer, by their bad probes and all."""
        least = 0.5 * seen * self._expected(int(hurt.sum()), int(seen.sum()))
        below, suffering = int((seen > 0).sum()), int(((hurt > 0) & (hurt >= least)).sum())
        return suffering >= 2 and suffering >= _BELOW_SHARE * below

    def _expected(self, hurt: int, seen: int) -> float:
        """Share of a host's probes that a broken part above it makes bad."""
        return 1.0

    def _is_tied(self, part: int, gain: NDArray[np.float64], hits: NDArray[np.int64]) -> bool:
        """Whether another shared part of the same kind explains as much: two leaves that only reach each other badly."""
        alike = (
            (self._parts.kinds == self._parts.kinds[part]) & (self._parts.kinds != NODE) & (self._parts.kinds != PORT)
        )
        alike[part] = False
        rival = alike & (gain >= gain[part] - self._for) & (hits > 0)
        if not rival.any():
            return False
        other = int(np.argmax(np.where(rival, gain, -np.inf)))
        mine, theirs = (self._parts.passing(p) & self._bad & self._left for p in (part, other))
        return bool((mine & theirs).sum() >= 0.8 * mine.sum())

    def _choose(self, part: int, gain: float) -> None:
        self._chosen.append(part)
        self._gain_of[part] = gain
        mine = self._parts.passing(part)
        self._total = self._total - self._parts.counts(mine & self._left)
        self._left &= ~mine
        self._open[part] = False

    def _apart(self, nodes: list[int]) -> list[int]:
        """Nodes but those that are many below one leaf, and too few to blame the leaf: half a switch, perhaps; nobody is named."""
        leaf_of = self._leaf_of()
        alike = {leaf: [n for n in nodes if leaf_of[n] == leaf] for leaf in {int(leaf_of[n]) for n in nodes}}
        crowded = {
            leaf
            for leaf, own in alike.items()
            if leaf >= 0 and len(own) >= 3 and 4 * len(own) > int((leaf_of == leaf).sum())
        }
        return [n for n in nodes if int(leaf_of[n]) not in crowded]

    def _leaf_of(self) -> NDArray[np.int64]:
        leaf_of = np.full(len(self._parts.nodes), -1, dtype=np.int64)
        for column in (2, 3):
            leaf_of[self._parts.host[:, column]] = self._parts.through[:, column]
        return leaf_of

    def _seen(self) -> NDArray[np.bool_]:
        seen = np.zeros(len(self._parts.nodes), dtype=np.bool_)
        seen[self._parts.ends[self._told].ravel()] = True
        return seen

    def _everywhere(self, probed: int) -> bool:
        """The fabric as one suspect explains more than all that were chosen, or those are most of the mesh."""
        bad, told = int((self._bad & self._told).sum()), int(self._told.sum())
        fabric = self._gain_of_all(bad, told) + _FABRIC_PRIOR
        covered = set()
        for part in self._chosen:
            single = self._parts.kinds[part] in (NODE, PORT)
            covered |= {part} if single else set(self._parts.hosts(part).tolist())
        most = len(covered) >= max(2.0, _FABRIC_SHARE * probed) and not (self._is_one_rail() or self._is_clean_cut())
        return (
            self._tied
            or most
            or (fabric > sum(self._gain_of[part] for part in self._chosen) and bad >= _FABRIC_SHARE * told)
        )

    def _is_one_rail(self) -> bool:
        """A rail reaches every node and is still not the fabric; nor is its switch, where one leaf has all nodes."""
        return bool(self._chosen) and all(self._parts.kinds[c] in (RAIL, SWITCH) for c in self._chosen)

    def _is_clean_cut(self) -> bool:
        """One shared part, and the probes that do not pass it, a tenth of all at least, are well: it may have most nodes below it."""
        if len(self._chosen) != 1 or self._parts.kinds[self._chosen[0]] in (NODE, PORT):
            return False
        beside = int((self._left & self._told).sum())
        bad = int((self._bad & self._left).sum())
        return beside >= max(_LEAST_WITNESSES, 0.1 * int(self._told.sum())) and bad <= 0.05 * beside

    def _gain_of_all(self, bad: int, told: int) -> float:
        """What the fabric as the one suspect explains."""
        return bad * self._for + (told - bad) * self._against

    def _has_witness(self) -> bool:
        """Some probe that passes nothing blamed, and is well."""
        return bool((self._left & ~self._bad).any())


class _WeakSearch(_Search):
    """Signs that a broken part gives in some of its probes only, and healthy parts give too: a part is suspect when its share of raised
    probes stands out from that of all (likelihood ratio with the share that it has), and only shared parts are.
    """

    _least_share, _background = _LEAST_RAISED, _WEAK_BACKGROUND

    def _suspects(self) -> NDArray[np.bool_]:
        kinds = self._parts.kinds
        return np.asarray((kinds == LEAF) | (kinds == SWITCH) | (kinds == RAIL))

    def _gain(self, hits: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.float64]:
        elsewhere = self._elsewhere(hits, total)
        share = np.clip(hits / np.maximum(total, 1), 1e-6, 0.99)
        ratio = hits * np.log(share / elsewhere) + (total - hits) * np.log(
            (1 - share) / np.maximum(1 - elsewhere, 0.01)
        )
        apart = (share >= self._least_share) & (share >= _TIMES_ELSEWHERE * elsewhere)
        return np.where(apart, ratio + _PRIOR[self._parts.kinds], -np.inf)

    def _elsewhere(self, hits: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.float64]:
        """Share of raised probes among those that do not pass a part."""
        rest = (int((self._bad & self._left).sum()) - hits) / np.maximum(int(self._left.sum()) - total, 1)
        return np.asarray(np.maximum(rest, self._background))

    def _gain_of_all(self, bad: int, told: int) -> float:
        share = min(max(bad / max(told, 1), 1e-6), 0.99)
        background = self._background
        return float(bad * np.log(share / background) + (told - bad) * np.log((1 - share) / (1 - background)))

    def _expected(self, hurt: int, seen: int) -> float:
        return hurt / max(seen, 1)


class _WaySearch(_WeakSearch):
    """Plain signs, through one part, in a share of its probes that is as large as the share of its ways that is bad."""

    _least_share, _background = 0.1, _PLAIN_BACKGROUND

    def run(self) -> None:
        """One part, or none."""
        hits, total = self._counts()
        gain = np.where(self._open, self._gain(hits, total), -np.inf)
        best = self._best(gain)
        if best >= 0 and hits[best] >= _MOSTLY * int(self._bad.sum()):
            self._seen_of[best] = int(hits[best]), int(total[best])
            self._choose(best, float(gain[best]))

    def _is_spread(self, hurt: NDArray[np.int64], seen: NDArray[np.int64]) -> bool:
        """As many hosts suffer as would by chance, each of its probes at the same odds; and no host has much of it."""
        share, whole = self._expected(int(hurt.sum()), int(seen.sum())), max(int(hurt.sum()), 1)
        expected = float((1.0 - (1.0 - share) ** seen).sum())
        suffering = int((hurt > 0).sum())
        return suffering >= _LEAST_ENDS and suffering >= _BELOW_SHARE * expected and int(hurt.max()) <= 0.5 * whole


def _without_siblings(switches: list[str], leaves: list[str]) -> tuple[str, ...]:
    """Leaves, and switches of leaves; several switches of one leaf are that leaf.

    Examples
    --------
    >>> _without_siblings(["a/rail1", "b/rail0", "a/rail3"], ["c"])
    ('c', 'a', 'b/rail0')
    """
    owners = [name.rpartition("/")[0] for name in switches]
    named = [own if owners.count(own) > 1 else name for own, name in zip(owners, switches, strict=True)]
    return tuple(dict.fromkeys([*leaves, *named]))
