"""The stream worker on Faust: the only module that imports faust.

Raw records come in through a plain consumer inside the Faust application (20 times cheaper per message than a Faust stream); verdicts
and actions are Faust agents, the correlator's clock is a Faust timer, and Faust's web server carries health and self-metrics.

One worker leads: the one to which Kafka assigns the single partition of the verdicts topic. The others wait with nothing loaded,
and take over from the last snapshot and the recorded cuts. Everything that a leader says is identified by its content, so what a
successor repeats is recognised as a repeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import faust
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordListTooLargeError

from streams import state
from streams.beside import Beside
from streams.cycles import collect_rarely
from streams.detect import Pipeline
from streams.health import WorkerHealth
from streams.heap import give_back
from streams.pulse import Pulse, StoodStill
from streams.quiet import quieten
from streams.reading import (
    SILENCE_MS,
    Portions,
    addresses,
    assign,
    consumer_of,
    message_of,
    partition_at,
    partitions_of,
    positions_of,
    read_all,
)
from streams.stage import WHOLE, Captured, CorrelatorStage, CutResult, Output, RawStage
from streams.units import Unit, deck
from trainwarden.bus import Message, connect
from trainwarden.bus.dead import fitting
from trainwarden.bus.security import Security, security_of
from trainwarden.clock import NS_PER_MS, NS_PER_S, Clock, SystemClock
from trainwarden.config import Config
from trainwarden.errors import DecodeError, TrainwardenError, UnavailableError
from trainwarden.records import DeadLetter, FrameCut, StateSnapshot, decode_as, encode
from trainwarden.selfmetrics import MetricName, Metrics
from trainwarden.topics import (
    ACTIONS,
    CUTS,
    DEAD,
    INCIDENTS,
    RAW,
    STATE,
    SUMMARIES,
    TICKS,
    UNITS,
    VERDICTS,
    needed,
)

log = logging.getLogger(__name__)

SESSION_TIMEOUT_S = 6.0
HEARTBEAT_S = 1.0
BEAT_S = 0.25
TICK_S = 0.1
RETRY_S = 0.2
SNAPSHOT_SHARE, SNAPSHOT_LATEST_S = 0.02, 120.0
"""Snapshots take at most this share of the time, unless they would come more rarely than this."""
SLOW_FRAME_MS = 20.0
"""Frames that take longer are computed beside the event loop, so that heartbeats and agents go on."""
HOLD_UP_NS = 2 * NS_PER_S
REPEAT_PATIENCE_S = 5.0
COMMIT_S = 1.0
READ_S = 0.1
"""Between two cuts what the consumer holds is taken so often."""
UNREAD_S = 0.5
"""Who did not read for so long sees first what the client had fetched before that, of each partition another moment: he reads on to the end
before time goes on, else whole partitions would be late."""
READ_ROUNDS, READ_MOST = 20, 100_000
"""So often, and so much, is read before a cut, at most."""
CANCEL_S = 1.0
SILENT_S = 30.0
"""A partition that does not come to its end, and says nothing for so long, is not waited for."""
RECENT_VERDICTS_S = 60
STOP_S = 1.5
STOP_LIMIT_S = 2.8
"""Libraries that wait for a broker which is gone are not waited for: a worker may be killed at any time without loss."""


OF_A_LEADER: tuple[MetricName, ...] = (
    "tw_tick_age_seconds", "tw_event_age_seconds", "tw_log_age_seconds", "tw_lag_records", "tw_keep_every", "tw_judged_ratio",
)  # fmt: skip
"""Gauges that only who leads can know."""


class Outlet:
    """Publishes and does not come back before the broker has it: a broker that is away is waited for."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._cluster = config.cluster
        self._topics = needed(config.streams.stages)
        self._clock = clock
        self._bus = connect(config.kafka)
        self._producer = AIOKafkaProducer(
            bootstrap_servers=list(addresses(config)),
            acks="all",
            enable_idempotence=False,
            request_timeout_ms=5000,
            retry_backoff_ms=100,
            max_request_size=2 * 1024 * 1024,
            metadata_max_age_ms=30_000,
            **security_of(config.kafka).options(),
        )

    async def start(self) -> None:
        """Connect."""
        await self._producer.start()

    async def stop(self) -> None:
        """Let go."""
        await self._producer.stop()

    async def deliver(self, outputs: Iterable[Output]) -> dict[str, int]:
        """Publish all, in order; returns the last offset per topic. Tries for as long as it takes; what no broker takes, because it is
        too large, becomes a dead letter."""
        waiting, offsets, most = list(outputs), {}, None
        while waiting:
            sending = waiting[:most]
            try:
                futures = [await self._producer.send(o.topic, value=o.value, key=o.key) for o in sending]
                for output, sent in zip(sending, await asyncio.gather(*futures), strict=True):
                    offsets[output.topic] = int(sent.offset)
                waiting = waiting[len(sending) :]
            except (MessageSizeTooLargeError, RecordListTooLargeError) as error:
                if most == 1:
                    waiting[:1] = self._put_aside(sending[0], error)
                most = 1  # the others of a batch are refused along with it
            except KafkaError as error:
                log.warning("%d messages wait for the broker: %s", len(waiting), type(error).__name__)
                await asyncio.sleep(RETRY_S)
                await self._restore_topics()
        return offsets

    def _put_aside(self, output: Output, error: KafkaError) -> list[Output]:
        log.error("a message of %d bytes for %s is too large for the broker", len(output.value), output.topic)
        if output.topic == DEAD.name:
            return []
        letter = DeadLetter(cluster=self._cluster, observed_at_ns=self._clock.now_ns(), topic=output.topic, key=output.key,
                            payload=output.value, reason=f"no broker takes it: {type(error).__name__}")  # fmt: skip
        return [Output(DEAD.name, output.topic.encode(), encode(fitting(letter)))]

    async def _restore_topics(self) -> None:
        """A broker that forgot everything would make up topics with a single partition on the next send."""
        try:
            await asyncio.to_thread(self._bus.wait_ready, 1.0)
            await asyncio.to_thread(self._bus.ensure_topics, self._topics)
        except TrainwardenError as error:
            log.warning("topics are not there yet: %s", error)


Past = Callable[[str, int], Awaitable[list[Message]]]
"""Everything on a topic as of now, from an offset on."""


class RawService:
    """Reads raw topics, cuts, detects, publishes, commits: one leadership, or one unit, from assignment to revocation.

    `past` may hand out what it read before to several units that begin at once.
    """

    def __init__(
        self,
        config: Config,
        outlet: Outlet,
        correlator: CorrelatorStage | None,
        metrics: Metrics,
        clock: Clock,
        pulse: Pulse,
        unit: Unit | None = None,
        past: Past | None = None,
    ) -> None:
        self._config = config
        self._past = past or (lambda topic, start: read_all(config, topic, start))
        self._places = unit.places if unit is not None else tuple(topic.name for topic in RAW)
        self._group = unit_group(config, unit) if unit is not None else config.streams.group
        self._outlet = outlet
        self._pulse = pulse
        self._correlator = correlator
        self._metrics = metrics
        self._clock = clock
        pipeline = unit.pipeline(config, metrics) if unit is not None else Pipeline(config, metrics=metrics)
        role = unit.role if unit is not None else WHOLE
        self._stage = RawStage(config, pipeline, clock, uuid.uuid4().hex[:8], metrics, role)
        self._cuts_position: int | None = None
        self._frame_ms = 0.0
        self._settled = True
        self._cutting = asyncio.Lock()
        self._fresh = False
        self._read_s = 0.0
        self._held_up = False
        self._portions = Portions()
        self._beside, self._packing = Beside("cuts"), Beside("packing")
        self._next_commit_s = 0.0
        self._saving: asyncio.Task[None] | None = None
        self._next_snapshot_s = 0.0
        self.ready = asyncio.Event()
        self.paused = False
        self.given_away = False
        """Whether another worker has this unit by now: what would be saved at the end, nobody reads."""

    async def settle(self) -> None:
        """Cut no more, and come back when the last cut is on its topics."""
        self.paused = True
        async with self._cutting:
            pass

    @property
    def disabled(self) -> Mapping[str, str]:
        """Detectors that broke, and why."""
        return self._stage.pipeline.disabled

    async def run(self) -> None:
        """Lead until cancelled; a clean end leaves a snapshot, so that the next start is quick. Raises `StoodStill`."""
        async with consumer_of(self._config, self._group) as consumer:
            await assign(consumer, self._places)
            await self._resume(consumer)
            self.ready.set()
            log.info("worker leads %s: reading %s", self._stage.role.owner, ", ".join(self._places))
            try:
                await self._loop(consumer)
            finally:
                if self._saving is not None:
                    self._saving.cancel()
                with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                    if not self.given_away:
                        await asyncio.wait_for(asyncio.shield(self._save(consumer)), STOP_S / 2)

    async def _resume(self, consumer: Any) -> None:
        owner = self._stage.role.owner
        snapshots = _readable(StateSnapshot, self._own(await self._past(STATE.name, 0)), self._refuse)
        known = state.newest(owner, snapshots)
        cuts_from = known.positions.get(f"{CUTS.name}/0", 0) if known is not None else 0
        messages = await self._past(CUTS.name, cuts_from)
        self._cuts_position = messages[-1].offset + 1 if messages else cuts_from
        resume = state.resume_from(owner, snapshots, _readable(FrameCut, messages, self._refuse))
        positions = self._stage.resume(resume)
        for place in consumer.assignment():
            # what the group has stored is for lag monitors: what no snapshot speaks of is read from the beginning
            consumer.seek(place, positions.get(f"{place.topic}/{place.partition}", 0))
        await self._repeat(consumer)

    def _own(self, snapshots: list[Message]) -> list[Message]:
        """Those of this unit; who does it all looks at everything, and puts aside what nobody can read."""
        prefix = f"{self._stage.role.owner}/".encode()
        return snapshots if self._stage.role is WHOLE else [m for m in snapshots if m.key.startswith(prefix)]

    def _refuse(self, message: Message, reason: str) -> None:
        if self._correlator is not None:
            self._correlator.refuse(message, reason)

    async def _repeat(self, consumer: Any) -> None:
        """Repeat the recorded cuts, for as long as their messages keep coming."""
        loop = asyncio.get_running_loop()
        moved_s, reached = loop.time(), await positions_of(consumer)
        results = self._stage.take(())
        while self._stage.catching_up or results:
            for result in results:
                await self._deliver(result)
            self._portions.renew()
            before, results = reached, await self._read(consumer, wait_ms=50)
            reached = await positions_of(consumer)
            results += self._stage.reached(reached)
            if results or reached != before:
                moved_s = loop.time()
            elif await self._gone(consumer, reached, loop.time() - moved_s):
                results += self._stage.abandon_cuts()

    async def _gone(self, consumer: Any, reached: Mapping[str, int], silent_s: float) -> bool:
        """Whether messages of recorded cuts will not come any more: nothing came for a while, and this is the end of what there is. A
        process that was given no time for a while is no proof of it."""
        if silent_s < REPEAT_PATIENCE_S:
            return False
        try:
            ends = await consumer.end_offsets(list(consumer.assignment()))
        except KafkaError:
            return False
        at_end = all(reached[f"{place.topic}/{place.partition}"] >= end for place, end in ends.items())
        return at_end or silent_s > SILENT_S

    async def _loop(self, consumer: Any) -> None:
        loop = asyncio.get_running_loop()
        cut_s = self._config.streams.cut_ms / 1000
        next_cut_s = loop.time() + cut_s
        self._next_snapshot_s = loop.time() + self._config.streams.snapshot_s
        # what came while nobody was at work is read before time goes on, else all nodes would have been silent meanwhile
        while not await self._read_to_end(consumer, list(consumer.assignment())):
            await asyncio.sleep(RETRY_S)
        self._fresh, self._held_up, self._read_s = True, False, loop.time()
        while True:
            await self._read_until(consumer, next_cut_s)
            next_cut_s = max(next_cut_s + cut_s, loop.time())
            if self.paused:
                continue
            async with self._cutting:
                await self._read(consumer, wait_ms=0)
                if not await self._read_up(consumer):
                    continue
                await self._cut()
                while self._stage.more(self._stage.last_cut_ns) and not self.paused:
                    await self._cut()
            self._note_lag(consumer)
            if loop.time() >= self._next_commit_s:
                self._next_commit_s = loop.time() + COMMIT_S
                await self._commit(consumer)
            if self._saving is not None and self._saving.done():
                self._saving.result()
                self._saving = None
            if self._saving is None and loop.time() >= self._next_snapshot_s:
                await self._save_beside()

    async def _read_until(self, consumer: Any, cut_s: float) -> None:
        """Wait for a cut's time. Of a partition nothing more is fetched before what it gave is taken: so it is taken again and again, else
        a cut would see what there was at the time of the cut before; and what is decoded now need not be decoded then."""  # fmt: skip
        loop = asyncio.get_running_loop()
        while (left_s := cut_s - loop.time()) > READ_S:
            await asyncio.sleep(READ_S)
            if not self.paused:
                await self._read(consumer, wait_ms=0)
        await asyncio.sleep(max(0.0, left_s))

    async def _read(self, consumer: Any, wait_ms: int) -> list[CutResult]:
        """Everything the consumer holds now (bounded), into the stage."""
        results, now_s = list[CutResult](), asyncio.get_running_loop().time()
        self._held_up, self._read_s = self._held_up or now_s - self._read_s > UNREAD_S, now_s
        for _ in range(READ_ROUNDS):
            messages = await self._portions.take(consumer, consumer.assignment(), wait_ms)
            if not messages:
                break
            self._fresh = self._fresh or any(message.topic == SUMMARIES.name for message in messages)
            if self._stage.catching_up:  # this repeats cuts
                results.extend(await self._beside.run(self._stage.take, messages))
            else:
                results.extend(self._stage.take(messages))
        return results

    async def _read_up(self, consumer: Any) -> bool:
        """Steps and logs that lay on the broker before a summary was read are read before its grid point can be closed; partitions are
        fetched each in its own time; after a hold-up everything is. False when the broker cannot say how much there is."""
        if self._held_up:
            places = list(consumer.assignment())
            self._held_up = not await self._read_to_end(consumer, places)
            self._fresh = any(place.topic == SUMMARIES.name for place in places)
        if self._held_up or not self._fresh:
            return not self._held_up
        places = [place for place in consumer.assignment() if place.topic != SUMMARIES.name]
        self._fresh = not await self._read_to_end(consumer, places)
        return not self._fresh

    async def _read_to_end(self, consumer: Any, places: list[TopicPartition]) -> bool:
        """Read what these hold now, as far as one cut may go; False when the broker does not say how much that is."""
        loop = asyncio.get_running_loop()
        try:
            ends = await consumer.end_offsets(places)
        except KafkaError as error:
            log.warning("nothing is cut before the broker answers: %s", type(error).__name__)
            return False
        count, deadline_s = 0, loop.time() + SILENT_S
        while behind := [
            place for place in self._portions.wanted(places) if await consumer.position(place) < ends[place]
        ]:
            messages = await self._portions.take(consumer, behind, SILENCE_MS)
            self._stage.take(messages)
            count += len(messages)
            if messages:
                deadline_s = loop.time() + SILENT_S
            if count >= READ_MOST or loop.time() > deadline_s:
                break
        return True

    async def _cut(self) -> None:
        now_ns = self._clock.now_ns()
        started_ns = self._clock.monotonic_ns()
        self._portions.renew()
        self._settled = False  # broken off from here on, the state holds a cut that nobody was told of: it is not saved
        # the first one, or one after a hold-up, may hold a backlog: a slow machine would take it for a standstill, and begin anew for ever
        if self._frame_ms > SLOW_FRAME_MS or now_ns - self._stage.last_cut_ns > HOLD_UP_NS:
            result = await self._beside.run(self._stage.cut, now_ns)
        else:
            result = self._stage.cut(now_ns)
        self._frame_ms = 0.8 * self._frame_ms + 0.2 * (self._clock.monotonic_ns() - started_ns) / 1e6
        await self._deliver(result)
        self._settled = True

    async def _deliver(self, result: CutResult) -> None:
        self._pulse.check()
        if self.given_away:
            raise asyncio.CancelledError
        if result.frame is not None and self._correlator is not None:
            self._correlator.correlator.on_frame(result.frame)
        offsets = await self._outlet.deliver(result.outputs)
        self._stage.delivered(result, self._clock.now_ns())
        if CUTS.name in offsets:
            self._cuts_position = offsets[CUTS.name] + 1

    def _note_lag(self, consumer: Any) -> None:
        ends = {f"{p.topic}/{p.partition}": consumer.highwater(p) for p in consumer.assignment()}
        unread = lag(ends, self._stage.positions)
        self._stage.note_lag(unread)
        for topic, records in unread.items():
            self._metrics.set("tw_lag_records", records, topic=topic)
        self._portions.note_ages(unread, self._clock.now_ns() / NS_PER_MS, self._metrics)

    async def _commit(self, consumer: Any) -> None:
        """For lag monitors only: the truth about positions is in the snapshot and the cuts."""
        here = consumer.assignment()  # after a roll back the state also speaks of topics that this build does not read
        positions = {p: offset for place, offset in self._stage.positions.items() if (p := partition_at(place)) in here}
        try:
            if positions:
                await asyncio.wait_for(consumer.commit(positions), 5.0)
        except (KafkaError, TimeoutError) as error:
            log.warning("positions of group %s were not stored: %s", self._group, type(error).__name__)

    async def _save(self, consumer: Any) -> None:
        """The state is captured between two cuts and beside the event loop: with thousands of nodes it is hundreds of megabytes."""
        if self._stage.seq and self._settled and not self._stage.catching_up and not self._pulse.stood_still:
            captured = await self._beside.run(self._stage.capture, self._cuts_position)
            await self._outlet.deliver(await self._packing.run(captured.messages))
            await self._commit(consumer)

    async def _save_beside(self) -> None:
        """Capture now; pack and publish while cuts go on. The next one is due when this one is a small share of the time."""
        if not self._stage.seq or self._pulse.stood_still:
            return
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        captured = await self._beside.run(self._stage.capture, self._cuts_position)
        self._saving = asyncio.ensure_future(self._publish_state(captured, loop.time() - started_s))

    async def _publish_state(self, captured: Captured, captured_s: float) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        size_bytes, messages = sum(map(len, captured.payload)), await self._packing.run(captured.messages)
        del captured  # it may be hundreds of megabytes, and the broker take its time
        took_s = captured_s + loop.time() - started_s
        await self._outlet.deliver(messages)
        del messages
        await self._packing.run(give_back)
        self._metrics.observe_ms("tw_snapshot_ms", 1000 * took_s)
        self._metrics.set("tw_snapshot_bytes", size_bytes)
        wanted_s = max(self._config.streams.snapshot_s, min(took_s / SNAPSHOT_SHARE, SNAPSHOT_LATEST_S))
        self._next_snapshot_s = loop.time() + wanted_s


class Application:
    """One Faust application: agents, timer, web, and the raw service while this worker leads."""

    def __init__(self, config: Config, metrics: Metrics, clock: Clock) -> None:
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._outlet = Outlet(config, clock)
        self._pulse = Pulse(clock, SESSION_TIMEOUT_S - HEARTBEAT_S)
        self._correlator = CorrelatorStage(config, clock, metrics)
        self._own_health = WorkerHealth(config, metrics)
        self._raw: RawService | None = None
        self._leading: asyncio.Task[None] | None = None
        self.app = self._made()
        self._declare()

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set or something breaks; raises what broke."""
        await self._outlet.start()
        try:
            await self.app.start()
            await self._until(stopping)
        finally:
            try:
                await self._end()
            finally:  # else the next start finds its port taken by this one
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.app.stop(), STOP_S)
                await self._outlet.stop()

    async def _until(self, stopping: asyncio.Event) -> None:
        ending = asyncio.ensure_future(stopping.wait())
        broken = asyncio.ensure_future(self.app.wait_until_stopped())
        beating = asyncio.ensure_future(self._beat())
        while not ending.done():
            await asyncio.wait({ending, broken, *self._working()}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for work in self._working():
                if work.done() and not work.cancelled():
                    work.result()
            if broken.done():
                break
        for task in (ending, broken, beating):
            task.cancel()
        if not stopping.is_set() and self.app.crash_reason is not None:
            raise self.app.crash_reason

    def _working(self) -> Iterable[asyncio.Task[None]]:
        """What may not end by itself."""
        return [self._leading] if self._leading is not None else []

    async def _beat(self) -> None:
        while True:
            self._pulse.beat()
            await asyncio.sleep(BEAT_S)

    def _made(self) -> Any:
        return faust_app(self._config)

    def _declare(self) -> None:
        app = self.app
        verdicts = app.topic(VERDICTS.name, key_serializer="raw", value_serializer="raw")
        actions = app.topic(ACTIONS.name, key_serializer="raw", value_serializer="raw")
        app.agent(verdicts, name="verdicts")(self._consume)
        app.agent(actions, name="actions")(self._consume)
        app.timer(interval=TICK_S)(self._tick)
        app.on_partitions_assigned.connect(self._assigned, weak=False)
        app.on_partitions_revoked.connect(self._revoked, weak=False)
        app.page("/healthz")(self._health)
        app.page("/metrics")(self._page)

    async def _consume(self, stream: Any) -> None:
        async for event in stream.events():
            self._take(message_of(event.message))

    def _take(self, message: Message) -> None:
        hear(self._correlator, message)

    async def _tick(self) -> None:
        if self._raw is None or not self._raw.ready.is_set() or self._raw.paused or self._pulse.stood_still:
            return
        try:
            await self._outlet.deliver(self._own_health.outputs(self._clock.now_ns(), self._raw.disabled))
            await self._outlet.deliver(self._correlator.tick())
        except Exception:
            log.exception("the correlator failed; its incidents are published with the next tick")

    async def _assigned(self, sender: Any, assigned: Iterable[Any], **_: Any) -> None:
        leads = any(tp.topic == VERDICTS.name for tp in assigned)
        if not leads:
            await self._end_lead()
            log.info("worker stands by: another one leads")
        elif self._leading is None:
            self._pulse.forget()
            self._leading = asyncio.ensure_future(self._lead())
        elif self._raw is not None:
            self._raw.paused = False

    async def _revoked(self, sender: Any, revoked: Iterable[Any], **_: Any) -> None:
        """Stop the world of a rebalance: nothing is cut until it is known who leads."""
        if self._raw is not None:
            self._raw.paused = True

    async def _lead(self) -> None:
        """Lead, and begin anew after having stood still: when nobody else was made leader meanwhile, else this task is cancelled."""
        while True:
            try:
                await self._lead_once()
            except StoodStill:
                log.warning("this worker stood still: it says nothing before it is known who leads")
                self._raw, self._correlator = None, CorrelatorStage(self._config, self._clock, self._metrics)
                self._metrics.count("tw_worker_stood_still_total")
                await asyncio.sleep(SESSION_TIMEOUT_S + HEARTBEAT_S)
                self._pulse.forget()

    async def _lead_once(self) -> None:
        """A new leader knows what was published, and nothing else."""
        incidents = await read_all(self._config, INCIDENTS.name)
        restored = self._correlator.restore(incidents)
        self._own_health = WorkerHealth(self._config, self._metrics)
        self._own_health.take_over(incidents)
        since_ms = self._clock.now_ns() // NS_PER_MS - RECENT_VERDICTS_S * 1000
        for message in await read_all(self._config, VERDICTS.name, since_ms=since_ms):
            self._take(message)
        log.info("correlator took %d open incidents over", restored)
        self._raw = RawService(self._config, self._outlet, self._correlator, self._metrics, self._clock, self._pulse)
        await self._raw.run()

    async def _end(self) -> None:
        await self._end_lead()

    async def _end_lead(self) -> None:
        leading, self._leading, self._raw = self._leading, None, None
        if leading is not None:
            await ended([leading])
            with contextlib.suppress(asyncio.CancelledError):
                leading.result()
            self._metrics.forget(*OF_A_LEADER)
            self._correlator = CorrelatorStage(self._config, self._clock, self._metrics)

    @property
    def leads(self) -> bool:
        """Whether raw records are being read here."""
        return self._raw is not None and self._raw.ready.is_set()

    async def _health(self, request: Any) -> Any:
        return self.app.web.text("leads\n" if self.leads else "stands by\n")

    async def _page(self, request: Any) -> Any:
        return self.app.web.text(self._metrics.page())


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel, and again what goes on all the same: before Python 3.12 `asyncio.wait_for` loses a cancellation that meets the answer."""
    waiting = {task for task in tasks if not task.done()}
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=CANCEL_S)


def hear(correlator: CorrelatorStage, message: Message) -> None:
    """An exception in an agent loses what it read, and one at the start keeps every worker from leading: all are caught and told."""
    try:
        correlator.take(message)
    except Exception as error:
        log.exception("message %s offset %d could not be handled", message.place, message.offset)
        correlator.refuse(message, f"the correlator failed on it: {error!r}")


def unit_group(config: Config, unit: Unit) -> str:
    """Group under which a unit's positions are stored: several units read the same topics."""
    return f"{config.streams.group}.{unit.name.replace('/', '.')}"


def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Waits for an absent broker and comes back by itself after a lost one.

    Raises
    ------
    ConfigError
        The bus is no Kafka address, or a detector's settings are wrong.
    UnavailableError
        A topic has too few partitions, or the web port is taken.
    """
    addresses(config)
    _scratch(config)
    Pipeline(config)
    quieten()
    collect_rarely()
    asyncio.run(_serve(config))


async def _serve(config: Config) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop, stopping)
    metrics, clock = Metrics("worker"), SystemClock()
    while not stopping.is_set() and await _broker_ready(config, stopping):
        try:
            metrics.set("tw_up", 1)
            await (await _application(config, metrics, clock)).run(stopping)
        except Exception as error:
            _raise_hopeless(config, error)
            log.exception("the stream application broke off and starts again")
            await asyncio.sleep(1.0)


def _raise_hopeless(config: Config, error: Exception) -> None:
    """What no new start mends is the operator's."""
    if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
        raise UnavailableError(
            f"streams.web_listen {config.streams.web_listen}: {os.strerror(error.errno)}: free it or set another"
        ) from None
    if isinstance(error, UnavailableError) and "partitions" in str(error):
        raise error


async def _application(config: Config, metrics: Metrics, clock: Clock) -> Application:
    if config.streams.stages == 1:
        return Application(config, metrics, clock)
    from streams.dealing import UnitsApplication

    counts = await partitions_of(config, (TICKS.name, UNITS.name))
    return UnitsApplication(config, metrics, clock, deck(counts[TICKS.name], counts[UNITS.name]))


def _stop(stopping: asyncio.Event) -> None:
    stopping.set()
    threading.excepthook = lambda args: log.info(
        "thread %s ended by %r", args.thread and args.thread.name, args.exc_value
    )
    limit = threading.Timer(STOP_LIMIT_S, os._exit, (0,))
    limit.daemon = True
    limit.start()


async def _broker_ready(config: Config, stopping: asyncio.Event) -> bool:
    """Wait for the broker, then make sure of the topics; False when told to stop meanwhile."""
    bus, told = connect(config.kafka), False
    while not stopping.is_set():
        try:
            await asyncio.to_thread(bus.wait_ready, 1.0)
            await asyncio.to_thread(bus.ensure_topics, needed(config.streams.stages))
            return True
        except UnavailableError as error:
            if "partitions" in str(error):
                raise
            if not told:
                log.warning("%s; waiting for it", error)
            told = True
    return False


def faust_app(config: Config, group: str = "correlator", **more: Any) -> Any:
    """A Faust application that joins a group and keeps nothing; `more` are settings of Faust's."""
    host, _, port = config.streams.web_listen.rpartition(":")
    os.environ.setdefault("FAUST_LOOP", "aio")
    return faust.App(
        f"{config.streams.group}.{group}",
        broker=[f"kafka://{address}" for address in addresses(config)],
        broker_credentials=_credentials(security_of(config.kafka)),
        autodiscover=False,
        datadir=str(_scratch(config)),
        store="memory://",
        key_serializer="raw",
        value_serializer="raw",
        topic_disable_leader=True,
        topic_allow_declare=False,
        consumer_auto_offset_reset="earliest",
        broker_session_timeout=SESSION_TIMEOUT_S,
        broker_heartbeat_interval=HEARTBEAT_S,
        broker_commit_interval=1.0,
        stream_wait_empty=False,
        web_enabled=bool(port),
        web_bind=host or "127.0.0.1",
        web_host=host or "127.0.0.1",
        web_port=int(port or 0),
        web_in_thread=False,
        **more,
    )


def _credentials(security: Security) -> Any:
    """Faust's own words for it."""
    if security.protocol == "plaintext":
        return None
    if security.username:
        return faust.SASLCredentials(
            username=security.username,
            password=security.password,
            mechanism=security.mechanism,
            ssl_context=security.context,
        )
    return faust.SSLCredentials(security.context)


def lag(ends: Mapping[str, int | None], positions: Mapping[str, int]) -> dict[str, int]:
    """Records of each topic that lie on the broker and are in no frame yet; partitions that were never fetched from say nothing.

    Examples
    --------
    >>> lag({"tw.ticks/0": 12, "tw.ticks/1": 5, "tw.logs/0": None}, {"tw.ticks/0": 10})
    {'tw.ticks': 7}
    """
    found: dict[str, int] = {}
    for place, end in ends.items():
        if end is not None:
            topic = place.rpartition("/")[0]
            found[topic] = found.get(topic, 0) + max(0, end - positions.get(place, 0))
    return found


def _readable(kind: type[Any], messages: Iterable[Message], refuse: Callable[[Message, str], None]) -> list[Any]:
    """The records of a kind; what cannot be read goes to `refuse`, a tombstone is nothing."""
    found = []
    for message in messages:
        try:
            if message.value:
                found.append(decode_as(kind, message.value))
        except DecodeError as error:
            log.warning("%s offset %d is passed over: %s", message.place, message.offset, error.reason)
            refuse(message, error.reason)
    return found


def _scratch(config: Config) -> Path:
    data = config.path(config.streams.data_directory, "worker")
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(
            f"streams.data_directory {data}: cannot be made ({error.strerror}): let the worker write there, or set another run_dir"
        ) from None
    return data
