"""The same worker without Faust: a plain loop over `trainwarden.bus`, for tests on the memory bus and for recordings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streams import state
from streams.detect import Pipeline
from streams.stage import WHOLE, CorrelatorStage, CutResult, Output, RawStage
from streams.units import Unit
from trainwarden.bus import Bus, Message
from trainwarden.clock import NS_PER_MS, NS_PER_S, Clock
from trainwarden.config import Config
from trainwarden.errors import BusError, DecodeError
from trainwarden.records import FrameCut, StateSnapshot, decode_as
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import ACTIONS, CUTS, INCIDENTS, RAW, STATE, VERDICTS

FLUSH_S = 10.0
RAW_TOPICS = tuple(topic.name for topic in RAW)


class BusWorker:
    """Both stages on a bus, or one unit of them, moved by `step`; time comes from the clock, so a simulated one runs hours in moments."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        clock: Clock,
        boot_id: str = "bus",
        pipeline: Pipeline | None = None,
        unit: Unit | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self.metrics = Metrics("worker")
        self._role = unit.role if unit is not None else WHOLE
        self._correlates = unit is None or unit.correlates
        pipeline = pipeline or (unit.pipeline(config, self.metrics) if unit else Pipeline(config, metrics=self.metrics))
        self.stage = RawStage(config, pipeline, clock, boot_id, self.metrics, self._role)
        self.correlator = CorrelatorStage(config, clock, self.metrics)
        self._publisher = bus.publisher()
        self._undelivered: list[Output] = []
        self._raw = bus.subscriber(unit.places) if unit else bus.subscriber(RAW_TOPICS, config.streams.group)
        self._opinions = bus.subscriber((VERDICTS.name, ACTIONS.name))
        self._cut_ns = config.streams.cut_ms * NS_PER_MS
        self._next_cut_ns = self._cut_after(clock.now_ns())
        self._next_snapshot_ns = clock.now_ns() + int(config.streams.snapshot_s * NS_PER_S)
        self._resume(bus)

    def step(self) -> list[CutResult]:
        """Read, cut when it is time, publish, commit. A broker that is away leaves everything as it was for the next step."""
        results = self.stage.take(self._raw.poll(0.0))
        now_ns = self._clock.now_ns()
        self._next_cut_ns = min(self._next_cut_ns, self._cut_after(now_ns))  # the clock was set back
        if not self.stage.catching_up and now_ns >= self._next_cut_ns:
            self._next_cut_ns = self._cut_after(now_ns)
            results.append(self.stage.cut(now_ns))
            while self.stage.more(now_ns):
                results.append(self.stage.cut(now_ns))
        for result in results:
            self._take_result(result)
        self._correlate()
        if now_ns >= self._next_snapshot_ns and not self.stage.catching_up:
            self._next_snapshot_ns = now_ns + int(self._config.streams.snapshot_s * NS_PER_S)
            self.save()
        self._deliver()
        return results

    def save(self) -> None:
        """Write a snapshot."""
        self._undelivered.extend(self.stage.snapshot())

    def close(self) -> None:
        """Let go without saving (what a kill would do)."""
        self._raw.close()
        self._opinions.close()
        self._publisher.close()

    def _cut_after(self, now_ns: int) -> int:
        """Cuts lie on multiples of the cadence, so that a successor cuts where the one before would have."""
        return (now_ns // self._cut_ns + 1) * self._cut_ns

    def _take_result(self, result: CutResult) -> None:
        if result.frame is not None:
            self.correlator.correlator.on_frame(result.frame)
        self._undelivered.extend(result.outputs)

    def _correlate(self) -> None:
        if not self._correlates:
            return
        for message in self._opinions.poll(0.0):
            self.correlator.take(message)
        self._undelivered.extend(self.correlator.tick())

    def _deliver(self) -> None:
        if not self._undelivered:
            return
        for output in self._undelivered:
            self._publisher.publish(output.topic, output.key, output.value)
        try:
            self._publisher.flush(FLUSH_S)
        except BusError:
            return
        self._undelivered.clear()
        self._raw.commit()

    def _resume(self, bus: Bus) -> None:
        snapshots = _records(StateSnapshot, read_all(bus, STATE.name))
        positions = self.stage.resume(
            state.resume_from(self._role.owner, snapshots, _records(FrameCut, read_all(bus, CUTS.name)))
        )
        # committed positions are for lag monitors: what counts are the snapshot's, or the beginning
        self._raw.seek_to({**dict.fromkeys(self._raw.positions(), 0), **positions})
        self.correlator.restore(read_all(bus, INCIDENTS.name))


def read_all(bus: Bus, topic: str, idle_s: float = 0.0) -> list[Message]:
    """Everything on a topic as of now; reading ends when nothing came for `idle_s`."""
    subscriber = bus.subscriber((topic,))
    found: list[Message] = []
    while batch := subscriber.poll(idle_s):
        found.extend(batch)
    subscriber.close()
    return found


def _records(kind: type[Any], messages: Iterable[Message]) -> list[Any]:
    found = []
    for message in messages:
        try:
            found.append(decode_as(kind, message.value))
        except DecodeError:
            # a malformed snapshot or cut is as good as none: the one before it serves
            continue
    return found
