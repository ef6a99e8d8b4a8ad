"""Two-stage detection on Kafka: the units of work are dealt to the workers of a group by Kafka's own assignment.

A topic on which nothing is ever said has a partition for each unit (`streams.units.deck`); who is assigned the partition has the unit.
Each unit is a `RawService` of its own, resumed from its own snapshots and recorded cuts, so a unit that moves goes on as if it had not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka.errors import KafkaError

from streams.app import (
    BEAT_S,
    COMMIT_S,
    HEARTBEAT_S,
    RECENT_VERDICTS_S,
    SESSION_TIMEOUT_S,
    TICK_S,
    Application,
    RawService,
    ended,
    faust_app,
    hear,
    unit_group,
)
from streams.health import WorkerHealth
from streams.pulse import StoodStill
from streams.reading import assign, consumer_of, message_of, offset_at, read_all
from streams.stage import CorrelatorStage
from streams.units import Unit, UnitMetrics
from trainwarden.bus import Message
from trainwarden.clock import NS_PER_MS, NS_PER_S, Clock
from trainwarden.config import Config
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import ACTIONS, INCIDENTS, STATE, UNITS, VERDICTS

log = logging.getLogger(__name__)

HEALTH_S = 1.0
SETTLE_S = 3.0
"""A rebalance waits so long for cuts that are under way, less than the others wait for this worker."""


class SharedPast:
    """Reads snapshots and incidents once for all units that begin together."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._shared: dict[str, asyncio.Future[list[Message]]] = {}

    async def read(self, topic: str, start: int) -> list[Message]:
        """Everything on a topic as of now, of the shared ones as of the first call."""
        if topic not in (STATE.name, INCIDENTS.name):
            return await read_all(self._config, topic, start)
        if topic not in self._shared:
            self._shared[topic] = asyncio.ensure_future(read_all(self._config, topic, start))
        return await asyncio.shield(self._shared[topic])


class Opinions:
    """What the correlator hears where no agent listens for it: verdicts and actions, from what was last heard on."""

    def __init__(self, config: Config, correlator: CorrelatorStage, clock: Clock, group: str) -> None:
        self._config = config
        self._correlator = correlator
        self._clock = clock
        self._consumer = consumer_of(config, group)
        self._next_commit_ns = 0

    async def __aenter__(self) -> Opinions:
        try:
            await self._catch_up()
        except BaseException:
            await self._consumer.stop()
            raise
        return self

    async def _catch_up(self) -> None:
        """Know what was published, and what was said of late."""
        await self._consumer.start()
        partitions = await assign(self._consumer, [VERDICTS.name, ACTIONS.name])
        restored = self._correlator.restore(await read_all(self._config, INCIDENTS.name))
        ends = await self._consumer.end_offsets(partitions)
        for place in partitions:
            self._consumer.seek(place, await self._start(place, ends[place]))
        while any([await self._consumer.position(place) < ends[place] for place in partitions]):
            await self.read(wait_ms=100)
        log.info("correlator took %d open incidents over", restored)

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(KafkaError):
            await self._consumer.stop()

    async def read(self, wait_ms: int = 0) -> None:
        """Hear what is there."""
        batches = await self._consumer.getmany(timeout_ms=wait_ms)
        for records in batches.values():
            for record in records:
                hear(self._correlator, message_of(record))

    async def commit(self) -> None:
        """What was heard so far is in the incidents that are published; at most once a second."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._next_commit_ns:
            return
        self._next_commit_ns = now_ns + int(COMMIT_S * NS_PER_S)
        try:
            await asyncio.wait_for(self._consumer.commit(), 5.0)
        except (KafkaError, TimeoutError) as error:
            log.warning("positions of the correlator were not stored: %s", type(error).__name__)

    async def _start(self, place: Any, end: int) -> int:
        """Repeats change nothing: verdicts of the last minute are heard again, in case that their incident was not published."""
        heard = await self._consumer.committed(place) or 0
        if place.topic != VERDICTS.name:
            return int(heard)
        since_ms = self._clock.now_ns() // NS_PER_MS - RECENT_VERDICTS_S * 1000
        recent = await offset_at(self._consumer, place, since_ms, end)
        return min(int(heard), recent) if heard else recent


@dataclass
class Held:
    """A unit in this worker's hand."""

    unit: Unit
    service: RawService
    metrics: Metrics
    correlator: CorrelatorStage | None
    health: WorkerHealth
    past: SharedPast
    task: asyncio.Task[None] = field(init=False)
    telling: asyncio.Task[None] | None = None


class UnitsApplication(Application):
    """One worker of several that share the units.

    Parameters
    ----------
    deck
        The unit of each partition of the unit topic.
    """

    def __init__(self, config: Config, metrics: Metrics, clock: Clock, deck: Sequence[Unit]) -> None:
        self._deck = deck
        self._hand: dict[str, Held] = {}
        self._mine: list[Unit] = []
        self._dealing = asyncio.Lock()
        self._waking: asyncio.Task[None] | None = None
        super().__init__(config, metrics, clock)

    def _made(self) -> Any:
        # with stand-bys for tables, which there are none of, Faust would fill some workers to the brim and leave others without a unit
        return faust_app(self._config, "units", table_standby_replicas=0)

    def _declare(self) -> None:
        app = self.app
        app.agent(app.topic(UNITS.name, key_serializer="raw", value_serializer="raw"), name="units")(self._ignore)
        app.on_partitions_assigned.connect(self._assigned, weak=False)
        app.on_partitions_revoked.connect(self._revoked, weak=False)
        app.page("/healthz")(self._health)
        app.page("/metrics")(self._page)

    async def _ignore(self, stream: Any) -> None:
        async for event in stream.events():
            log.warning("a message on %s is passed over: nothing is said there", event.message.topic)

    # --- who has what -------------------------------------------------------------------------------------------------

    async def _assigned(self, sender: Any, assigned: Iterable[Any], **_: Any) -> None:
        numbers = sorted(tp.partition for tp in assigned if tp.topic == UNITS.name and tp.partition < len(self._deck))
        async with self._dealing:
            self._mine = [self._deck[number] for number in numbers]
            if self._pulse.stood_still:
                await self._give(list(self._hand))  # whoever had them meanwhile is further on
                self._pulse.forget()
            await self._give(self._hand.keys() - {unit.name for unit in self._mine})
            self._take_up()

    async def _revoked(self, sender: Any, revoked: Iterable[Any], **_: Any) -> None:
        """What is under way is finished, and nothing else begun, until it is known who has what."""
        settling = [asyncio.ensure_future(held.service.settle()) for held in self._hand.values()]
        if settling:
            await asyncio.wait(settling, timeout=SETTLE_S)
        for task in settling:
            task.cancel()

    async def _beat(self) -> None:
        """A gap in the beat means that all units may be somebody else's."""
        try:
            while True:
                self._pulse.beat()
                if self._pulse.stood_still and (self._waking is None or self._waking.done()):
                    self._waking = asyncio.ensure_future(self._wake())
                await asyncio.sleep(BEAT_S)
        finally:
            if self._waking is not None:
                self._waking.cancel()

    async def _wake(self) -> None:
        """Give all back; when nobody was dealt them meanwhile, and so nothing was assigned, begin with them anew."""
        log.warning(
            "this worker stood still: it gives its units back, and says nothing before it is known who has them"
        )
        self._metrics.count("tw_worker_stood_still_total")
        async with self._dealing:
            await self._give(list(self._hand))
        await asyncio.sleep(SESSION_TIMEOUT_S + HEARTBEAT_S)
        async with self._dealing:
            if self._pulse.stood_still:
                self._pulse.forget()
                self._take_up()

    def _take_up(self) -> None:
        past = SharedPast(self._config)
        for unit in self._mine:
            if unit.name in self._hand:
                self._hand[unit.name].service.paused = False
            else:
                self._hand[unit.name] = self._begin(unit, past)
        log.info("this worker has %s", ", ".join(self._hand) or "no unit: it stands by")

    def _begin(self, unit: Unit, past: SharedPast) -> Held:
        metrics = UnitMetrics(unit.name)
        correlator = CorrelatorStage(self._config, self._clock, metrics) if unit.correlates else None
        service = RawService(
            self._config, self._outlet, correlator, metrics, self._clock, self._pulse, unit=unit, past=past.read
        )
        health = WorkerHealth(self._config, metrics, "" if unit.correlates else unit.name, unit.runs)
        held = Held(unit, service, metrics, correlator, health, past)
        held.task = asyncio.ensure_future(self._serve(held))
        return held

    async def _give(self, names: Iterable[str]) -> None:
        """Somebody else has these now, or will."""
        gone = [self._hand.pop(name) for name in list(names)]
        for held in gone:
            held.service.given_away = True
        await _end_all(gone)

    async def _end(self) -> None:
        """A clean end: each unit leaves a snapshot."""
        gone, self._hand = list(self._hand.values()), {}
        await _end_all(gone)

    def _working(self) -> Iterable[asyncio.Task[None]]:
        hand = self._hand.values()
        tasks = [held.task for held in hand] + [held.telling for held in hand if held.telling is not None]
        return [task for task in tasks if not task.done() or task.cancelled() or task.exception() is not None]

    # --- what a unit does ---------------------------------------------------------------------------------------------

    async def _serve(self, held: Held) -> None:
        try:
            held.metrics.set("tw_up", 1)
            if held.correlator is None:
                await self._work(held, self._watch(held))
            else:
                await self._correlate(held, held.correlator)
        except StoodStill:
            log.info("%s is given back", held.unit.name)

    async def _correlate(self, held: Held, correlator: CorrelatorStage) -> None:
        async with Opinions(self._config, correlator, self._clock, unit_group(self._config, held.unit)) as opinions:
            await self._work(held, self._tell(held, correlator, opinions))

    async def _work(self, held: Held, telling: Coroutine[Any, Any, None]) -> None:
        """Run the unit, and beside it what is to be told of it."""
        held.telling = asyncio.ensure_future(telling)
        try:
            await held.service.run()
        finally:
            held.telling.cancel()

    async def _watch(self, held: Held) -> None:
        """The health of a unit."""
        await self._begin_telling(held)
        while not held.task.done():
            await asyncio.sleep(HEALTH_S)
            if not self._is_silent(held):
                await self._outlet.deliver(held.health.outputs(self._clock.now_ns(), held.service.disabled))

    async def _tell(self, held: Held, correlator: CorrelatorStage, opinions: Opinions) -> None:
        """The correlator's clock, and the health of its unit."""
        await self._begin_telling(held)
        while not held.task.done():
            await asyncio.sleep(TICK_S)
            await opinions.read()
            if self._is_silent(held):
                continue
            try:
                await self._outlet.deliver(held.health.outputs(self._clock.now_ns(), held.service.disabled))
                await self._outlet.deliver(correlator.tick())
            except Exception:
                log.exception("the correlator failed; its incidents are published with the next tick")
            await opinions.commit()

    async def _begin_telling(self, held: Held) -> None:
        """What whoever had this unit before said of its health is ours to take back."""
        await held.service.ready.wait()
        held.health.take_over(await held.past.read(INCIDENTS.name, 0))

    def _is_silent(self, held: Held) -> bool:
        """Whether another worker may speak for this unit by now."""
        return held.service.paused or held.service.given_away or self._pulse.stood_still

    # --- pages --------------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether any unit is at work here."""
        return bool(self._ready())

    def _ready(self) -> list[str]:
        return [name for name, held in self._hand.items() if held.service.ready.is_set()]

    async def _health(self, request: Any) -> Any:
        ready = self._ready()
        told = f"has {len(ready)} of {len(self._deck)} units: {', '.join(ready)}" if ready else "stands by"
        return self.app.web.text(f"{told}\n")

    async def _page(self, request: Any) -> Any:
        return self.app.web.text(self._metrics.page() + "".join(held.metrics.page() for held in self._hand.values()))


async def _end_all(gone: Sequence[Held]) -> None:
    await ended([held.task for held in gone])
    for held in gone:
        if not held.task.cancelled() and (error := held.task.exception()) is not None:
            log.warning("%s ended with %r", held.unit.name, error)
