"""What a floor is: it scores every node in every round; who is named follows by one rule for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.relation.graph import Graph
from trainwarden.registry import Registry

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

CONTINUITY = 2
PROMOTION_SHARE, LEAST_MEMBERS = 2.0 / 3.0, 3


@dataclass(frozen=True)
class Episode:
    """A job's rounds.

    Attributes
    ----------
    node
        rounds × NODE_CHANNELS × nodes as `detectors.relation.features` makes them, `own` filled in; NaN unknown.
    port
        rounds × PORT_CHANNELS × nodes × rails.
    step_ms
        Middle step per round, NaN without one.
    warm
        First round in which anybody may be named.
    """

    graph: Graph
    node: F32
    port: F32
    step_ms: F64
    warm: int


class Floor(ABC):
    """One way to tell who is sick. `paper` says whose it is, and what here differs from it."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def fit(self, healthy: Sequence[Episode], seed: int = 0) -> None:
        """Learn from runs without faults; most floors have nothing to learn."""
        del healthy, seed

    @abstractmethod
    def score(self, episode: Episode) -> F32:
        """rounds × nodes, larger is sicker, finite; row t from rounds up to t only."""


def registry() -> Registry[Floor]:
    """All floors, by name."""
    return Registry("detectors.relation.floors", Floor)  # type: ignore[type-abstract]


def steady(scores: F32) -> F32:
    """Each score as far as the round before supports it."""
    found = scores.copy()
    found[1:] = np.minimum(scores[1:], scores[:-1])
    found[:1] = 0.0
    return found


def named(flagged: NDArray[np.bool_], graph: Graph) -> list[tuple[str, str]]:
    """(kind, name) that flagged nodes come to: a rack, power unit, leaf or zone of which two thirds are flagged, else each node."""
    left = flagged.copy()
    found: list[tuple[str, str]] = []
    for kind in ("zone", "leaf", "pdu", "rack"):
        relation = graph.relations.get(kind)
        for number, name in enumerate(relation.names) if relation is not None else ():
            members = relation.members(number) if relation is not None else np.zeros(0, dtype=np.int64)
            if len(members) >= LEAST_MEMBERS and left[members].mean() >= PROMOTION_SHARE:
                found.append((kind, name))
                left[members] = False
    return found + [("node", graph.nodes[node]) for node in np.flatnonzero(left).tolist()]


def filled(values: F32) -> F32:
    """Unknown values (rounds first) take the last known one; before the first, 0."""
    found = values.copy()
    for before, now in pairwise(found):
        np.copyto(now, before, where=np.isnan(now))
    return np.nan_to_num(found)


def rolling(values: F32, rounds: int) -> F32:
    """Mean of the last `rounds` rows."""
    total = np.cumsum(np.concatenate([np.zeros_like(values[:1]), values], dtype=np.float64), axis=0)
    first = np.maximum(np.arange(1, len(values) + 1) - rounds, 0)
    width = (np.arange(1, len(values) + 1) - first).reshape(-1, *[1] * (values.ndim - 1))
    return np.asarray((total[1:] - total[first]) / width, dtype=np.float32)


def all_metrics(episode: Episode) -> F32:
    """rounds × 12 × nodes: node channels, and of each port channel the worst rail."""
    ports = filled(episode.port).max(axis=3)
    return np.concatenate([filled(episode.node), ports], axis=1)


def among(values: F32, group: NDArray[np.int64]) -> tuple[F32, F32]:
    """Median and scaled absolute deviation of each node's group, rounds × nodes; nodes of no group are one of their own."""
    middle, spread = np.zeros_like(values), np.ones_like(values)
    for number in np.unique(group):
        rows = group == number
        mine = np.median(values[:, rows], axis=1, keepdims=True)
        middle[:, rows] = mine
        spread[:, rows] = 1.4826 * np.median(np.abs(values[:, rows] - mine), axis=1, keepdims=True)
    return middle, spread
