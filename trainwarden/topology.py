"""Who is where: nodes, racks and the placement of ranks, learnt from `TopologyEvent`s with valid time and precedence."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from trainwarden.parallel import KEYS, ParallelLayout, parallel_layout
from trainwarden.records import TopologyEvent

PRECEDENCE = ("operator", "scheduler", "hook", "inferred")
"""Who is believed first. Within one origin the later `valid_from_ns` wins."""


@dataclass(frozen=True)
class JobLayout:
    """Placement of one attempt of a job: rank → (node, device). `attributes` say how it is parallel (`trainwarden.parallel`)."""

    job: str
    attempt: int
    ranks: dict[int, tuple[str, str]]
    attributes: dict[str, str] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Nodes of the job, in order of their lowest rank."""
        return tuple(self._ranks_by_node)

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """Ranks that run on `node`."""
        return self._ranks_by_node.get(node, ())

    @cached_property
    def _ranks_by_node(self) -> dict[str, tuple[int, ...]]:
        """A layout is asked each second and made anew when a rank moves."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.ranks):
            found.setdefault(self.ranks[rank][0], []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    @property
    def parallel(self) -> ParallelLayout | None:
        """How the job is parallel; None when nobody said so, or what was said does not fit the number of ranks."""
        return parallel_layout(self.attributes, max(self.ranks, default=-1) + 1)

    def stage_of(self, rank: int) -> int:
        """Pipeline stage of a rank; 0 when the layout is unknown."""
        return self.parallel.coordinate(rank, "pp") if self.parallel and rank in self.ranks else 0

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """Ranks that do the same work as `rank` on other data, itself included; all ranks when the layout is unknown."""
        if self.parallel is None or rank not in self.ranks:
            return tuple(sorted(self.ranks))
        groups = self.parallel.peer_groups()
        return tuple(sorted(other for other in self.ranks if groups[other] == groups[rank]))


@dataclass
class Topology:
    """The present picture. `apply` returns a sentence when two origins of equal standing disagree."""

    _nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    _node_origin: dict[str, tuple[int, int]] = field(default_factory=dict)
    _jobs: dict[str, JobLayout] = field(default_factory=dict)
    _job_origin: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def copy(self) -> Topology:
        """The same picture, which goes its own way from here: layouts and attributes are replaced, never changed."""
        return Topology(dict(self._nodes), dict(self._node_origin), dict(self._jobs), dict(self._job_origin))

    def apply(self, event: TopologyEvent) -> str | None:
        """Take an event in; an older or lower one is ignored, a contradiction at the same standing is reported."""
        kind, _, name = event.entity.partition(":")
        if event.origin not in PRECEDENCE or kind not in ("node", "job") or not name:
            expected = f"expected node:<name> or job:<name> and one of {', '.join(PRECEDENCE)}"
            return f"topology event for {event.entity!r} from {event.origin!r}: {expected}"
        return self._apply_node(name, event) if kind == "node" else self._apply_job(name, event)

    def job(self, name: str) -> JobLayout | None:
        """Layout of a job's newest attempt."""
        return self._jobs.get(name)

    def jobs(self) -> tuple[JobLayout, ...]:
        """All jobs, by name."""
        return tuple(self._jobs[name] for name in sorted(self._jobs))

    def job_of(self, node: str) -> JobLayout | None:
        """The job that runs on `node`, if one."""
        return next((layout for layout in self.jobs() if node in layout.nodes), None)

    def told_node(self, job: str, attempt: int, rank: int) -> str:
        """Node of a rank as operator, scheduler or hook say; empty when none of them did, or of another attempt."""
        layout = self._jobs.get(job)
        if layout is None or layout.attempt != attempt or rank not in layout.ranks:
            return ""
        inferred = self._job_origin[job][1] <= -PRECEDENCE.index("inferred")
        return "" if inferred else layout.ranks[rank][0]

    def nodes(self) -> tuple[str, ...]:
        """Every node known, sorted."""
        return tuple(sorted(self._nodes))

    def attributes(self, node: str) -> dict[str, str]:
        """Rack, leaf, rail addresses... of a node; empty when unknown."""
        return self._nodes.get(node, {})

    def _apply_node(self, name: str, event: TopologyEvent) -> str | None:
        standing = (-PRECEDENCE.index(event.origin), event.valid_from_ns)
        if event.removed:
            self._nodes.pop(name, None)
            self._node_origin.pop(name, None)
            return None
        if standing < self._node_origin.get(name, (-len(PRECEDENCE), 0)):
            return None
        self._node_origin[name] = standing
        known = self._nodes.get(name)
        merged = {**(known or {}), **event.attributes}
        if merged != known:  # each node says again what it is: who looked at it keeps what was found
            self._nodes[name] = merged
        return None

    def _apply_job(self, name: str, event: TopologyEvent) -> str | None:
        if event.removed:
            self._jobs.pop(name, None)
            self._job_origin.pop(name, None)
            return None
        standing = (event.attempt, -PRECEDENCE.index(event.origin), event.valid_from_ns)
        known = self._job_origin.get(name)
        ranks = {rank: (node, device) for rank, node, device in event.ranks}
        if known is not None and standing[:2] == known[:2]:
            return self._merge_ranks(name, event, ranks)
        if known is None or standing > known:
            self._job_origin[name] = standing
            before = self._jobs.get(name)
            self._jobs[name] = JobLayout(name, event.attempt, ranks, _parallel_attributes(event, before))
        return None

    def _merge_ranks(self, name: str, event: TopologyEvent, ranks: dict[int, tuple[str, str]]) -> str | None:
        layout = self._jobs[name]
        for rank, place in ranks.items():
            if layout.ranks.get(rank, place)[0] != place[0]:
                return f"job {name} attempt {event.attempt}: rank {rank} is claimed by {layout.ranks[rank][0]} and by {place[0]}"
        attributes = _parallel_attributes(event, layout)
        # each node says again where its ranks are: a job of thousands is not copied, and keeps its identity, while nothing is new
        news = {rank: place for rank, place in ranks.items() if layout.ranks.get(rank) != place}
        if news or attributes != layout.attributes:
            self._jobs[name] = JobLayout(name, event.attempt, {**layout.ranks, **news}, attributes)
        return None


def _parallel_attributes(event: TopologyEvent, before: JobLayout | None) -> dict[str, str]:
    """What the event says of the job's layout, all of it or none: else what was said before still holds (restarts rarely change it)."""
    said = {key: event.attributes[key] for key in KEYS if key in event.attributes}
    return said or (before.attributes if before else {})
