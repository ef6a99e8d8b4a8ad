"""The notification service: incidents and actions in, notices out. Runs as a thread of the action service or by itself."""

from __future__ import annotations

import logging
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from actions.notify.base import NOTIFIERS, Cause, DeliverySettings, Notice, Notifier, Site
from actions.notify.courier import Courier
from actions.notify.decide import OVER, cause_of_revision, culprits_of, is_result, labels_of, repeat_due_before_ns
from actions.notify.outbox import Outbox, Told, Waiting
from actions.notify.sender import HttpSender, Sender
from trainwarden.bus import Bus, Message, connect, decode_or_dead
from trainwarden.bus.dead import bury
from trainwarden.clock import Clock, SystemClock
from trainwarden.config import Config
from trainwarden.errors import BusError, ConfigError, TrainwardenError
from trainwarden.records import ActionResult, Delivery, Incident, Plan, Record, encode, stable_id
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import ACTIONS, INCIDENTS

LOG = logging.getLogger("trainwarden.actions.notify")

GROUP = "tw.notify"
POLL_S = 0.2
IDLE_S = 0.1
STANDBY_S = 0.5
JOIN_S = 10.0


class NotifyService:
    """Decides who hears what and delivers it.

    Parameters
    ----------
    sender
        What sends; the real one speaks HTTP.

    Raises
    ------
    ConfigError
        A receiver of an unknown type, or with wrong settings.
    UnavailableError
        The outbox file cannot be used.
    """

    def __init__(
        self, config: Config, bus: Bus, clock: Clock, metrics: Metrics | None = None, sender: Sender | None = None
    ) -> None:
        self._config = config
        self._clock = clock
        self._metrics = metrics or Metrics("notify")
        self.notifiers = make_notifiers(config)
        self.outbox = Outbox(config.path(None, "notify.sqlite"))
        self._bus = bus
        self._publisher = bus.publisher(self._lost)
        self._boot_id = uuid.uuid4().hex[:12]
        self._seq = 0
        self._seq_guard = threading.Lock()
        self.couriers = [
            Courier(notifier, self.outbox, sender or HttpSender(), clock, self._metrics, self._tell)
            for notifier in self.notifiers
        ]

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set. A second process on the same outbox waits until the first is gone."""
        while not stop.is_set() and not self.outbox.take():
            stop.wait(STANDBY_S)
        if stop.is_set():
            self.close()
            return
        self.outbox.prune(self._clock.now_ns())
        ending = threading.Event()
        threads = [threading.Thread(target=self._deliver, args=(courier, ending), name=f"notify-{courier.notifier.receiver}", daemon=True)
                   for courier in self.couriers]  # fmt: skip
        for thread in threads:
            thread.start()
        try:
            self._listen(stop)
        finally:
            ending.set()
            for thread in threads:
                thread.join()
            self.close()

    def close(self) -> None:
        """Let go of bus and outbox."""
        self._publisher.close()
        self.outbox.close()

    def take(self, messages: Sequence[Message]) -> None:
        """Decide over messages of the bus; what is to be told is durable when this returns."""
        records = [(message, self._decode(message)) for message in messages]
        # plans and results first: a first notice then says at once what was done about it
        for message, record in records:
            if isinstance(record, Plan | ActionResult):
                self._take_one(message, partial(self._take_history, record))
        for message, record in records:
            if isinstance(record, Incident):
                self._take_one(message, partial(self._take_incident, record))

    def _take_one(self, message: Message, take: Callable[[], None]) -> None:
        """What no notice can be made of is put aside; an outbox that cannot be written is the caller's business."""
        try:
            take()
        except sqlite3.Error:
            raise
        except Exception as error:
            LOG.exception("%s offset %d: no notice can be made of it", message.place, message.offset)
            self._metrics.count("tw_dead_letters_total", topic=message.topic)
            reason = f"no notice can be made of it: {error!r}"
            bury(message, reason, self._publisher, self._config.cluster, self._clock)

    def repeat(self) -> None:
        """Tell again what fires and was told long ago."""
        for notifier in self.notifiers:
            before_ns = repeat_due_before_ns(notifier.settings, self._clock.now_ns())
            for incident_id in self.outbox.firing(notifier.receiver, before_ns):
                incident = self.outbox.incident(incident_id)
                if incident is not None:
                    with self.outbox.transaction():
                        self._queue(notifier, incident, Cause.REPEAT)

    def _decode(self, message: Message) -> Record | None:
        record = decode_or_dead(message, self._publisher, self._config.cluster, self._clock)
        if record is None:
            self._metrics.count("tw_dead_letters_total", topic=message.topic)
        return record

    # --- deciding --------------------------------------------------------------------------------------------------------

    def _take_incident(self, incident: Incident) -> None:
        with self.outbox.transaction():
            if not self.outbox.learn_incident(incident, self._clock.now_ns()):
                self._metrics.count("tw_duplicates_total", topic=INCIDENTS.name)
                return
            for notifier in self.notifiers:
                told = self.outbox.told(notifier.receiver, incident.incident_id)
                cause = cause_of_revision(incident, told, notifier.settings)
                if cause is not None:
                    self._queue(notifier, incident, cause)

    def _take_history(self, record: Plan | ActionResult) -> None:
        with self.outbox.transaction():
            if not self.outbox.learn_history(record):
                self._metrics.count("tw_duplicates_total", topic=ACTIONS.name)
                return
            incident = self.outbox.incident(record.incident_id)
            if incident is None or not isinstance(record, ActionResult) or not is_result(record):
                return
            for notifier in self.notifiers:
                told = self.outbox.told(notifier.receiver, incident.incident_id)
                if told is not None and told.firing:
                    self._queue(notifier, incident, Cause.ACTION)

    def _queue(self, notifier: Notifier, incident: Incident, cause: Cause) -> None:
        now_ns = self._clock.now_ns()
        known = self.outbox.told(notifier.receiver, incident.incident_id)
        history = self.outbox.history(incident.incident_id)
        told = _told_after(known, incident, cause, now_ns, history[-1][0] if history else 0)
        # the time is part of the identity of a repeat only: a decision that is made again after a crash is the same notice
        moment = now_ns if cause is Cause.REPEAT else told.history_n if cause is Cause.ACTION else 0
        notice_id = stable_id(
            "notice", notifier.receiver, incident.incident_id, incident.revision, cause.value, told.rounds, moment
        )
        notice = Notice(
            notice_id=f"msg_{notice_id}", receiver=notifier.receiver, cause=cause, firing=told.firing, incident=incident,
            started_at_ns=told.started_ns, ended_at_ns=0 if told.firing else _ended_ns(incident, now_ns), labels=told.labels,
            plans=tuple(r for _, r in history if isinstance(r, Plan)), actions=tuple(r for _, r in history if isinstance(r, ActionResult)),
        )  # fmt: skip
        self.outbox.put(Waiting(0, notice.notice_id, notifier.receiver, incident.incident_id, incident.revision, cause, told.firing,
                                told.rounds, notifier.render(notice), now_ns, 0, now_ns), told)  # fmt: skip

    # --- threads ---------------------------------------------------------------------------------------------------------

    def _listen(self, stop: threading.Event) -> None:
        subscriber = self._bus.subscriber([INCIDENTS.name, ACTIONS.name], group=GROUP)
        try:
            while not stop.is_set():
                try:
                    messages = subscriber.poll(POLL_S)
                    if self._taken(messages, stop) and messages:
                        subscriber.commit()
                    self.repeat()
                except (BusError, sqlite3.Error) as error:
                    LOG.warning("%s", error)
                    stop.wait(STANDBY_S)
        finally:
            subscriber.close()

    def _taken(self, messages: Sequence[Message], stop: threading.Event) -> bool:
        """Whether the outbox has them; tried until it has or the service ends, since they are not read again before its next start."""
        while True:
            try:
                self.take(messages)
            except sqlite3.Error as error:
                LOG.error("notices wait: outbox %s: %s; free space on its disk", self.outbox.path, error)
                if stop.wait(STANDBY_S):
                    return False
            else:
                return True

    def _deliver(self, courier: Courier, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                if not courier.step():
                    stop.wait(IDLE_S)
            except Exception:
                # one notice that cannot be handled must not silence the pager
                LOG.exception("delivery to %s failed, trying again", courier.notifier.receiver)
                self._metrics.count("tw_deliveries_total", receiver=courier.notifier.receiver, status="error")
                stop.wait(STANDBY_S)

    def _tell(self, delivery: Delivery) -> None:
        with self._seq_guard:
            self._seq += 1
            header = {
                "cluster": self._config.cluster,
                "seq": self._seq,
                "observed_at_ns": self._clock.now_ns(),
                "boot_id": self._boot_id,
            }
        record = msgspec.structs.replace(delivery, **header)
        self._publisher.publish(ACTIONS.name, delivery.incident_id.encode(), encode(record))

    def _lost(self, topic: str, key: bytes, value: bytes, reason: str) -> None:
        del value
        LOG.warning("a record for %s (%s) was not delivered: %s", topic, key.decode(errors="replace"), reason)


def make_notifiers(config: Config) -> list[Notifier]:
    """The receivers of ``[notify.<receiver>]`` that are switched on."""
    listen = config.actions.listen
    site = Site(
        f"http://{listen}" if listen else "", str(config.path(config.actions.kill_switch, "KILL_SWITCH").absolute())
    )
    made = []
    for receiver, table in config.plugins.get("notify", {}).items():
        if not config.enabled("notify", receiver):
            continue
        try:
            kind = NOTIFIERS.get(str(table.get("type", receiver)))
        except ConfigError as error:
            raise ConfigError(f"notify.{receiver}.type: {error}") from None
        settings: DeliverySettings = config.plugin("notify", receiver, kind.Settings)
        made.append(kind(receiver, settings, site))
    return made


def run(config: Config, stop: threading.Event, clock: Clock | None = None, metrics: Metrics | None = None) -> None:
    """Notify until `stop` is set; outlives a broker that comes and goes.

    Raises
    ------
    ConfigError
        A receiver is configured wrongly.
    """
    clock = clock or SystemClock()
    bus = connect(config.kafka)
    try:
        while not stop.is_set():
            try:
                NotifyService(config, bus, clock, metrics).run(stop)
            except ConfigError:
                raise
            except TrainwardenError as error:
                LOG.error("%s", error)
                stop.wait(STANDBY_S)
            except Exception:
                LOG.exception("notifying broke off and begins again")
                stop.wait(STANDBY_S)
    finally:
        bus.close()


@contextmanager
def in_background(config: Config, metrics: Metrics | None = None) -> Iterator[None]:
    """Notify from a thread while the block runs; without receivers there is no thread.

    Raises
    ------
    ConfigError
        At once, when a receiver is configured wrongly.
    """
    if not make_notifiers(config):
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(config, stop), kwargs={"metrics": metrics}, name="notify", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(JOIN_S)


def _told_after(known: Told | None, incident: Incident, cause: Cause, now_ns: int, history_n: int) -> Told:
    firing = incident.status not in OVER
    if known is None or cause is Cause.FIRST:
        started_ns = (
            incident.timeline.fault_at_ns or incident.timeline.verdict_at_ns or incident.observed_at_ns or now_ns
        )
        labels = known.labels if known is not None else labels_of(incident)
        rounds = known.rounds + 1 if known is not None else 1
        return Told(firing, culprits_of(incident), incident.severity, labels, started_ns, now_ns, history_n, rounds)
    return Told(
        firing,
        culprits_of(incident),
        incident.severity,
        known.labels,
        known.started_ns,
        now_ns,
        history_n,
        known.rounds,
    )


def _ended_ns(incident: Incident, now_ns: int) -> int:
    timeline = incident.timeline
    return timeline.recovered_at_ns or timeline.closed_at_ns or incident.observed_at_ns or now_ns
