"""From causes of single rounds to opinions that stand: announced when they last, taken back when they are gone."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from detectors.relation.attribution import SLOW, STEADY, Cause, node_gains
from detectors.relation.judge import Evidence, Frozen
from detectors.state import Array

LASTING_ROUNDS, OF_ROUNDS = 2, 3
AT_ONCE = 18.0
"""A node that gains so much more than its price in one round is said at once: its evidence is of two rounds already, since it was late in
both (`judge.of_some_effect`). Of ports and places a single round may be all."""
RESTLESS, FIRST_RESTLESS, CALMING = 3.0, 6.0, 0.05
"""What the second most conspicuous node of a job gains while nobody is accused makes every accusation of a node dearer that no clock
explains, so many times; taken for so much at first, and learnt at this pace: in a restless job somebody always stands out. The first may
be the sick one, and must not make his own accusation dearer."""
STEADY_RESTLESS, FIRST_STEADY_RESTLESS = 2.0, 8.0
"""The same for means of gains."""
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
        """What causes cost in this job, and what a node pays on top of it for how restless the job is."""
        node, steady = RESTLESS * self.restless, STEADY_RESTLESS * self.restless_steady
        return {**prices, "restless": node, "restless_steady": steady}

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
        self.restless += CALMING * (_second(self.lately[-1]) - self.restless)
        if len(self.lately) == STEADY:
            self.restless_steady += CALMING * (_second(np.mean(self.lately, axis=0)) - self.restless_steady)

    def take(self, causes: list[Cause], at_ns: int) -> tuple[list[tuple[Opinion, Cause]], list[Opinion]]:
        """Causes of a round → opinions with their cause of this round that now stand, and those that are over."""
        self.rounds += 1
        standing = []
        for cause in self._without_remains(causes):
            opinion = self.held.setdefault(
                "|".join(cause.key), Opinion(*cause.key, list(cause.members), cause.rail, at_ns)
            )
            opinion.seen, opinion.gains = (
                [*opinion.seen, self.rounds][-KEPT:],
                [*opinion.gains, round(cause.gain, 3)][-KEPT:],
            )
            lasts = sum(self.rounds - seen < OF_ROUNDS for seen in opinion.seen) >= LASTING_ROUNDS
            if opinion.said or lasts or (cause.kind == "node" and cause.gain >= AT_ONCE):
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

    def _without_remains(self, causes: list[Cause]) -> list[Cause]:
        """Causes of a round without what a shared cause leaves behind: when it ends, windows are still full of it, not in all its members
        alike, and those with most would be accused. Who was accused before stays so."""
        found = {cause.key for cause in causes}
        over = [
            set(opinion.members)
            for opinion in self.held.values()
            if opinion.said and len(opinion.members) > 1 and (opinion.kind, opinion.name) not in found
        ]
        return [
            cause
            for cause in causes
            if "|".join(cause.key) in self.held or not any(members.issuperset(cause.members) for members in over)
        ]

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


def _second(values: Array) -> float:
    return float(np.sort(values)[-2:][0]) if len(values) else 0.0
