"""The live computation once more, from a recording: same frames, same verdicts, byte for byte.

Two kinds of recordings are understood: our own (`streams.recording`: raw messages and the cuts that the live worker made), and the
real-fault tables (`streams.recordings.real_faults`), for which cuts are made on a simulated clock.
"""

from __future__ import annotations

import heapq
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from detectors.base import Frame
from streams import recording, state
from streams.budget import Budget
from streams.detect import Pipeline
from streams.incidents import Correlator
from streams.recording import Recorder
from streams.recordings import real_faults
from streams.stage import OWNER, CutResult, RawStage
from streams.state import Resume
from streams.units import Unit, units
from trainwarden.bus import Message, connect
from trainwarden.clock import NS_PER_MS, NS_PER_S, Clock, SimulatedClock, SystemClock
from trainwarden.config import Config
from trainwarden.errors import DecodeError, UsageError
from trainwarden.records import (
    ActionResult,
    Catalog,
    FrameCut,
    Incident,
    LogEvent,
    Plan,
    Record,
    StateSnapshot,
    StepReport,
    Tick,
    TopologyEvent,
    Verdict,
    decode,
)
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import (
    ACTIONS,
    CATALOG,
    CUTS,
    INCIDENTS,
    RAW,
    STATE,
    STEPS,
    SUMMARIES,
    TICKS,
    TOPOLOGY,
    VERDICTS,
    of_code,
)

log = logging.getLogger(__name__)

ARRIVAL_NS = 50 * NS_PER_MS
"""Assumed way from a node to the worker, for recordings that hold no arrival times."""
AFTERMATH_S = 15.0
RAW_NAMES = frozenset(topic.name for topic in RAW)
RECORDED = (*RAW, CUTS, STATE, VERDICTS, INCIDENTS, ACTIONS)
TOPIC_OF: dict[type[Record], str] = {
    Tick: TICKS.name,
    StepReport: STEPS.name,
    Catalog: CATALOG.name,
    TopologyEvent: TOPOLOGY.name,
}


@dataclass
class Replayed:
    """What a recording says. `incidents` holds every revision, in order of publication."""

    verdicts: list[Verdict] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    frames: int = 0
    nodes: set[str] = field(default_factory=set)
    first_ns: int = 0
    last_ns: int = 0

    @property
    def node_days(self) -> float:
        """Nodes times days of what was replayed."""
        return len(self.nodes) * (self.last_ns - self.first_ns) / (86_400 * NS_PER_S)

    def saw(self, frame: Frame) -> None:
        """Count a frame, its nodes and its time."""
        self.frames += 1
        self.nodes.update(node for tick in frame.ticks for node in tick.nodes)
        self.first_ns, self.last_ns = self.first_ns or frame.now_ns, frame.now_ns

    def newest(self) -> list[Incident]:
        """Last revision of each incident, in order of opening."""
        return list({incident.incident_id: incident for incident in self.incidents}.values())


@dataclass
class _Telling:
    """Correlation on the replay's own clock."""

    correlator: Correlator
    told: Replayed
    actions: list[tuple[int, Record]] = field(default_factory=list)

    def take(self, frame: Frame | None, verdicts: Sequence[Verdict], now_ns: int) -> None:
        """One frame's worth."""
        self.told.verdicts.extend(verdicts)
        if frame is not None:
            self.told.saw(frame)
            self.correlator.on_frame(frame)
        while self.actions and self.actions[0][0] <= now_ns:
            self._act(self.actions.pop(0)[1])
        for verdict in verdicts:
            self.correlator.on_verdict(verdict, now_ns)
        self.told.incidents.extend(self.correlator.tick(now_ns))

    def _act(self, record: Record) -> None:
        if isinstance(record, ActionResult):
            self.correlator.on_action(record)
        elif isinstance(record, Plan):
            self.correlator.on_plan(record)


def replay(path: Path, config: Config) -> Replayed:
    """Verdicts and incidents of a recording.

    Parameters
    ----------
    path
        A directory written by `record`, or ``<directory>/<run>`` of the real-fault tables (any of the run's files will do).

    Raises
    ------
    UsageError
        There is no recording of either kind.
    """
    if recording.segments(path):
        return replay_recording(path, config)
    folder, run = path.parent, path.name.split(".")[0]
    if folder.is_dir() and run in real_faults.runs(folder):
        return replay_records(real_faults.read(folder, run), config)
    raise UsageError(
        f"{path}: no recording: expected a directory with segment-*.twr, or the name of a run beside its .nodes.csv"
    )


def replay_recording(directory: Path, config: Config) -> Replayed:
    """Our own format: every run of the worker that the recording holds, each with the cuts it made.

    A recording without a worker (of a simulator, or of collectors alone) is cut on a simulated clock.
    """
    cuts, snapshots, actions = _read_side_topics(directory)
    if not cuts:
        return replay_records(_raw_records(directory), config)
    told = Replayed()
    for number, run in enumerate(state.epochs(cut for cut in cuts if cut.node in ("", OWNER))):
        telling = _Telling(_correlator(config), told, list(actions))
        stage = RawStage(config, Pipeline(config), SimulatedClock(run[0].now_ns), "replay")
        for result in _repeated(directory, stage, RAW_NAMES, run, _start_of(OWNER, run, snapshots, number)):
            telling.take(result.frame, result.verdicts, result.at_ns)
    if staged := [cut for cut in cuts if cut.node not in ("", OWNER)]:
        _replay_units(directory, config, staged, snapshots, _Telling(_correlator(config), told, list(actions)))
    return told


def _replay_units(
    directory: Path,
    config: Config,
    cuts: Sequence[FrameCut],
    snapshots: Sequence[StateSnapshot],
    telling: _Telling,
) -> None:
    """Workers that shared the units of two stages: each share once more from the summaries, what they said in the order of their cuts."""
    if not any(message.topic == SUMMARIES.name for message in recording.read(directory)):
        raise UsageError(
            f"{directory}: it is of workers with streams.stages = 2 and holds no {SUMMARIES.name}: record with that setting in the "
            "configuration"
        )
    blocks = len({cut.node for cut in cuts if cut.node.startswith("block/")})
    shares = [unit for unit in units(blocks) if unit.share]
    told = [_unit_results(directory, config, unit, cuts, snapshots) for unit in shares]
    for result, correlates in heapq.merge(*told, key=lambda found: found[0].at_ns):
        telling.take(result.frame if correlates else None, result.verdicts, result.at_ns)


def _unit_results(
    directory: Path, config: Config, unit: Unit, cuts: Sequence[FrameCut], snapshots: Sequence[StateSnapshot]
) -> Iterator[tuple[CutResult, bool]]:
    """What a unit said, with whether the correlator is with it."""
    for number, run in enumerate(state.epochs(cut for cut in cuts if cut.node == unit.name)):
        metrics = Metrics("replay")
        stage = RawStage(
            config, unit.pipeline(config, metrics), SimulatedClock(run[0].now_ns), "replay", metrics, unit.role
        )
        start = _start_of(unit.name, run, snapshots, number)
        for result in _repeated(directory, stage, frozenset(unit.places), run, start):
            yield result, unit.correlates


def _correlator(config: Config) -> Correlator:
    metrics = Metrics("replay")
    return Correlator(
        config.cluster, config.policy, metrics=metrics, budget=Budget(config.risk, config.policy, metrics)
    )


def replay_records(records: Sequence[Record], config: Config) -> Replayed:
    """Records in order of time, cut every ``streams.cut_ms`` of a simulated clock until `AFTERMATH_S` after the last."""
    told = Replayed()
    pipeline = Pipeline(config)
    telling = _Telling(_correlator(config), told)
    offsets: dict[tuple[str, int], int] = {}
    for now_ns, batch in _simulated_cuts(records, config.streams.cut_ms * NS_PER_MS):
        for record in batch:
            topic, partition = _topic(record), _partition(record)
            offsets[topic, partition] = offsets.get((topic, partition), -1) + 1
            pipeline.aligner.add(topic, partition, offsets[topic, partition], record)
        frame = pipeline.aligner.cut(now_ns)
        telling.take(frame, pipeline.run(frame) if frame is not None else (), now_ns)
    return told


def record(
    config: Config,
    out_dir: Path,
    duration_s: float,
    *,
    clock: Clock | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Write the live topics, from their beginning, until `duration_s` is over or `stop` says so; returns the number of messages.

    Raises
    ------
    UsageError
        `out_dir` is not empty or not writable.
    """
    clock = clock or SystemClock()
    bus = connect(config.kafka)
    recorded = (*RECORDED, SUMMARIES) if config.streams.stages > 1 else RECORDED
    bus.ensure_topics(recorded)
    end_ns = clock.monotonic_ns() + int(duration_s * NS_PER_S)
    subscriber = bus.subscriber(tuple(topic.name for topic in recorded))
    try:
        with Recorder(out_dir) as recorder:
            while clock.monotonic_ns() < end_ns and not stop():
                copy(subscriber.poll(0.25), recorder)
            copy(subscriber.poll(0.0), recorder)
            return recorder.messages
    finally:
        subscriber.close()
        bus.close()


def copy(messages: Sequence[Message], recorder: Recorder) -> None:
    """Append messages and make them readable."""
    for message in messages:
        recorder.write(message)
    if messages:
        recorder.flush()


def _read_side_topics(directory: Path) -> tuple[list[FrameCut], list[StateSnapshot], list[tuple[int, Record]]]:
    cuts: list[FrameCut] = []
    snapshots: list[StateSnapshot] = []
    actions: list[tuple[int, Record]] = []
    for message in recording.read(directory):
        found = _decoded(message) if message.topic in (CUTS.name, STATE.name, ACTIONS.name) else None
        if isinstance(found, FrameCut):
            cuts.append(found)
        elif isinstance(found, StateSnapshot):
            snapshots.append(found)
        elif found is not None:
            actions.append((found.observed_at_ns, found))
    return cuts, snapshots, sorted(actions, key=lambda entry: entry[0])


def _raw_records(directory: Path) -> list[Record]:
    records = [_decoded(message) for message in recording.read(directory) if message.topic in RAW_NAMES]
    return [found for found in records if found is not None]


def _decoded(message: Message) -> Any:
    try:
        return decode(message.value)
    except DecodeError as error:
        log.warning("%s offset %d is passed over: %s", message.place, message.offset, error.reason)
        return None


def _start_of(owner: str, run: Sequence[FrameCut], snapshots: Sequence[StateSnapshot], number: int) -> Resume | None:
    """A recording that begins in the middle begins at its first whole snapshot."""
    if run[0].seq == 1 or number > 0:
        return None
    for count in range(1, len(snapshots) + 1):
        resume = state.newest(owner, snapshots[:count])
        if resume is not None and run[0].seq <= resume.seq + 1:
            return resume
    raise UsageError(
        f"the recording begins with cut {run[0].seq} and holds no state to start from: record for longer than streams.snapshot_s"
    )


def _repeated(
    directory: Path, stage: RawStage, topics: frozenset[str], run: Sequence[FrameCut], start: Resume | None
) -> Iterator[CutResult]:
    """The recorded cuts of one run, made again."""
    base = start or Resume(0, b"", {}, "")
    positions = stage.resume(replace(base, cuts=tuple(cut for cut in run if cut.seq > base.seq)))
    for message in recording.read(directory):
        if message.topic not in topics or message.offset < positions.get(message.place, 0):
            continue
        yield from stage.take((message,))
        if not stage.catching_up:
            return
    # cuts may end after the last message, or count offsets that hold none
    yield from stage.reached({place: offset for cut in run for place, offset in cut.positions.items()})


def _simulated_cuts(records: Sequence[Record], step_ns: int) -> Iterator[tuple[int, list[Record]]]:
    """(time, records that arrived by then); standing facts without a time come first."""
    timed = sorted(records, key=lambda r: r.observed_at_ns)
    times = [r.observed_at_ns for r in timed if r.observed_at_ns]
    if not times:
        return
    now_ns, end_ns, at = times[0] // step_ns * step_ns, times[-1] + int(AFTERMATH_S * NS_PER_S), 0
    while now_ns <= end_ns:
        batch: list[Record] = []
        while at < len(timed) and timed[at].observed_at_ns + ARRIVAL_NS <= now_ns:
            batch.append(timed[at])
            at += 1
        yield now_ns, batch
        now_ns += step_ns


def _topic(record: Record) -> str:
    return of_code(record.code).name if isinstance(record, LogEvent) else TOPIC_OF[type(record)]


def _partition(record: Record) -> int:
    return 0 if isinstance(record, Catalog | TopologyEvent) else zlib.crc32(record.node.encode()) % 4
