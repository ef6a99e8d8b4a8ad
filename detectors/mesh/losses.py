"""Who loses probes: each part that probes pass, weighed against the rate at which the mesh loses them anyway.

The weight of a part is the likelihood of its losses under a loss rate between 0.3 and 60 % (unknown, every order alike), over their
likelihood at the usual rate. A tick counts once however many probes were lost in it: what loses four probes within a second is one event.
Such a weight exceeds 1 / a under health with probability at most a, whatever the usual rate is (Ville), which is what the bounds rest on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from detectors.mesh.parts import NODE, PORT, Parts
from detectors.risk import poisson_at_least
from detectors.state import Array

_RATES = np.geomspace(0.003, 0.6, 16)
_SHARED_PRIOR = float(np.log(1e-2))
_MOST_TRIED = 16
_CAUTION = 2500.0
"""Probes that count as seen, half of one lost, before any is: healthy meshes lose one in 10,000 to 100,000."""


@dataclass(frozen=True)
class Lossy:
    """A node that loses probes. `weight` is in natural logarithms, `posterior` its probability among those that could.

    `ticks` counts those with a loss, `partners` the nodes at the other ends, `reached` those at the other ends of all its probes.
    """

    node: str
    rail: str
    weight: float
    posterior: float
    ticks: int
    lost: int
    sent: int
    elsewhere: int
    partners: int
    reached: int
    first: int
    last: int


@dataclass(frozen=True)
class _Probes:
    """Ticks × probes, and their sums."""

    parts: Parts
    lost: Array
    sent: Array
    all_lost: Any
    all_sent: Any


@dataclass(frozen=True)
class _Part:
    number: int
    weight: float
    rows: Array
    lossy: Array


def log_weight(lossy: int, ticks: int, per_tick: float, quiet: float) -> float:
    """Likelihood of `lossy` ticks of `ticks` when something loses probes over that at the `quiet` rate, logarithm.

    Parameters
    ----------
    per_tick
        Probes in a tick.
    quiet
        Share of probes that get lost anyway.
    """
    survives, usual = per_tick * np.log1p(-_RATES), per_tick * float(np.log1p(-quiet))
    gains = lossy * (np.log(-np.expm1(survives)) - np.log(-np.expm1(usual))) + (ticks - lossy) * (survives - usual)
    return float(np.logaddexp.reduce(gains) - np.log(len(_RATES)))


def quiet_rate(loss_rate: float, probes_seen: float) -> float:
    """Usual share of lost probes, cautiously."""
    return (loss_rate * probes_seen + 0.5) / (probes_seen + _CAUTION)


def least_losses(ticks: int, per_tick: float, quiet: float, least_weight: float) -> int:
    """Lossy ticks that a single pair of nodes needs to reach a weight; any part needs as many."""
    enough = (k for k in range(1, ticks + 1) if log_weight(k, ticks, per_tick, quiet) >= least_weight)
    return next(enough, ticks + 1)


def crowded(parts: Parts, lost: Array, least: int) -> Array:
    """Nodes and ports (part numbers) through which at least so many pairs and ticks lost probes, most first."""
    through = parts.through[np.flatnonzero(lost) % max(lost.shape[1], 1)]
    counts = np.bincount(through[through >= 0], minlength=len(parts.kinds))
    found = np.flatnonzero((counts >= max(least, 1)) & ((parts.kinds == NODE) | (parts.kinds == PORT)))
    return found[np.argsort(-counts[found], kind="stable")[:_MOST_TRIED]]


def loser(
    parts: Parts, lost: Array, sent: Array, quiet: float, among: Array, least: int = 1, least_weight: float = -np.inf
) -> Lossy | None:
    """The node that losses point at, or None.

    Parameters
    ----------
    lost, sent
        Ticks × probes.
    among
        Nodes (boolean, over `parts.nodes`) that could be it.
    least, least_weight
        Parts with fewer losses, or of less weight, are not named.
    """
    lost = _without_common(parts, lost)
    probes = _Probes(parts, lost, sent, lost.sum(), sent.sum())
    by_node: dict[int, _Part] = {}
    for part in crowded(parts, lost, least).tolist():
        node = part if parts.kinds[part] == NODE else int(parts.hosts(part)[0])
        if among[node] and parts.targets[node]:
            one = _weigh(probes, part, quiet)
            by_node[node] = max(one, by_node.get(node, one), key=lambda known: known.weight)
    if not by_node or max(one.weight for one in by_node.values()) < least_weight:
        return None
    return _choose(probes, by_node, quiet, among)


def lossy_everywhere(parts: Parts, lost: Array, sent: Array, rate: float, share: float, risk: float) -> int | None:
    """The first of the ticks in which probes were lost, when they are lost to nodes everywhere and not on the way to one; else None.

    At least `share` of the nodes, three at least, lost some, and what does not pass the worst one lost more than chance gives at the usual
    `rate` with probability `risk`.

    Parameters
    ----------
    lost, sent
        Ticks × probes.
    """
    lost, target = _without_common(parts, lost), parts.ends[:, 1]
    by_node = np.bincount(target, weights=lost.sum(axis=0), minlength=len(parts.nodes))
    hit = by_node[parts.targets] > 0
    if hit.sum() < 3 or hit.mean() < share:
        return None
    beside = ~(parts.ends == int(np.argmax(by_node))).any(axis=1)
    if poisson_at_least(int(lost[:, beside].sum()), rate * float(sent[:, beside].sum())) > risk:
        return None
    return int(np.argmax(lost.any(axis=1)))


def _without_common(parts: Parts, lost: Array) -> Array:
    """Losses but those of ticks in which half of the nodes lost some: the prober slept, or everything did."""
    tick, row = np.nonzero(lost)
    pairs = np.unique(np.stack([tick, parts.ends[row, 1]]), axis=1)
    hit = 2 * np.bincount(pairs[0], minlength=len(lost)) > max(int(parts.targets.sum()), 2)
    return np.where(hit[:, None], 0.0, lost) if hit.any() else lost


def _weigh(probes: _Probes, part: int, quiet: float) -> _Part:
    mine = probes.parts.passing(part)
    rows = np.flatnonzero(mine)
    lost, sent = probes.lost[:, rows], probes.sent[:, rows]
    lossy, probed = lost.sum(axis=1) > 0, sent.sum(axis=1)
    elsewhere = (probes.all_lost - lost.sum()) / (probes.all_sent - probed.sum() + _CAUTION)
    ticks = int((probed > 0).sum())
    weight = log_weight(int(lossy.sum()), ticks, float(probed.sum()) / max(ticks, 1), max(quiet, float(elsewhere)))
    return _Part(part, weight, mine, lossy)


def _choose(probes: _Probes, by_node: dict[int, _Part], quiet: float, among: Array) -> Lossy:
    parts, lost, sent = probes.parts, probes.lost, probes.sent
    node, best = max(by_node.items(), key=lambda item: item[1].weight)
    silent = int((among & parts.targets).sum()) - len(by_node)
    hurt = np.unique(parts.through[best.rows & lost.any(axis=0)])
    wider = hurt[(hurt >= 0) & (parts.kinds[hurt] != NODE) & (parts.kinds[hurt] != PORT)].tolist()
    shared = [_weigh(probes, part, quiet).weight + _SHARED_PRIOR for part in wider]
    others = [*(one.weight for one in by_node.values()), *shared, *_of_silent(parts, silent, sent, quiet)]
    return _told(parts, node, best, float(np.exp(best.weight - np.logaddexp.reduce(others))), lost, sent)


def _of_silent(parts: Parts, count: int, sent: Array, quiet: float) -> list[float]:
    """Weights of nodes without a loss: they may still be guilty, the less the more probes they answered."""
    if count <= 0:
        return []
    ticks = int((sent.sum(axis=1) > 0).sum())
    per_tick = float(sent.sum()) / max(ticks, 1) / max(int(parts.targets.sum()), 1)
    return [log_weight(0, ticks, per_tick, quiet) + float(np.log(count))]


def _told(parts: Parts, node: int, best: _Part, posterior: float, lost: Array, sent: Array) -> Lossy:
    name, hurt = parts.nodes[node], lost.any(axis=0)
    rail = parts.names[best.number][len(name) + 1 :] if parts.kinds[best.number] == PORT else ""
    others = parts.ends[best.rows].sum(axis=1) - node
    bad_others = parts.ends[best.rows & hurt].sum(axis=1) - node
    lossy = np.flatnonzero(best.lossy)
    mine = float(lost[:, best.rows].sum())
    return Lossy(name, rail, best.weight, posterior, int(lossy.size), int(mine), int(sent[:, best.rows].sum()), int(lost.sum() - mine),
                 len(np.unique(bad_others)), len(np.unique(others)), int(lossy[0]), int(lossy[-1]))  # fmt: skip
