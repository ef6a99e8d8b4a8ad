"""From causes of single rounds to opinions that stand: announced when they last, taken back when they are gone."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from detectors.relation.attribution import SLOW, STEADY, Cause, node_gains
from detectors.relation.judge import Evidence, Frozen
from detectors.state import Array

LASTING_ROUNDS, OF_ROUNDS = 2, 3
RESTLESS, FIRST_RESTLESS, CALMING = 3.0, 6.0, 0.05
"""What the most conspicuous node of a job gains while nobody is accused makes every accusation of a node dearer, so many times; taken
for so much at first, and learnt at this pace: in a restless job somebody always stands out."""
STEADY_RESTLESS, FIRST_STEADY_RESTLESS = 1.5, 8.0
"""The same for means of gains, of the second most conspicuous node: the first may be the sick one, and must not make his own accusation
dearer."""
GONE_ROUNDS = 6
FREEZE = 6.0
KEPT = 24


class Opinion(msgspec.Struct):
    """A cause that was found in some of the last rounds. `seen` are rounds, counted by the holder; `gains` go with them; `channels`
    are those that showed it when it was first said, so that what it is called does not change; `odds` are the log odds against nobody that
    added up, and `isolates` says that they and all else suffice to isolate the node
    (`conviction`), `told` that a verdict said so."""

    kind: str
    name: str
    members: list[int]
    rail: int
    first_ns: int
    seen: list[int] = []
    gains: list[float] = []
    channels: list[str] = []
    said: bool = False
    said_ns: int = 0
    odds: float = 0.0
    isolates: bool = False
    told: bool = False


class Opinions(msgspec.Struct):
    """What is held against whom in one job. `lately` are the gains of all nodes in the last rounds."""

    rounds: int = 0
    held: dict[str, Opinion] = {}
    restless: float = FIRST_RESTLESS
    restless_steady: float = FIRST_STEADY_RESTLESS
    lately: list[Array] = []

    def prices(self, prices: Mapping[str, float]) -> dict[str, float]:
        """What causes cost in this job."""
        node, steady = RESTLESS * self.restless, STEADY_RESTLESS * self.restless_steady
        return {**prices, "node": prices["node"] + node, "steady": prices["steady"] + steady}

    def steady(self, node: Array) -> Array:
        """Take in a round's evidence of nodes: the mean gain of each over the last rounds, 0 while they are too few. Healthy imbalance
        moves from node to node, and sickness stays."""
        gains = node_gains(node)
        self.lately = [*(row for row in self.lately if row.shape == gains.shape), gains][-STEADY:]
        return np.mean(self.lately, axis=0) if len(self.lately) == STEADY else np.zeros_like(gains)

    def learn(self, found: bool) -> None:
        """How much innocents of this job stand out: from what was taken in last, where it led to no cause."""
        if found or self.held or not self.lately:
            return
        self.restless += CALMING * (float(self.lately[-1].max(initial=0.0)) - self.restless)
        if len(self.lately) == STEADY:
            second = float(np.sort(np.mean(self.lately, axis=0))[-2:][0])
            self.restless_steady += CALMING * (second - self.restless_steady)

    def take(self, causes: list[Cause], at_ns: int) -> tuple[list[tuple[Opinion, Cause]], list[Opinion]]:
        """Causes of a round → opinions with their cause of this round that now stand, and those that are over."""
        self.rounds += 1
        standing = []
        for cause in causes:
            opinion = self.held.setdefault(
                "|".join(cause.key), Opinion(*cause.key, list(cause.members), cause.rail, at_ns)
            )
            opinion.seen, opinion.gains = (
                [*opinion.seen, self.rounds][-KEPT:],
                [*opinion.gains, round(cause.gain, 3)][-KEPT:],
            )
            if opinion.said or sum(self.rounds - seen < OF_ROUNDS for seen in opinion.seen) >= LASTING_ROUNDS:
                opinion.channels = opinion.channels if opinion.said else list(cause.channels)
                opinion.said = True
                standing.append((opinion, cause))
        over = {
            key: opinion
            for key, opinion in self.held.items()
            if self.rounds - opinion.seen[-1] >= (GONE_ROUNDS if opinion.said else OF_ROUNDS)
        }
        for key in over:
            del self.held[key]
        return standing, [opinion for opinion in over.values() if opinion.said]

    def frozen(self, evidence: Evidence | None, nodes: int) -> Frozen:
        """Nodes and ports whose past is not learnt now: accused, or well on the way to it."""
        if evidence is None or evidence.node.shape[1] != nodes:
            return np.zeros(nodes, dtype=np.bool_), None
        whole = evidence.node[list(SLOW)].max(axis=0) > FREEZE
        ports = evidence.port.max(axis=0) > FREEZE
        for opinion in self.held.values():
            if opinion.rail >= 0:
                ports[opinion.members, opinion.rail] = True
            else:
                whole[opinion.members] = True
        return whole, ports
