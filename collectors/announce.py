"""What a node says about itself: catalogues of its families, its own topology, and where the ranks of its jobs run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from collectors.base import Facts, Source
from collectors.outbox import Outbox
from collectors.ranks import RankBoard, RankState
from collectors.spool import Value
from collectors.topology.facts import EVENT_ORIGIN, ORIGINS, Claim
from collectors.topology.memory import NodeMemory
from collectors.topology.processes import device_of
from trainwarden import topics
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.records import LogEvent, TopologyEvent
from trainwarden.topology import PRECEDENCE

TOPOLOGY_EVERY_NS = 30 * NS_PER_S
CATALOG_EVERY_NS = 60 * NS_PER_S
MAX_TOLD = 1000
CONFIGURATION = "configuration"


class Announcer:
    """Repeats what compacted topics hold, so that a broker that forgot it learns it again: topology every 30 s and on a change,
    catalogues every minute. Contradictions between sources of the topology become log events, each once.

    Parameters
    ----------
    memory
        File that keeps since when the attributes hold; None: they hold since the agent started.
    """

    def __init__(
        self,
        node: str,
        rack: str,
        clock: Clock,
        outbox: Outbox,
        ranks: RankBoard,
        facts: Facts,
        sources: Sequence[Source],
        memory: Path | None = None,
    ) -> None:
        self._node = node
        self._clock = clock
        self._outbox = outbox
        self._ranks = ranks
        self.facts = facts
        self._families = {family.name: family for source in sources for family in source.families}
        self._topology_ns: int | None = None
        self._catalog_ns: int | None = None
        self._valid_from: dict[tuple[str, int], int] = {}
        self._memory = NodeMemory(memory)
        self._told: dict[tuple[str, ...], None] = {}
        facts.board.tell("node", CONFIGURATION, "operator", {"rack": rack}, clock.now_ns())

    def announce(self, layout_changed: bool) -> None:
        """Say what is due."""
        now_ns = self._clock.monotonic_ns()
        if self._catalog_ns is None or now_ns - self._catalog_ns >= CATALOG_EVERY_NS:
            self._catalog_ns = now_ns
            self._catalogs()
        if layout_changed or self._topology_ns is None or now_ns - self._topology_ns >= TOPOLOGY_EVERY_NS:
            self._topology_ns = now_ns
            self._node_events()
            self._job_events()
            self._tell_conflicts()

    def _catalogs(self) -> None:
        for family in self._families.values():
            self._outbox.put(topics.CATALOG.name, family.catalog_id.encode(), family.catalog(), Value.BEACON)

    def _node_events(self) -> None:
        own = {key: getattr(self.facts, key) for key in ("rail_address", "probe_address", "rdma_address")}
        claims = self.facts.board.merged("node")
        found = {key: claim for key, claim in claims.items() if claim.source != CONFIGURATION}
        attributes = {key: claim.value for key, claim in claims.items()}
        attributes |= {key: value for key, value in own.items() if value}
        if found:
            attributes["origins"] = origins_of(claims)
        entity = f"node:{self._node}"
        for event in self._memory.events(entity, event_origin(found.values()), attributes, self._clock.now_ns()):
            self._outbox.put(topics.TOPOLOGY.name, entity.encode(), event, Value.BEACON)

    def _job_events(self) -> None:
        """The ranks of this node, and the board saved anew, so that its age tells whether to believe it.

        The key names the node too, else the nodes of a job would compact each other away.
        """
        self._ranks.save()
        for job, states in self._ranks.layouts().items():
            attempt = states[0].generation
            since_ns = self._valid_from.setdefault((job, attempt), self._clock.now_ns())
            world = max(state.world for state in states)
            said = {key: claim.value for key, claim in self.facts.board.merged(f"job:{job}").items()}
            event = TopologyEvent(
                entity=f"job:{job}", origin="hook", valid_from_ns=since_ns, attempt=attempt,
                attributes={**({"world": str(world)} if world else {}), **said},
                ranks=tuple((s.rank, self._node, rank_device(s, self.facts)) for s in states),
            )  # fmt: skip
            self._outbox.put(topics.TOPOLOGY.name, f"job:{job}|{self._node}".encode(), event, Value.BEACON)

    def _tell_conflicts(self) -> None:
        for conflict in self.facts.board.conflicts():
            if conflict.identity in self._told or len(self._told) >= MAX_TOLD:
                continue
            self._told[conflict.identity] = None
            job = conflict.entity.removeprefix("job:") if conflict.entity.startswith("job:") else ""
            event = LogEvent(source="topology", severity="warning", code="topology_conflict", line=conflict.sentence(),
                             attributes=conflict.attributes(), job=job)  # fmt: skip
            self._outbox.log(event, urgent=False)


def event_origin(claims: Iterable[Claim]) -> str:
    """The strongest origin among what sources found, as topology events call it; ``inferred`` when nothing was found."""
    best = min((ORIGINS.index(claim.origin) for claim in claims), default=len(ORIGINS) - 1)
    origin = EVENT_ORIGIN.get(ORIGINS[best], ORIGINS[best])
    return origin if origin in PRECEDENCE else "inferred"


def origins_of(claims: dict[str, Claim]) -> str:
    """``"scheduler:slurm=leaf,spine operator:configuration=rack"``: whose words the attributes are."""
    found: dict[str, list[str]] = {}
    for key, claim in claims.items():
        found.setdefault(f"{claim.origin}:{claim.source}", []).append(key)
    return " ".join(f"{whose}={','.join(keys)}" for whose, keys in found.items())


def rank_device(state: RankState, facts: Facts) -> str:
    """Where on the node a rank runs: ``gpu3``; ``cpu`` on a node without accelerators; empty when it is not clear which one."""
    if facts.gpus == 0:
        return "cpu"
    launch = facts.processes.of(state.pid)
    if launch is None:
        return ""
    whole = not launch.pod_uid or facts.pod_devices.get(launch.pod_uid, 0) >= facts.gpus
    return device_of(launch, state.local_rank, facts.gpus) if whole else ""
