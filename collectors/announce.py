"""What a node says about itself: catalogues of its families, its own topology, and where the ranks of its jobs run."""

from __future__ import annotations

from collections.abc import Sequence

from collectors.base import Facts, Source
from collectors.outbox import Outbox
from collectors.ranks import RankBoard
from collectors.spool import Value
from trainwarden import topics
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.records import TopologyEvent

TOPOLOGY_EVERY_NS = 30 * NS_PER_S
CATALOG_EVERY_NS = 60 * NS_PER_S


class Announcer:
    """Repeats what compacted topics hold, so that a broker that forgot it learns it again: topology every 30 s and on a change,
    catalogues every minute.
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
    ) -> None:
        self._node = node
        self._rack = rack
        self._clock = clock
        self._outbox = outbox
        self._ranks = ranks
        self._facts = facts
        self._families = {family.name: family for source in sources for family in source.families}
        self._topology_ns: int | None = None
        self._catalog_ns: int | None = None
        self._valid_from: dict[tuple[str, int], int] = {}

    def announce(self, layout_changed: bool) -> None:
        """Say what is due."""
        now_ns = self._clock.monotonic_ns()
        if self._catalog_ns is None or now_ns - self._catalog_ns >= CATALOG_EVERY_NS:
            self._catalog_ns = now_ns
            self._catalogs()
        if layout_changed or self._topology_ns is None or now_ns - self._topology_ns >= TOPOLOGY_EVERY_NS:
            self._topology_ns = now_ns
            self._node_event()
            self._job_events()

    def _catalogs(self) -> None:
        for family in self._families.values():
            self._outbox.put(topics.CATALOG.name, family.catalog_id.encode(), family.catalog(), Value.BEACON)

    def _node_event(self) -> None:
        attributes = {
            "rack": self._rack,
            "rail_address": self._facts.rail_address,
            "probe_address": self._facts.probe_address,
        }
        entity = f"node:{self._node}"
        event = TopologyEvent(entity=entity, origin="inferred", valid_from_ns=self._clock.now_ns(),
                              attributes={k: v for k, v in attributes.items() if v})  # fmt: skip
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
            event = TopologyEvent(
                entity=f"job:{job}", origin="hook", valid_from_ns=since_ns, attempt=attempt,
                attributes={"world": str(world)} if world else {}, ranks=tuple((s.rank, self._node, "cpu") for s in states),
            )  # fmt: skip
            self._outbox.put(topics.TOPOLOGY.name, f"job:{job}|{self._node}".encode(), event, Value.BEACON)
