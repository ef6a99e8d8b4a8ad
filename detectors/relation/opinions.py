"""From causes of single rounds to opinions that stand: announced when they last, taken back when they are gone."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from detectors.relation.attribution import SLOW, Cause, node_gains
from detectors.relation.judge import Evidence, Frozen
from detectors.state import Array

LASTING_ROUNDS, OF_ROUNDS = 2, 3
RESTLESS, FIRST_RESTLESS, CALMING = 3.0, 6.0, 0.05
"""What the most conspicuous node of a job gains while nobody is accused makes every accusation of a node dearer, so many times; taken
for so much at first, and learnt at this pace: in a restless job somebody always stands out."""
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
    """What is held against whom in one job."""

    rounds: int = 0
    held: dict[str, Opinion] = {}
    restless: float = FIRST_RESTLESS

    def prices(self, prices: Mapping[str, float]) -> dict[str, float]:
        """What causes cost in this job."""
        return {**prices, "node": prices["node"] + RESTLESS * self.restless}

    def learn(self, node: Array, found: bool) -> None:
        """How much innocents of this job stand out: from rounds without any cause."""
        if not found and not self.held:
            self.restless += CALMING * (float(node_gains(node).max(initial=0.0)) - self.restless)

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
