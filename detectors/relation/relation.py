"""The detector of node relations: one job at a time, one answer for all its nodes, links and shared parts.

Every five seconds each node is compared with what its own past and its relatives make likely (`models.relation`), and the evidence of all
nodes, ports and groups is explained by the fewest causes (`detectors.relation.attribution`). It adds its voice to what others open.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import numpy as np

from detectors.base import AlignedTick, Detector, Frame, series_evidence
from detectors.relation.attribution import Cause, attribute, own_of_group
from detectors.relation.conviction import convict
from detectors.relation.features import LOCAL, ROUND_S
from detectors.relation.gather import Gathered, channels
from detectors.relation.graph import Graph, Relation, graph_of
from detectors.relation.judge import Calibration, Judge, Related
from detectors.relation.learnt import learnt_relation
from detectors.relation.opinions import Opinion, Opinions
from detectors.relation.rows import Places, Rows
from detectors.state import Array, decode_state, encode_state
from detectors.steps.assembly import MAX_VICTIMS, Assembly
from detectors.steps.silence import forget_silent
from detectors.steps.table import StepTable, tables_of
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from models.relation import weights
from models.relation.weights import Trained
from trainwarden.clock import NS_PER_S
from trainwarden.errors import ConfigError, TrainwardenError
from trainwarden.records import Entity, EntityKind, Evidence, Reach, Verdict
from trainwarden.settings import option
from trainwarden.topology import JobLayout, Topology

log = logging.getLogger(__name__)

ROUND_NS = int(ROUND_S * NS_PER_S)
_HISTORY, _LEARN_EVERY = 36, 24
NAMED_ONLY = 0.8
"""Most that is stated for what is named and would not suffice to isolate: likelihoods alone say 1 for nearly all, nine in ten are right."""
REACHES = ("store", "correlate", "notify")
_PLACES = {"rack": "rack", "pdu": "power unit", "zone": "cooling zone", "leaf": "leaf", "rail": "rail"}


@dataclass(frozen=True)
class RelationSettings:
    """Settings of `relation`."""

    least_nodes: int = option(8, "jobs of fewer nodes have too few relatives: others look after them")
    caution: float = option(1.0, "multiplies the price of every cause: above 1 names less")
    restate_s: float = option(15.0, "while a cause stands, it is said again after so long")
    reach: str = option(
        "correlate",
        "how far it may reach with what suffices to isolate a node: notify opens incidents, correlate adds to those of others; all else "
        "that it names only correlates (see docs/relation.md)",
    )

    def __post_init__(self) -> None:
        if self.reach not in REACHES:
            raise ConfigError(f"detectors.relation.reach: {self.reach!r}, expected one of {', '.join(REACHES)}")


class JobState(msgspec.Struct):
    """What is known of one job. `history` holds local innovations of the last rounds while nobody says how the job is parallel."""

    assembly: Assembly
    gathered: Gathered = msgspec.field(default_factory=Gathered)
    judge: Judge = msgspec.field(default_factory=Judge)
    opinions: Opinions = msgspec.field(default_factory=Opinions)
    round: int = -1
    rails: list[str] = []
    history: list[Array] = []
    learnt: list[int] = []


class State(msgspec.Struct):
    """State of the detector."""

    jobs: dict[str, JobState] = {}
    ticking: bool = False


@dataclass
class _Kept:
    """A job's graph, and what it was made from."""

    layout: JobLayout
    facts: list[dict[str, str]]
    learnt: list[int]
    related: Related
    places: Places
    checked: tuple[int, int] = (0, -1)

    @classmethod
    def of(
        cls, layout: JobLayout, topology: Topology, facts: list[dict[str, str]], learnt: list[int], rows: Rows
    ) -> _Kept:
        graph = _with_learnt(graph_of(layout, topology), learnt)
        places = Places(graph, rows)
        places.learn_rails(topology)
        return cls(replace(layout), [dict(fact) for fact in facts], learnt, Related(graph), places)


class RelationDetector(Detector):
    """Says `compute_slow`, `data_slow` or `link_slow` of a node, `subnet_slow` of a leaf or rail, `shared_slow` of a place."""

    name = "relation"
    kinds = ("compute_slow", "data_slow", "link_slow", "subnet_slow", "shared_slow")
    version: ClassVar[int] = 3
    false_alarms_per_node_day: ClassVar[float] = 0.2
    Settings = RelationSettings
    settings: RelationSettings

    def __init__(self, settings: RelationSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()
        self._graphs: dict[str, _Kept] = {}
        self._rows = Rows()
        self._counted: dict[str, tuple[list[str], bool]] = {}
        self._trained = self._load()

    def _load(self) -> Trained | None:
        try:
            return weights.load()
        except TrainwardenError as error:
            log.warning("detector relation is off, all others run: %s", error)
            return None

    def update(self, frame: Frame) -> list[Verdict]:
        if self._trained is None:
            return []
        for job, table in tables_of(frame).items():
            self._take_in(self._state.jobs.setdefault(job, JobState(Assembly(job))), table, frame.now_ns)
        self._state.ticking |= bool(frame.ticks)
        verdicts: list[Verdict] = []
        for state in self._state.jobs.values():
            for step in state.assembly.close(frame.now_ns):
                if step.usual:
                    state.gathered.put_step(step)
            verdicts += self._advance(state, frame)
        forget_silent(self._state.jobs, frame.now_ns, lambda state: state.assembly.last_heard_ns)
        self._graphs = {job: kept for job, kept in self._graphs.items() if job in self._state.jobs}
        self._counted = {job: known for job, known in self._counted.items() if job in self._state.jobs}
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """Node 5 of twelve computes 30 ms longer in a step of 65 ms from second 100 on."""
        frames = SyntheticCluster(nodes=12, seed=1).frames(
            150, lambda second: Scene(compute_ms={5: 30.0}) if second >= 100 else None
        )
        return Example(frames, "compute_slow", node_entity(5))

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)
        self._graphs = {}

    def _take_in(self, state: JobState, table: StepTable, now_ns: int) -> None:
        if state.assembly.take(table, now_ns, pipelined=True):
            state.gathered = Gathered()

    def _advance(self, state: JobState, frame: Frame) -> list[Verdict]:
        if not self._whole(state.assembly):
            return []
        related, places = self._related(state, frame.topology)
        verdicts: list[Verdict] = []
        for tick in frame.ticks:
            self._put(state, places, tick)
            verdicts += self._turn(state, tick.at_ns, related)
        if not self._state.ticking:
            verdicts += self._turn(state, frame.now_ns, related)
        return verdicts

    def _whole(self, assembly: Assembly) -> bool:
        """Whether every rank's node is known, and there are enough of them; looked at again when somebody says something new."""
        known = self._counted.get(assembly.job)
        if known is None or known[0] is not assembly.nodes:
            nodes = [node for node in assembly.nodes if node]
            whole = len(set(nodes)) >= self.settings.least_nodes and len(nodes) >= assembly.world
            known = self._counted[assembly.job] = (assembly.nodes, whole)
        return known[1]

    def _put(self, state: JobState, places: Places, tick: AlignedTick) -> None:
        node, gpu, port, rails = channels(tick, places)
        state.gathered.put_tick(node, gpu, port)
        state.rails = list(rails) or state.rails

    def _turn(self, state: JobState, at_ns: int, related: Related) -> list[Verdict]:
        """Close the round when its time is over."""
        number = at_ns // ROUND_NS
        if number <= state.round:
            return []
        begun, state.round = state.round >= 0, number
        return self._judge(state, at_ns, related) if begun else []

    def _judge(self, state: JobState, at_ns: int, related: Related) -> list[Verdict]:
        trained, graph = self._trained, related.graph
        assert trained is not None, "update asks only when there is a model"
        calibration = Calibration(trained.node_table, trained.port_table, trained.normal)
        before = state.judge.evidence(calibration, related) if state.judge.sums.node else None
        frozen = state.opinions.frozen(before, len(graph.nodes))
        seen = state.gathered.close(at_ns, graph.rank_node, len(graph.nodes))
        found = state.judge.residuals(seen, related, trained.served, frozen)
        self._learn_relation(state, graph, found.node[LOCAL])
        if not found.warm:
            return []
        evidence = state.judge.evidence(calibration, related)
        prices = {kind: self.settings.caution * price for kind, price in trained.prices.items()}
        rails = tuple(state.rails) or tuple(map(str, range(evidence.port.shape[2])))
        steady = state.opinions.steady(own_of_group(evidence.node, graph))
        causes = attribute(evidence, graph, state.opinions.prices(prices), rails, steady)
        state.opinions.learn(bool(causes))
        standing, over = state.opinions.take(causes, at_ns)
        convict(standing, evidence, state.judge.sums.effect, graph)
        said = [
            self._say(state, graph, opinion, cause, at_ns) for opinion, cause in standing if self._due(opinion, at_ns)
        ]
        return said + [self._take_back(state, graph, opinion, at_ns) for opinion in over]

    def _due(self, opinion: Opinion, at_ns: int) -> bool:
        surer = opinion.isolates and not opinion.told
        due = surer or not opinion.said_ns or at_ns - opinion.said_ns >= self.settings.restate_s * NS_PER_S
        opinion.said_ns = at_ns if due else opinion.said_ns
        opinion.told = opinion.isolates
        return due

    # --- the graph -----------------------------------------------------------------------------------------------------------------

    def _related(self, state: JobState, topology: Topology) -> tuple[Related, Places]:
        """The job's graph: made anew when its layout, its nodes' places or what was learnt change."""
        job = state.assembly.job
        layout = topology.job(job)
        fits = (
            layout is not None
            and layout.attempt == state.assembly.attempt
            and len(layout.ranks) == state.assembly.world
        )
        if layout is None or not fits:
            layout = JobLayout(
                job, state.assembly.attempt, {rank: (node, "") for rank, node in enumerate(state.assembly.nodes)}
            )
        kept = self._graphs.get(job)
        if kept is None or kept.checked != (id(layout), state.round) or kept.learnt != state.learnt:
            facts = [topology.attributes(node) for node in layout.nodes]
            if kept is None or (layout.ranks, layout.attributes, facts, state.learnt) != (
                kept.layout.ranks,
                kept.layout.attributes,
                kept.facts,
                kept.learnt,
            ):
                kept = self._graphs[job] = _Kept.of(layout, topology, facts, list(state.learnt), self._rows)
                self._settle(state, kept.related.graph)
            kept.checked = (id(layout), state.round)
        return kept.related, kept.places

    def _settle(self, state: JobState, graph: Graph) -> None:
        """What was learnt of nodes goes with them; opinions and half a round do not."""
        if state.judge.nodes != list(graph.nodes):
            state.judge.settle(graph)
            state.gathered, state.opinions, state.history, state.learnt = Gathered(), Opinions(), [], []

    def _learn_relation(self, state: JobState, graph: Graph, local: Array) -> None:
        """Where nobody says who does the same work, see who moves together."""
        if graph.described:
            state.history = []
            return
        state.history = [*state.history, local.astype(np.float32)][-_HISTORY:]
        if state.judge.past.rounds % _LEARN_EVERY == 0 and len(state.history) >= _LEARN_EVERY:
            relation = learnt_relation(np.stack(state.history))
            state.learnt = relation.group.tolist() if relation is not None else []

    # --- words ---------------------------------------------------------------------------------------------------------------------

    def _say(self, state: JobState, graph: Graph, opinion: Opinion, cause: Cause, at_ns: int) -> Verdict:
        kind, entity = _kind_of(opinion, graph)
        others = ", ".join(f"{name or kind} {p:.2g}" for kind, name, p in cause.others[:4])
        sure = min(0.95 if opinion.isolates else NAMED_ONLY, cause.probability)
        text = f"{_what(cause)} ({', '.join(cause.channels) or 'all together'}); probability {sure:.2f}, else {others}"
        text += "; enough to isolate it" if opinion.isolates else ""
        shown = self._evidence(state, graph, opinion, cause, at_ns)
        return self._opinion(state, graph, opinion, kind, entity, at_ns, text, sure, cause.gain, shown)

    def _take_back(self, state: JobState, graph: Graph, opinion: Opinion, at_ns: int) -> Verdict:
        kind, entity = _kind_of(opinion, graph)
        return self._opinion(
            state,
            graph,
            opinion,
            kind,
            entity,
            at_ns,
            f"{opinion.name} is as its relatives are again",
            0.9,
            0.0,
            (),
            clears=True,
        )

    def _opinion(
        self, state: JobState, graph: Graph, opinion: Opinion, kind: str, entity: Entity, at_ns: int, text: str, confidence: float,
        score: float, evidence: tuple[Evidence, ...], clears: bool = False,
    ) -> Verdict:  # fmt: skip
        below = (
            opinion.members
            if len(opinion.members) > 1
            else [i for i in range(len(graph.nodes)) if i not in opinion.members]
        )
        made = self.verdict(
            kind=kind, entity=entity, window=(opinion.first_ns, at_ns), onset_at_ns=opinion.first_ns, job=state.assembly.job,
            attempt=state.assembly.attempt, score=round(score, 3), confidence=max(confidence, 0.05), text=text, evidence=evidence,
            victims=tuple(graph.nodes[i] for i in below)[:MAX_VICTIMS], clears=clears,
        )  # fmt: skip
        reach = self.settings.reach if opinion.isolates else min(self.settings.reach, "correlate", key=REACHES.index)
        return msgspec.structs.replace(made, reach=Reach(reach))

    def _evidence(
        self, state: JobState, graph: Graph, opinion: Opinion, cause: Cause, at_ns: int
    ) -> tuple[Evidence, ...]:
        times = [at_ns - (opinion.seen[-1] - seen) * ROUND_NS for seen in opinion.seen]
        gains = series_evidence(
            f"evidence against {cause.name}, less its price", "nats", times, opinion.gains, limit=24
        )
        member = cause.members[0]
        effect = [float(np.nan_to_num(row[LOCAL, list(cause.members)]).mean()) for row in state.judge.sums.effect]
        rounds = [at_ns - (len(effect) - 1 - i) * ROUND_NS for i in range(len(effect))]
        beside = ", ".join(f"{name} ({relation})" for relation, name, _ in graph.neighbours(member, 6))
        own = series_evidence(
            "own time above what relatives and past make likely",
            "share",
            rounds,
            effect,
            note=f"compared with {beside}"[:600],
        )
        return own, gains, _subgraph(graph, cause, at_ns)


def _with_learnt(graph: Graph, learnt: list[int]) -> Graph:
    if len(learnt) != len(graph.nodes) or graph.described:
        return graph
    group = np.array(learnt, dtype=np.int64)
    names = tuple(f"alike {number}" for number in range(int(group.max(initial=-1)) + 1))
    return replace(graph, relations={**graph.relations, "learnt": Relation("learnt", group, names)})


def _subgraph(graph: Graph, cause: Cause, at_ns: int) -> Evidence:
    """The groups that the first member belongs to, with their sizes."""
    member = cause.members[0]
    parts, sizes = [], []
    for kind, relation in graph.relations.items():
        number = int(relation.group[member])
        if number >= 0:
            parts.append(f"{kind} {relation.names[number]}"[:60])
            sizes.append(float(len(relation.members(number))))
    return Evidence("groups around it", "nodes", (at_ns,) * len(sizes), tuple(sizes), note="; ".join(parts)[:900])


def _kind_of(opinion: Opinion, graph: Graph) -> tuple[str, Entity]:
    if opinion.kind in ("node", "port"):
        node = graph.nodes[opinion.members[0]]
        slow = "data_slow" if opinion.channels[:1] == ["data"] else "compute_slow"
        return slow if opinion.kind == "node" else "link_slow", Entity(EntityKind.NODE, node, node)
    if opinion.kind in ("leaf", "rail"):
        return "subnet_slow", Entity(EntityKind(opinion.kind), opinion.name)
    return "shared_slow", Entity(EntityKind.LEAF, opinion.name)


def _what(cause: Cause) -> str:
    if cause.kind == "node":
        return f"{cause.name} is slower than its past and its relatives explain"
    if cause.kind == "port":
        return f"port {cause.name} is worse than the other ports of its node"
    return f"{len(cause.members)} nodes of {_PLACES[cause.kind]} {cause.name} are worse together: a shared cause, none of them"
