"""The two stages of the worker without their broker: messages in, messages out.

Whoever hosts a stage (the Faust application, the loop over `trainwarden.bus`, a replay) reads messages, hands them in, asks for
cuts, and publishes what comes back *before* it commits what it read.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from detectors.base import Frame
from streams import state
from streams.budget import Budget
from streams.detect import Pipeline
from streams.incidents import Correlator
from streams.merge import BlockAligner, misfit_of_summary, summary_of
from streams.shedding import Shedding
from streams.state import Resume
from trainwarden.bus import Message
from trainwarden.bus.dead import bury, fitting
from trainwarden.clock import NS_PER_MS, Clock
from trainwarden.config import Config
from trainwarden.errors import DecodeError
from trainwarden.parallel import MAX_WORLD
from trainwarden.records import (
    ActionResult,
    Catalog,
    DeadLetter,
    Delivery,
    FrameCut,
    Incident,
    LogEvent,
    Plan,
    Record,
    StepReport,
    Summary,
    Tick,
    TopologyEvent,
    Verdict,
    decode,
    encode,
)
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import (
    ACTIONS,
    CATALOG,
    CUTS,
    DEAD,
    EVENTS,
    INCIDENTS,
    LOGS,
    STATE,
    STEPS,
    SUMMARIES,
    TICKS,
    TOPOLOGY,
    VERDICTS,
)

log = logging.getLogger(__name__)

OWNER = "detect"
EXPECTED: dict[str, type[Record]] = {
    TICKS.name: Tick,
    STEPS.name: StepReport,
    EVENTS.name: LogEvent,
    LOGS.name: LogEvent,
    CATALOG.name: Catalog,
    TOPOLOGY.name: TopologyEvent,
}
OPINIONS: dict[str, tuple[type[Record], ...]] = {
    VERDICTS.name: (Verdict,),
    ACTIONS.name: (Plan, ActionResult, Delivery),
}
COMPACTED = frozenset({CATALOG.name, TOPOLOGY.name})


@dataclass(frozen=True, slots=True)
class Output:
    """One message to publish."""

    topic: str
    key: bytes
    value: bytes


@dataclass
class Outbox:
    """Collects what is to be published; stands in for a publisher."""

    waiting: list[Output] = field(default_factory=list)

    def publish(self, topic: str, key: bytes, value: bytes) -> None:
        """Add one message."""
        self.waiting.append(Output(topic, key, value))

    def flush(self, timeout_s: float) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to close."""

    def take(self) -> list[Output]:
        """Everything collected since the last call."""
        waiting, self.waiting = self.waiting, []
        return waiting


@dataclass(frozen=True)
class Role:
    """What a stage is: the name in its cuts and snapshots, and what it reads."""

    owner: str = OWNER
    expected: Mapping[str, type[Record]] = field(default_factory=lambda: EXPECTED)
    block: int | None = None
    """Number of the block whose ticks it aligns for the second stage, which gets summaries."""
    refuses: frozenset[str] = frozenset(EXPECTED)
    """Topics of whose records it says when they are refused: several units read the same."""


WHOLE = Role()
"""All in one: every node, every detector."""


@dataclass(frozen=True)
class CutResult:
    """What one cut brought: the frame (None when idle), its verdicts, everything to publish, in order, and when it was made."""

    frame: Frame | None
    verdicts: tuple[Verdict, ...]
    outputs: tuple[Output, ...]
    at_ns: int


@dataclass(frozen=True)
class Captured:
    """State between two cuts, complete and in parts: packing it may go on beside the cuts that follow."""

    payload: tuple[bytes, ...]
    positions: dict[str, int]
    turn: int
    seq: int
    at_ns: int
    cluster: str
    boot_id: str
    code_version: str
    owner: str = OWNER

    def messages(self) -> tuple[Output, ...]:
        """Packed, in pieces that fit a message."""
        records = state.pieces(
            self.owner,
            self.payload,
            self.positions,
            turn=self.turn,
            seq=self.seq,
            at_ns=self.at_ns,
            cluster=self.cluster,
            boot_id=self.boot_id,
            code_version=self.code_version,
        )
        return tuple(Output(STATE.name, record.owner.encode(), encode(record)) for record in records)


class RawStage:
    """Decoding, alignment, detection and their recovery.

    After `resume` the stage first repeats the recorded cuts (`catching_up`): `take` returns a `CutResult` for each as soon as its
    messages are there, and `cut` must not be called until they are through.
    """

    def __init__(
        self,
        config: Config,
        pipeline: Pipeline,
        clock: Clock,
        boot_id: str,
        metrics: Metrics | None = None,
        role: Role = WHOLE,
    ) -> None:
        self.role = role
        self._config = config
        self._clock = clock
        self._boot_id = boot_id
        self._metrics = metrics or Metrics("worker")
        self._outbox = Outbox()
        self._cuts: deque[FrameCut] = deque()
        self._backlog: dict[str, deque[Message]] = {}
        self._reached: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._taken: Counter[str] = Counter()
        self._turn = 0
        self._shedding = Shedding()
        self._in_a_point = {SUMMARIES.name: TICKS.partitions}
        self._unread_points = 0.0
        self.pipeline = pipeline
        self.keep_every = 1
        self.seq = 0
        self.last_cut_ns = 0

    @property
    def catching_up(self) -> bool:
        """Whether recorded cuts are still to be repeated."""
        return bool(self._cuts)

    @property
    def positions(self) -> dict[str, int]:
        """Offsets that are safe to commit once the outputs of the last cut are delivered."""
        return self.pipeline.aligner.positions

    def resume(self, resume: Resume | None) -> dict[str, int]:
        """Take a snapshot and the cuts after it over; returns the positions to read from (empty: from the beginning)."""
        if resume is None:
            return {}
        self._cuts, self.seq, self._reached = deque(resume.cuts), resume.seq, dict(resume.positions)
        self._told = {place: at for place, at in resume.positions.items() if not place.startswith(f"{CUTS.name}/")}
        if resume.payload:
            try:
                restored = self.pipeline.restore(resume.payload)
            except Exception:
                log.exception(
                    "the state of cut %d cannot be taken over: detectors start cold from its positions", resume.seq
                )
                return self._resume_cold(resume)
            warm, cold = ", ".join(restored.warm) or "none", ", ".join(restored.cold) or "none"
            log.info("state of cut %d taken over; warm: %s; cold: %s", resume.seq, warm, cold)
        log.info("%d cuts are repeated", len(self._cuts))
        return {
            place: offset
            for place, offset in resume.positions.items()
            if place.rpartition("/")[0] in self.role.expected
        }

    def _resume_cold(self, resume: Resume) -> dict[str, int]:
        """A snapshot that this build cannot take over (another build wrote it) costs the baselines, not the worker."""
        self.pipeline.reset()
        self.seq = self._cuts[-1].seq if self._cuts else resume.seq  # numbers that were given out are not given twice
        self._cuts.clear()
        kept = self.role.expected.keys() - COMPACTED  # catalogues and topology are read from the beginning
        return {place: offset for place, offset in resume.positions.items() if place.rpartition("/")[0] in kept}

    def abandon_cuts(self) -> list[CutResult]:
        """The messages of the recorded cuts cannot be had any more: go on live with what there is."""
        if not self._cuts:
            return []
        log.warning(
            "%d recorded cuts cannot be repeated (their messages are gone): detection goes on from here",
            len(self._cuts),
        )
        self._cuts.clear()
        return self.take(())

    def take(self, messages: Iterable[Message]) -> list[CutResult]:
        """Read messages; returns the recorded cuts that this completes (none in normal running)."""
        if not self._cuts and not self._backlog:
            for message in messages:
                self._add(message)
            return []
        for message in messages:
            self._backlog.setdefault(message.place, deque()).append(message)
            self._reached[message.place] = message.offset + 1
        return list(self._repeat_cuts())

    def reached(self, positions: Mapping[str, int]) -> list[CutResult]:
        """Tell where reading stands (offsets in between may hold no message); returns cuts that this completes."""
        for place, offset in positions.items():
            self._reached[place] = max(offset, self._reached.get(place, 0))
        return list(self._repeat_cuts()) if self._cuts else []

    def cut(self, now_ns: int) -> CutResult:
        """Make a frame of what was read, run it, and describe it. An idle cluster leaves no trace."""
        frame, verdicts = self._run(now_ns, "live")
        if frame is not None or self._took_in():
            self.seq += 1
            self._outbox.publish(CUTS.name, self._config.cluster.encode(), encode(self._description(now_ns)))
        return CutResult(frame, verdicts, tuple(self._outbox.take()), now_ns)

    def _took_in(self) -> bool:
        """Whether a unit read something that it holds back: from when on it waits is part of what a successor repeats."""
        return self.role is not WHOLE and self.positions != self._told

    def note_lag(self, unread: Mapping[str, int]) -> None:
        """Tell how many records lie unread, by topic: a worker that is behind shows its detectors less (`streams.shedding`)."""
        self._unread_points = max(unread.get(topic, 0) / size for topic, size in self._in_a_point.items())

    def more(self, now_ns: int) -> bool:
        """Whether what was read is good for another frame at once (in the second stage, after a hold-up)."""
        return self.pipeline.aligner.more(now_ns)

    def delivered(self, result: CutResult, now_ns: int) -> None:
        """Tell that a result's outputs are on their topics: the end of the way from a tick to what is said of it."""
        for tick in result.frame.ticks if result.frame is not None else ():
            self._metrics.observe_spread_ms("tw_tick_delay_ms", (now_ns - tick.at_ns) / NS_PER_MS)

    def capture(self, cuts_position: int | None = None) -> Captured:
        """State after the last cut. `cuts_position` is the next offset of the cuts topic, where the host knows it."""
        positions = dict(self.positions)
        if cuts_position is not None:
            positions[f"{CUTS.name}/0"] = cuts_position
        self._turn += 1
        return Captured(
            self.pipeline.captured(),
            positions,
            self._turn,
            self.seq,
            self.last_cut_ns,
            self._config.cluster,
            self._boot_id,
            self.pipeline.code_version,
            self.role.owner,
        )

    def snapshot(self, cuts_position: int | None = None) -> tuple[Output, ...]:
        """`capture`, as messages."""
        return self.capture(cuts_position).messages()

    def _repeat_cuts(self) -> Iterator[CutResult]:
        while self._cuts and self._have(self._cuts[0]):
            cut = self._cuts.popleft()
            for place in sorted(self._backlog):
                self._drain(place, cut.positions.get(place, 0))
            self.seq, self._told = cut.seq, dict(cut.positions)
            frame, verdicts = self._run(cut.now_ns, "repeated", cut.keep_every)
            yield CutResult(frame, verdicts, tuple(self._outbox.take()), cut.now_ns)
        if not self._cuts:
            backlog, self._backlog = self._backlog, {}
            for place in sorted(backlog):
                for message in backlog[place]:
                    self._add(message)

    def _have(self, cut: FrameCut) -> bool:
        return all(self._reached.get(place, 0) >= offset for place, offset in cut.positions.items())

    def _drain(self, place: str, until: int) -> None:
        waiting = self._backlog[place]
        while waiting and waiting[0].offset < until:
            self._add(waiting.popleft())

    def _add(self, message: Message) -> None:
        aligner = self.pipeline.aligner
        try:
            record = (
                None if not message.value and message.topic in COMPACTED else _expected(message, self.role.expected)
            )
        except DecodeError as error:
            if message.topic in self.role.refuses:
                bury(message, error.reason, self._outbox, self._config.cluster, self._clock)
                self._metrics.count("tw_dead_letters_total", topic=message.topic)
            aligner.skip(message.topic, message.partition, message.offset)
            return
        self._taken[message.topic] += 1
        if record is None:
            aligner.skip(message.topic, message.partition, message.offset)
        else:
            aligner.add(message.topic, message.partition, message.offset, record)

    def _run(self, now_ns: int, phase: str, keep_every: int = 0) -> tuple[Frame | None, tuple[Verdict, ...]]:
        """`keep_every` is what a recorded cut says; 0: as it must be now."""
        aligner = self.pipeline.aligner
        frame = aligner.cut(now_ns)
        verdicts = tuple(self._detect(frame, keep_every)) if frame is not None else ()
        self.last_cut_ns = now_ns
        self._bury_rejected(now_ns)
        if self.role.block is None:
            aligner.inferred.clear()
        elif frame is not None:
            self._summarise(self.role.block, frame)
        for verdict in verdicts:
            self._outbox.publish(VERDICTS.name, self._config.cluster.encode(), encode(verdict))
        self._metrics.count("tw_cuts_total", phase=phase)
        taken, self._taken = self._taken, Counter()
        for topic, count in taken.items():
            self._metrics.count("tw_records_total", count, topic=topic)
        if aligner.closed_until_ns:
            self._metrics.set("tw_tick_age_seconds", (now_ns - aligner.closed_until_ns) / 1e9)
        return frame, verdicts

    def _detect(self, frame: Frame, keep_every: int) -> list[Verdict]:
        points, started_ns = len(frame.ticks), self._clock.monotonic_ns()
        if points:
            self._in_a_point[TICKS.name] = max(1, len(frame.ticks[-1].nodes))
        self.keep_every = keep_every or self._shedding.look(points + self._unread_points)
        self._metrics.set("tw_keep_every", self.keep_every)
        verdicts = self.pipeline.run(frame, self.keep_every)
        self._shedding.took(points, (self._clock.monotonic_ns() - started_ns) / NS_PER_MS)
        return verdicts

    def _summarise(self, block: int, frame: Frame) -> None:
        aligner = self.pipeline.aligner
        assert isinstance(aligner, BlockAligner)
        for tick in frame.ticks:
            ticks = aligner.ticks_of(tick.at_ns)
            summary = summary_of(block, self._config.cluster, tick, frame.now_ns, aligner.inferred, ticks)
            self._outbox.publish(SUMMARIES.name, b"%d" % block, encode(summary))
            aligner.inferred.clear()

    def _description(self, now_ns: int) -> FrameCut:
        self._told = dict(self.positions)
        return FrameCut(
            cluster=self._config.cluster,
            node=self.role.owner,
            seq=self.seq,
            observed_at_ns=now_ns,
            boot_id=self._boot_id,
            now_ns=now_ns,
            positions=dict(self.positions),
            keep_every=self.keep_every,
        )

    def _bury_rejected(self, now_ns: int) -> None:
        for rejected in self.pipeline.aligner.take_rejected():
            if rejected.topic not in self.role.refuses:
                continue
            self._metrics.count("tw_dead_letters_total", topic=rejected.topic)
            letter = DeadLetter(
                cluster=self._config.cluster,
                observed_at_ns=now_ns,
                topic=rejected.topic,
                partition=rejected.partition,
                offset=rejected.offset,
                reason=rejected.reason,
                payload=rejected.payload,
            )
            self._outbox.publish(DEAD.name, rejected.topic.encode(), encode(fitting(letter)))


class CorrelatorStage:
    """Verdicts and actions in, incidents out."""

    def __init__(self, config: Config, clock: Clock, metrics: Metrics | None = None) -> None:
        self._config = config
        self._clock = clock
        self._metrics = metrics or Metrics("worker")
        self._outbox = Outbox()
        budget = Budget(config.risk, config.policy, self._metrics)
        self.correlator = Correlator(config.cluster, config.policy, metrics=self._metrics, budget=budget)

    def restore(self, messages: Iterable[Message]) -> int:
        """Rebuild from the incidents topic; returns the number of live incidents."""
        found: list[Incident] = []
        for message in messages:
            record = self._decode(message) if message.value else None
            if isinstance(record, Incident):
                found.append(record)
        return self.correlator.restore(found)

    def take(self, message: Message) -> None:
        """One message of the verdicts or the actions topic; anything else there is a dead letter."""
        record, kinds = self._decode(message), OPINIONS[message.topic]
        if record is not None and not isinstance(record, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            self.refuse(message, f"a {type(record).__name__} on {message.topic}, expected {expected}")
        elif isinstance(record, Verdict):
            self.correlator.on_verdict(record, self._clock.now_ns())
        elif isinstance(record, ActionResult):
            self.correlator.on_action(record)
        elif isinstance(record, Plan):
            self.correlator.on_plan(record)

    def refuse(self, message: Message, reason: str) -> None:
        """Put a message aside as a dead letter."""
        self._metrics.count("tw_dead_letters_total", topic=message.topic)
        bury(message, reason, self._outbox, self._config.cluster, self._clock)

    def tick(self) -> list[Output]:
        """Revisions and dead letters to publish now."""
        for incident in self.correlator.tick(self._clock.now_ns()):
            self._outbox.publish(INCIDENTS.name, incident.incident_id.encode(), encode(incident))
        return self._outbox.take()

    def _decode(self, message: Message) -> Record | None:
        try:
            record: Record = decode(message.value)
        except DecodeError as error:
            self.refuse(message, error.reason)
            return None
        return record


def _expected(message: Message, expected: Mapping[str, type[Record]]) -> Record:
    record: Record = decode(message.value)
    kind = expected.get(message.topic)
    if kind is None or not isinstance(record, kind):
        raise DecodeError(
            f"a {type(record).__name__} on {message.topic}, expected {kind.__name__ if kind else 'nothing'}"
        )
    if misfit := _misfit(record):
        raise DecodeError(misfit)
    return record


def _misfit(record: Record) -> str:
    """Why a record of a job's ranks cannot be true, empty when it can: whoever follows ranks makes room for each below the highest."""
    if isinstance(record, StepReport):
        return _misfit_of_steps(record)
    if isinstance(record, Summary):
        return misfit_of_summary(record) or next(filter(None, map(_misfit, record.inferred)), "")
    if isinstance(record, Tick):
        ranks = [placed.rank for placed in record.placements]
    elif isinstance(record, TopologyEvent):
        ranks = [rank for rank, _, _ in record.ranks]
    else:
        return ""
    if not ranks or (min(ranks) >= 0 and max(ranks) < MAX_WORLD):
        return ""
    bad = next(rank for rank in ranks if not 0 <= rank < MAX_WORLD)
    return f"rank {bad} is placed by {record.node or 'nobody'}: no job has such a rank"


def _misfit_of_steps(report: StepReport) -> str:
    """What no job can have said of its steps; empty when it can be true."""
    world = report.world or MAX_WORLD  # a job need not say how large it is
    if report.attempt < 0 or not 0 <= report.rank < world <= MAX_WORLD:
        return f"steps of rank {report.rank} of {report.world} in attempt {report.attempt}: no job has such a rank"
    bad = next((row for row in report.rows if row.step < 0 or row.started_at_ns < 0), None)
    return (
        f"step {bad.step} of rank {report.rank}, begun at {bad.started_at_ns} ns: no step is counted or dated so"
        if bad
        else ""
    )
