"""When a node may be isolated, which asks more than that it is named.

Naming costs a look; isolating costs a node, and of slow jobs most have no bad one. So the log odds against "nobody" (gain less price) are
added up over rounds like a sequential test (Wald), each round counting what it adds to the window of evidence, and must reach the logarithm
of the node-rounds in which one wrong isolation would be allowed. Beside that: witnesses that do not share a sensor, nobody who explains the
same nearly as well, no shared cause around it, and not a crowd.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from detectors.relation.attribution import SUSPECT, Cause
from detectors.relation.features import CLOCK, CPU, DATA, ERRORS, LOCAL, MARKS, OWN, POWER, RTT, SPEED, TEMP
from detectors.relation.graph import Graph
from detectors.relation.groups import Groups
from detectors.relation.judge import LATE, LEAST_EFFECT, LONG, Evidence, middle_effect
from detectors.relation.opinions import Opinion
from detectors.state import Array

F32 = NDArray[np.float32]

ODDS = float(np.log(52_000_000))
"""One wrong isolation in 3,000 node-days of five-second rounds."""
MOST_PER_ROUND = 6.0
LASTING = 6
"""Rounds of the last eight in which it has to stand."""
LEAST_PROBABILITY = 0.95
CROWD = 2
"""More nodes accused at once than this have a cause in common that is not understood."""
WITNESS, COUNTED = 3.0, 5.0
"""Standard deviations that a second kind of sensor has to show, and that the counters of a port have to show."""
OTHER_PEERS = ("rack", "leaf", "zone", "pdu", "job")


def convict(standing: Sequence[tuple[Opinion, Cause]], evidence: Evidence, effect: list[Array], graph: Graph) -> None:
    """Mark the opinions of this round whose node may be isolated; once marked, an opinion stays so while it stands."""
    shared = {i for opinion, _ in standing if opinion.kind not in ("node", "port") for i in opinion.members}
    accused = {opinion.members[0] for opinion, _ in standing if opinion.kind in ("node", "port")}
    late = middle_effect(effect)[LATE] if effect else np.zeros(len(graph.nodes), dtype=np.float32)
    for opinion, cause in standing:
        if opinion.kind not in ("node", "port"):
            continue
        opinion.odds += min(cause.gain, MOST_PER_ROUND * LONG) / cause.rounds
        node = opinion.members[0]
        opinion.isolates |= (
            opinion.odds >= ODDS
            and lasting(opinion)
            and cause.probability >= LEAST_PROBABILITY
            and len(accused) <= CROWD
            and node not in shared
            and (witnessed_port(evidence.port[:, node, opinion.rail]) if opinion.kind == "port" else witnessed_node(evidence.node[:, node])
                 and late_among_others(late, node, graph))
        )  # fmt: skip


def lasting(opinion: Opinion) -> bool:
    """Whether it stood in nearly all of the last rounds."""
    return sum(opinion.seen[-1] - seen < LASTING + 2 for seen in opinion.seen) >= LASTING


def witnessed_node(node: F32) -> bool:
    """Step clocks say that it is slow, and counters of the machine say so or why."""
    machine = max(float(node[channel]) for channel in (OWN, CLOCK, POWER, TEMP, CPU))
    waits = float(node[DATA]) > WITNESS and float(node[LOCAL]) > WITNESS
    return waits or (max(float(node[LOCAL]), float(node[OWN])) > WITNESS and machine > WITNESS)


def witnessed_port(port: F32) -> bool:
    """Its own counters say that it is sick: a round trip has another end and a way between."""
    lost = max(float(port[ERRORS]), float(port[SPEED]))
    return lost > COUNTED or (float(port[MARKS]) > COUNTED and float(port[RTT]) > SUSPECT)


def late_among_others(late: F32, node: int, graph: Graph) -> bool:
    """Beside those who do the same work it is late anyhow; it has to be so among those who share a place with it as well."""
    for kind in OTHER_PEERS:
        relation = graph.relations.get(kind)
        if relation is not None and relation.group[node] >= 0:
            middle = Groups.of(relation.group).messages(late[None])[0][0]
            if float(late[node] - middle[node]) < LEAST_EFFECT[LOCAL]:
                return False
    return True
