"""Raw records in, frames out: the only place where arrival order matters, and it is made to matter as little as possible.

Records are buffered by `add` and sorted at `cut`, so a frame depends on *which* records came before the cut, never on how
the partitions were interleaved. Arrival time is the time of the cut. A `FrameCut` (time and positions) therefore describes a
frame completely: reading the same offsets and cutting at the same times gives the same frames.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from detectors.base import Frame
from streams.arrivals import Clocks, Seen
from streams.beats import Beats
from streams.grid import Grid
from streams.matrices import Catalogs, pack, unpack
from streams.voices import Voices
from trainwarden.clock import NS_PER_S
from trainwarden.config import Config
from trainwarden.records import Catalog, LogEvent, Placement, Record, StepReport, Tick, TopologyEvent, decode, encode
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import EVENTS
from trainwarden.topology import JobLayout, Topology


@dataclass(frozen=True)
class AlignSettings:
    """Dials of the aligner.

    Attributes
    ----------
    forget_s
        A silent node stays expected (`present=False`) for so long.
    skew_ms
        A clock further off than this is counted and corrected on the grid.
    parked_limit, parked_s
        How many ticks may wait for their catalogue, and how long, before they become dead letters.
    """

    interval_ms: int = 1000
    lateness_ms: int = 2000
    forget_s: float = 60.0
    skew_ms: int = 1000
    parked_limit: int = 5000
    parked_s: float = 60.0

    @classmethod
    def of(cls, config: Config) -> AlignSettings:
        """Settings as configured."""
        streams = config.streams
        return cls(config.collector.interval_ms, streams.lateness_ms, streams.forget_node_s)


@dataclass(frozen=True)
class Rejected:
    """A record that could be decoded but not used: where it lay and why."""

    topic: str
    partition: int
    offset: int
    reason: str
    payload: bytes


class Placed(NamedTuple):
    """A record and where it lay. One is made for each message: a frozen dataclass would take four times as long."""

    topic: str
    partition: int
    offset: int
    record: Record


@dataclass(frozen=True)
class _Parked:
    since_ns: int
    placed: Placed


VOICED = (Tick, StepReport, LogEvent)
"""What the collector of a node says."""
RENEWED_NS = 2 * NS_PER_S
"""By then every node has been heard again."""
AHEAD_NS = 5 * NS_PER_S
BEHIND_NS = 24 * 3600 * NS_PER_S
"""A tick further from the time of its cut than this would move the grid for everybody: it becomes a dead letter."""


def _wild_time(ahead_ns: int) -> str | None:
    """What is wrong with a tick observed so long after (before, when negative) the cut; None for a usable one."""
    if ahead_ns > AHEAD_NS:
        return f"{ahead_ns / NS_PER_S:.0f} s in the future"
    return f"{-ahead_ns / NS_PER_S:.0f} s ago" if ahead_ns < -BEHIND_NS else None


class Aligner:
    """Builds frames. Pure: no clock, no I/O; everything it knows is in `snapshot`."""

    def __init__(self, settings: AlignSettings, metrics: Metrics | None = None) -> None:
        self.settings = settings
        self._metrics = metrics or Metrics("align")
        self._pending: list[Placed] = []
        self._read_to: dict[str, int] = {}
        self.positions: dict[str, int] = {}
        """Next offsets *not* contained in the last cut."""
        self._catalogs = Catalogs()
        self._seen = Seen()
        self._voices: Voices[Placed] = Voices()
        self._clocks = Clocks(settings.skew_ms, settings.interval_ms)
        self._beats = Beats(settings.interval_ms)
        self._crowded: frozenset[str] = frozenset()
        self._grid = Grid(settings.interval_ms, settings.lateness_ms, settings.forget_s)
        self._cut_ns, self._set_back_ns, self._counted_ns, self._wild = 0, -RENEWED_NS, -1, (0, 0)
        self._parked: list[_Parked] = []
        self._rejected: list[Rejected] = []
        self.topology = Topology()
        self._expected: set[str] = set()
        self._expected_of: Topology | None = None
        self._running: dict[str, tuple[tuple[Placement, ...], tuple[JobLayout, ...]]] = {}
        self.inferred: list[TopologyEvent] = []
        """Placements that nobody had said, until whoever publishes them clears it: ranks were seen where they run."""

    def add(self, topic: str, partition: int, offset: int, record: Record) -> None:
        """Take a record in; it takes effect at the next cut."""
        self.skip(topic, partition, offset)
        self._pending.append(Placed(topic, partition, offset, record))

    def skip(self, topic: str, partition: int, offset: int) -> None:
        """Count an offset as read without a record (malformed bytes)."""
        self._read_to[f"{topic}/{partition}"] = offset + 1

    def cut(self, now_ns: int) -> Frame | None:
        """A frame of everything added since the last cut; None while there is nothing to say and nobody to wait for."""
        self._note_own_clock(now_ns)
        pending, self._pending = sorted(self._heard(self._pending, now_ns), key=canonical), []
        self.positions = dict(self._read_to)
        self._learn(placed.record for placed in pending)
        ticks, steps, logs = self._fresh(pending)
        self._infer_placements([*(p.record for p in ticks), *steps])
        self._note_clocks(ticks, now_ns)
        self._place_all(ticks, now_ns)
        closed = tuple(self._grid.close(now_ns, self._placed_nodes(), self._catalogs, self._voices.waiting()))
        if not pending and not closed and self._grid.idle:
            return None
        return Frame(now_ns, closed, tuple(steps), tuple(logs), self.topology)

    def more(self, now_ns: int) -> bool:
        """Whether another cut at the same time would bring a frame of its own; never of raw records."""
        del now_ns
        return False

    def take_rejected(self) -> list[Rejected]:
        """Records refused since the last call, for the dead-letter topic."""
        rejected, self._rejected = self._rejected, []
        return rejected

    @property
    def closed_until_ns(self) -> int:
        """Time of the newest closed tick; 0 before the first."""
        return self._grid.closed_until_ns

    def snapshot(self) -> bytes:
        """State as of the last cut; records added since then belong to whoever reads on from `positions`."""
        return pack(
            {
                "positions": self.positions,
                "catalogs": self._catalogs.snapshot(),
                "seen": self._seen.snapshot(),
                "clocks": self._clocks.snapshot(),
                "beats": self._beats.snapshot(),
                "grid": self._grid.snapshot(),
                "topology": _topology_state(self.topology),
                "inferred": [encode(event) for event in self.inferred],
                "parked": [[p.since_ns, *_plain(p.placed)] for p in self._parked],
                "voices": [self._voices.snapshot(), [[node, *_plain(placed)] for node, placed in self._voices.held()]],
                "unproven": sorted(self._voices.unproven),
            }
        )

    def restore(self, payload: bytes) -> None:
        """Go on where `snapshot` was taken."""
        state = unpack(payload)
        self._pending, self._rejected = [], []
        self.positions, self._read_to = dict(state["positions"]), dict(state["positions"])
        self._catalogs.restore(state["catalogs"])
        self._seen.restore(state["seen"])
        self._clocks.restore(state["clocks"])
        self._beats.restore(state.get("beats", {}))
        self._grid.restore(state["grid"])
        self.topology = _topology_from(state["topology"])
        self.inferred = [decode(payload) for payload in state.get("inferred", ())]  # an older worker did not keep them
        self._parked = [
            _Parked(since, Placed(topic, part, offset, decode(p))) for since, topic, part, offset, p in state["parked"]
        ]
        voices, held = state.get("voices", ({}, ()))  # an older worker did not tell voices apart
        self._voices.restore(voices, [(node, Placed(t, part, offset, decode(p))) for node, t, part, offset, p in held])
        self._voices.unproven = set(state.get("unproven", ()))

    def _heard(self, pending: list[Placed], now_ns: int) -> list[Placed]:
        """What the collector of each node says; topology and catalogues have speakers of other kinds, too."""
        voiced: list[Placed] = []
        others: list[Placed] = []
        for placed in pending:
            (voiced if isinstance(placed.record, VOICED) else others).append(placed)
        admitted, refused = self._voices.admit(voiced, now_ns)
        for placed, reason in refused:
            self._reject(placed, reason)
        return others + admitted

    def _fresh(self, pending: list[Placed]) -> tuple[list[Placed], list[StepReport], list[LogEvent]]:
        """What was never seen before and is nobody else's."""
        ticks: list[Placed] = []
        steps: list[StepReport] = []
        logs: list[LogEvent] = []
        for placed in pending:
            record = placed.record
            if not self._first_time(placed):
                continue
            if isinstance(record, Tick):
                ticks.append(placed)
            elif isinstance(record, StepReport):
                if not self._is_of_another(placed):
                    steps.append(record)
            elif isinstance(record, LogEvent):
                logs.append(record)
        return ticks, steps, logs

    def _is_of_another(self, placed: Placed) -> bool:
        """Steps of a rank that is placed on another node, which speaks for itself."""
        report = placed.record
        if not isinstance(report, StepReport):
            return False
        node = self.topology.told_node(report.job, report.attempt, report.rank)
        if node in ("", report.node) or not self._voices.knows(node):
            return False
        self._reject(placed, f"{report.node} tells steps of rank {report.rank} of {report.job}, which runs on {node}")
        return True

    def _learn(self, records: Iterable[Record]) -> None:
        """Catalogues and topology first: what else came in the same cut may need them."""
        changed = False
        for record in records:
            if isinstance(record, Catalog):
                self._catalogs.learn(record)
            elif isinstance(record, TopologyEvent):
                changed = changed or self._own_topology()
                self._apply(record)

    def _own_topology(self) -> bool:
        """Copy before the first change of a cut: frames handed out keep the picture they were made with."""
        self.topology = self.topology.copy()
        return True

    def _apply(self, event: TopologyEvent) -> None:
        if self.topology.apply(event) is not None:
            self._metrics.count("tw_topology_conflicts_total", origin=event.origin)
        if event.removed and event.entity.startswith("node:"):
            self._grid.forget(event.entity.removeprefix("node:"))

    def _first_time(self, placed: Placed) -> bool:
        record = placed.record
        if isinstance(record, (Catalog, TopologyEvent)):
            return False
        # events and lines of a node are numbered in one row, and lines may come minutes later: looked at together they would be old holes
        kind = type(record).__name__ if placed.topic != EVENTS.name else EVENTS.name
        if self._seen.first_time(kind, record):
            return True
        self._metrics.count("tw_duplicates_total", topic=placed.topic)
        return False

    def _infer_placements(self, records: Iterable[Record]) -> None:
        """Ranks seen on a node are its placement, where nobody better says so."""
        owned = False
        for record in records:
            if isinstance(record, Tick):
                if self._as_before(record):
                    continue
            elif isinstance(record, StepReport) and self._is_placed(record):
                continue
            for job, attempt, rank, device in _placements(record):
                if self._is_placed(Placement(job, attempt, rank)):
                    continue
                owned = owned or self._own_topology()
                event = TopologyEvent(
                    node=record.node,
                    observed_at_ns=record.observed_at_ns,
                    entity=f"job:{job}",
                    attempt=attempt,
                    valid_from_ns=record.observed_at_ns,
                    ranks=((rank, record.node, device),),
                )
                self.inferred.append(event)
                self._apply(event)

    def _as_before(self, tick: Tick) -> bool:
        """Whether a node says of its ranks what it said last, and its jobs' layouts are still the ones that were looked at then."""
        said, layouts = self._running.get(tick.node, ((), ()))
        if said == tick.placements:
            for layout in layouts:
                if self.topology.job(layout.job) is not layout:
                    break
            else:
                return True
        known = (self.topology.job(job) for job in {placed.job for placed in tick.placements})
        if all(map(self._is_placed, tick.placements)):
            self._running[tick.node] = tick.placements, tuple(layout for layout in known if layout is not None)
            return True
        return False

    def _is_placed(self, placed: Placement | StepReport) -> bool:
        """Whether the topology has this rank already, or a newer attempt of its job."""
        layout = self.topology.job(placed.job)
        return layout is not None and (
            layout.attempt > placed.attempt or (layout.attempt == placed.attempt and placed.rank in layout.ranks)
        )

    def _note_clocks(self, ticks: list[Placed], now_ns: int) -> None:
        counts = Counter([placed.record.node for placed in ticks])
        self._crowded = frozenset([node for node, count in counts.items() if count > 1])
        for placed in ticks:
            tick = placed.record
            # several ticks of one node in a cut are a backlog: their delay says nothing about the clock
            if isinstance(tick, Tick) and tick.node not in self._crowded and not tick.spooled:
                self._clocks.note(tick.node, tick.boot_id, tick.observed_at_ns, now_ns)
        self._clocks.settle()
        self._beats.settle(now_ns)

    def _place_all(self, ticks: list[Placed], now_ns: int) -> None:
        waiting, self._parked = self._parked, []
        for parked in waiting:
            self._place(parked, now_ns)
        for placed in ticks:
            tick = placed.record
            assert isinstance(tick, Tick)
            if self._catalogs.fits(tick):
                self._put_on_grid(placed, tick, now_ns)
            else:
                self._place(_Parked(now_ns, placed), now_ns)

    def _place(self, parked: _Parked, now_ns: int) -> None:
        tick = parked.placed.record
        assert isinstance(tick, Tick)  # only ticks are parked
        if (missing := self._catalogs.missing(tick)) is not None:
            self._park(parked, missing, now_ns)
        elif (misfit := self._catalogs.misfit(tick)) is not None:
            self._reject(parked.placed, misfit)
        else:
            self._put_on_grid(parked.placed, tick, now_ns)

    def _put_on_grid(self, placed: Placed, tick: Tick, now_ns: int) -> None:
        correction_ns = 0 if tick.spooled else self._clocks.correction_ns(tick.node, tick.observed_at_ns, now_ns)
        if (wild := _wild_time(tick.observed_at_ns + correction_ns - now_ns)) is not None:
            self._metrics.count("tw_ticks_skewed_total", node=tick.node)
            self._reject(placed, f"observed at {tick.observed_at_ns} ns, {wild}{self._whose_clock(tick.node, now_ns)}")
            return
        if correction_ns:
            self._metrics.count("tw_ticks_skewed_total", node=tick.node)
        later = 0 if tick.spooled else self._later(tick, correction_ns, now_ns)
        if not self._grid.place(tick, correction_ns, now_ns, later):
            self._metrics.count("tw_ticks_late_total", node=tick.node)

    def _later(self, tick: Tick, correction_ns: int, now_ns: int) -> int:
        """By how many grid points it belongs later than where the correction of its clock puts it."""
        if tick.node not in self._crowded:
            self._beats.note(tick.node, tick.boot_id, now_ns - self._grid.point_ns(tick.observed_at_ns))
        later = self._beats.later(tick.node, tick.boot_id)
        return later - correction_ns // self._grid.interval_ns if later else 0

    def _whose_clock(self, node: str, now_ns: int) -> str:
        """Whose clock has to be set: nodes are not off by so much all at once, but we may be."""
        if self._counted_ns != now_ns:
            self._counted_ns, self._wild = now_ns, self._clocks.count(lambda late_ns: _wild_time(-late_ns) is not None)
        wild, heard = self._wild
        if 0 <= now_ns - self._set_back_ns < RENEWED_NS:
            return "; this worker's clock was set back just now: set the clock of its host"
        if 2 * wild > heard > 1:
            return f", as are {wild} of {heard} nodes: set the clock of this worker's host"
        return f": set the clock of {node}"

    def _note_own_clock(self, now_ns: int) -> None:
        if now_ns < self._cut_ns - AHEAD_NS:
            self._set_back_ns = now_ns
        self._cut_ns = now_ns

    def _park(self, parked: _Parked, catalog_id: str, now_ns: int) -> None:
        if len(self._parked) >= self.settings.parked_limit:
            self._reject(
                parked.placed,
                f"catalogue {catalog_id} is unknown and {len(self._parked)} ticks wait for theirs already",
            )
        elif now_ns - parked.since_ns > self.settings.parked_s * NS_PER_S:
            self._reject(parked.placed, f"catalogue {catalog_id} did not come within {self.settings.parked_s:g} s")
        else:
            self._parked.append(parked)

    def _reject(self, placed: Placed, reason: str) -> None:
        self._rejected.append(Rejected(placed.topic, placed.partition, placed.offset, reason, encode(placed.record)))

    def _placed_nodes(self) -> set[str]:
        """Nodes of running jobs: expected even before their first tick. Worked out anew for another picture only."""
        if self._expected_of is not self.topology:
            self._expected = {node for layout in self.topology.jobs() for node in layout.nodes}
            self._expected_of = self.topology
        return self._expected


def _plain(placed: Placed) -> tuple[str, int, int, bytes]:
    return placed.topic, placed.partition, placed.offset, encode(placed.record)


def canonical(placed: Placed) -> tuple[bool, int, str, str, int, str, int, int]:
    """Order within a cut. Topology keeps its log order, since later events correct earlier ones."""
    record = placed.record
    if isinstance(record, TopologyEvent):
        return (False, 0, "", "", 0, placed.topic, placed.partition, placed.offset)
    return (
        True,
        record.observed_at_ns,
        record.node,
        record.boot_id,
        record.seq,
        placed.topic,
        placed.partition,
        placed.offset,
    )


def _placements(record: Record) -> Iterable[tuple[str, int, int, str]]:
    if isinstance(record, Tick):
        return ((p.job, p.attempt, p.rank, p.device) for p in record.placements)
    if isinstance(record, StepReport) and record.job and record.rank >= 0:
        return ((record.job, record.attempt, record.rank, ""),)
    return ()


def _topology_state(topology: Topology) -> dict[str, Any]:
    state = topology.__dict__
    jobs = [
        [name, job.attempt, [[rank, *place] for rank, place in job.ranks.items()], job.attributes]
        for name, job in state["_jobs"].items()
    ]
    origins = {
        key: {name: list(value) for name, value in state[key].items()} for key in ("_node_origin", "_job_origin")
    }
    return {"_nodes": state["_nodes"], "_jobs": jobs, **origins}


def _topology_from(state: dict[str, Any]) -> Topology:
    jobs = {
        name: JobLayout(name, attempt, {rank: (node, device) for rank, node, device in ranks}, *attributes)
        for name, attempt, ranks, *attributes in state["_jobs"]  # a state of an older worker ends with the ranks
    }
    return Topology(
        state["_nodes"],
        {k: tuple(v) for k, v in state["_node_origin"].items()},
        jobs,
        {k: tuple(v) for k, v in state["_job_origin"].items()},
    )
