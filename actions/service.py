"""The action service: reads incidents, decides, acts, writes everything down. One leads, others stand by."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from actions import api
from actions.backends.base import BACKENDS, Backend, Order
from actions.desk import Desk, Standing
from actions.executor import Executor, ExecutorSettings
from actions.fences import PendingFences
from actions.http import HttpServer, Router, load_token
from actions.journal import Journal
from actions.lease import Holder
from actions.ledger import LeaseLost, Ledger, LedgerError, Row
from actions.planner import PlannerSettings
from actions.rails.base import RAILS, Rail
from actions.rebalancing import LOOK_S, Tender
from actions.watch import Watch
from trainwarden.bus import Bus, Message, connect, decode_or_dead
from trainwarden.bus.dead import bury
from trainwarden.clock import NS_PER_S, Clock, SystemClock
from trainwarden.config import Config
from trainwarden.errors import TrainwardenError, UsageError
from trainwarden.records import ActionStatus, Incident, Mode, Plan, PolicyChange, TopologyEvent
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import ACTIONS, DEAD, INCIDENTS, POLICY, TOPOLOGY

LOG = logging.getLogger("trainwarden.actions")

POLL_S = 0.1
WATCH_S = 0.5
HOUSEKEEPING_S = 0.5
STANDBY_S = 0.3
STOP_S = 5.0
LEASE_S = 3.0
CAUGHT_UP_POLL_S = 1.0
Mount = Callable[[Router, "ActionService"], None]


@dataclass(frozen=True)
class Parts:
    """What the service is made of; tests put their own in."""

    config: Config
    bus: Bus
    backend: Backend
    clock: Clock
    metrics: Metrics


class ActionService:
    """One instance. `start` returns at once; `stop` gives the lease back.

    Parameters
    ----------
    mount
        Adds the status page to the router.
    catch_up_s
        A poll that stays empty for so long means that every incident of the past has been read.
    """

    def __init__(
        self,
        parts: Parts,
        mount: Mount | None = None,
        holder_name: str = "",
        lease_s: float = LEASE_S,
        catch_up_s: float = CAUGHT_UP_POLL_S,
    ) -> None:
        config = parts.config
        self.config, self.clock, self.metrics = config, parts.clock, parts.metrics
        self.backend = parts.backend
        self.ledger = Ledger(config.path(config.actions.ledger, "ledger.sqlite"), parts.clock, lease_s)
        self._publisher = parts.bus.publisher(self._lost)
        self._subscriber = parts.bus.subscriber([INCIDENTS.name, POLICY.name, TOPOLOGY.name])
        self.journal = Journal(self.ledger, self._publisher, parts.metrics, config.cluster, parts.clock)
        self.watch = Watch(parts.backend, parts.clock)
        self.fences = PendingFences(self.journal, parts.backend)
        self.standing = Standing(config.path(config.actions.kill_switch, "KILL_SWITCH"))
        rails = make_rails(config)
        self.desk = Desk(
            config.policy, PlannerSettings(ttl_s=config.actions.plan_ttl_s), rails, self.journal, parts.backend, self.watch,
            self.standing, parts.metrics, parts.clock, self._launch, (config.actions.min_nodes, config.actions.node_unit),
        )  # fmt: skip
        settings = ExecutorSettings(config.actions.min_nodes, config.actions.node_unit, config.actions.verify_s)
        self._executor = Executor(
            self.journal, parts.backend, self.watch, self.fences, rails, parts.clock, settings, self.desk.world,
            self.desk.newer_trouble,
        )  # fmt: skip
        self._tender = Tender(
            self.journal, parts.backend, self.watch, parts.clock, lambda plan: self.desk.world(plan).kill_switch
        )
        self._holder = Holder.myself(holder_name)
        self._lease_s = lease_s
        self._catch_up_s = catch_up_s
        self.leading = False
        self.caught_up = False
        self.state = "starting"
        self._stop = threading.Event()
        self._stopped = False
        self._running: set[str] = set()
        self._running_lock = threading.Lock()
        self._pending: dict[str, tuple[Incident, Message]] = {}
        self._threads: list[threading.Thread] = []
        self._plan_threads: list[threading.Thread] = []
        self.server = self._make_server(mount)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve, watch, try to lead."""
        self.server.start()
        for name, loop in (
            ("watch", self._watch_loop),
            ("lease", self._lease_loop),
            ("main", self._main_loop),
            ("outbox", self._outbox_loop),
            ("shares", self._shares_loop),
        ):
            thread = threading.Thread(target=self._guarded, args=(name, loop), name=f"actions-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until `stop` was asked for; False when the time ran out first."""
        return self._stop.wait(timeout_s)

    def ask_stop(self) -> None:
        """Let `wait` return."""
        self._stop.set()

    def stop(self) -> None:
        """End the threads, give the lease back, close what was opened. Plans under way are continued by the next leader."""
        if self._stopped:
            return
        self._stopped = True
        self._stop.set()
        for thread in self._threads:
            thread.join(STOP_S)
        self.server.close()
        try:
            if self.leading:
                self.ledger.release_lease()
        except LedgerError as error:
            LOG.warning("the lease is not given back and runs out by itself: %s", error)
        for thread in self._plan_threads:
            thread.join(STOP_S)
        self._publisher.close()
        self._subscriber.close()
        self.backend.close()
        self.ledger.close()

    # --- loops -------------------------------------------------------------------------------------------------------

    def _guarded(self, name: str, loop: Callable[[], None]) -> None:
        """A loop outlives its faults: they are logged and it starts over."""
        while not self._stop.is_set():
            try:
                loop()
            except TrainwardenError as error:
                LOG.error("%s: %s", name, error)
            except Exception:
                LOG.exception("%s loop failed, starting it again", name)
            self._stop.wait(STANDBY_S)

    def _watch_loop(self) -> None:
        while not self._stop.is_set():
            self.watch.refresh()
            self.metrics.set("tw_up", 1)
            self._stop.wait(WATCH_S)

    def _lease_loop(self) -> None:
        while not self._stop.is_set():
            if self.leading:
                self._keep_lease()
                self._stop.wait(self._lease_s / 4)
            else:
                self._try_to_lead()
                self._stop.wait(0 if self.leading else STANDBY_S)

    def _keep_lease(self) -> None:
        try:
            self.ledger.renew_lease()
        except LeaseLost as error:
            self.leading, self.state = False, f"standby: {error}"
            LOG.error("no longer the leader: %s", error)
        except LedgerError as error:
            self.state = f"leading, but {error}"
            LOG.error("%s", error)
        else:
            self.state = "leading"

    def _try_to_lead(self) -> None:
        reason = self.ledger.take_lease(self._holder)
        if reason:
            if not self.state.startswith("standby"):
                LOG.warning("standing by: %s", reason)
            self.state = f"standby: {reason}"
            return
        LOG.info("leading with fence %d", self.ledger.fence)
        self.state = "leading"
        self._take_over()
        self.leading = True

    def _take_over(self) -> None:
        """Tell the wardens who leads now, so that a paused predecessor is refused, then look at what it left."""
        order = Order(f"lead.{self.ledger.fence}.{self._holder.pid}", "", self.ledger.fence, "a new leader")
        kept = self._announce(order)
        higher = {node: fence for node, fence in kept.items() if fence > self.ledger.fence}
        if higher:
            node, fence = max(higher.items(), key=lambda item: item[1])
            LOG.error(
                "warden %s keeps fence %d, this ledger is at %d: another service acts or the ledger was lost; raise the fence to go on",
                node, fence, self.ledger.fence,
            )  # fmt: skip
        self.journal.resend()
        self.fences.load()

    def _announce(self, order: Order) -> dict[str, int]:
        """Wardens that are slow to answer must not cost the lease that they are told of: it is renewed meanwhile."""

        def tell() -> dict[str, int]:
            self.watch.refresh()
            return self.backend.announce(order)

        with ThreadPoolExecutor(1, "actions-announce") as pool:
            telling = pool.submit(tell)
            while not wait([telling], self._lease_s / 4).done:
                self.ledger.renew_lease()
            return telling.result()

    def _main_loop(self) -> None:
        housekeeping_ns = 0
        while not self._stop.is_set():
            messages = self._subscriber.poll(POLL_S if self.caught_up else self._catch_up_s)
            for message in messages:
                self._take(message)
            self.caught_up = self.caught_up or not messages
            if not (self.leading and self.caught_up):
                continue
            self._decide_pending()
            if self.clock.monotonic_ns() >= housekeeping_ns:
                self._housekeep()
                housekeeping_ns = self.clock.monotonic_ns() + int(HOUSEKEEPING_S * NS_PER_S)

    def _outbox_loop(self) -> None:
        while not self._stop.wait(HOUSEKEEPING_S):
            if self.leading:
                self.journal.settle(5.0)
                self.fences.retry()

    def _shares_loop(self) -> None:
        while not self._stop.wait(LOOK_S):
            if self.leading and self.caught_up:
                self._tender.tend()

    # --- incidents ---------------------------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        record = decode_or_dead(message, self._publisher, self.config.cluster, self.clock)
        if isinstance(record, Incident) and message.topic == INCIDENTS.name:
            self._take_incident(record, message)
        elif isinstance(record, PolicyChange) and message.topic == POLICY.name:
            self._take_policy(record, message)
        elif isinstance(record, TopologyEvent) and message.topic == TOPOLOGY.name:
            self._take_topology(record, message)
        elif record is None:
            self.metrics.count("tw_dead_letters_total", topic=message.topic)
        else:
            self._bury(message, f"a {type(record).__name__} on {message.topic}")

    def _take_incident(self, incident: Incident, message: Message) -> None:
        if not incident.incident_id or incident.attempt < 0:
            self._bury(
                message,
                f"incident {incident.incident_id!r}, attempt {incident.attempt}: it must have a name and an attempt from 0 on",
            )
        elif incident.job and self.desk.learn(incident):  # of no job: on-call is told, nothing can be done to a job
            self._pending[incident.incident_id] = (incident, message)

    def _take_topology(self, event: TopologyEvent, message: Message) -> None:
        kind, _, name = event.entity.partition(":")
        try:
            self.backend.learn((name,) if kind == "node" and not event.removed else ())
        except UsageError as error:
            self._bury(message, str(error))

    def _take_policy(self, change: PolicyChange, message: Message) -> None:
        if change.key == "mode":
            try:
                self.standing.record_mode = Mode(change.value)
            except ValueError:
                self._bury(message, f"policy mode {change.value!r}: expected one of {', '.join(Mode)}")
                return
        elif change.key == "kill_switch":
            on = change.value not in ("", "off", "0", "false")
            self.standing.record_kill_switch = f"{change.author}: {change.comment or change.value}" if on else ""
        else:
            self._bury(message, f"policy {change.key!r}: expected mode or kill_switch")
            return
        self.standing.expires_at_ns[change.key] = change.expires_at_ns

    def _decide_pending(self) -> None:
        pending, self._pending = self._pending, {}
        for incident, message in pending.values():
            try:
                self.desk.consider(incident)
            except UsageError as error:
                self._bury(message, str(error))
            except LeaseLost as error:
                LOG.error("not decided: %s", error)
                self.leading = False
                self._pending.setdefault(incident.incident_id, (incident, message))
            except LedgerError as error:
                LOG.error("incident %s: %s", incident.incident_id, error)
                self._tell_held(incident, error)
                self._pending.setdefault(incident.incident_id, (incident, message))
                self._stop.wait(STANDBY_S)
            except TrainwardenError as error:
                LOG.error("incident %s is decided later: %s", incident.incident_id, error)
                self._pending.setdefault(incident.incident_id, (incident, message))
            except Exception as error:
                LOG.exception("incident %s cannot be decided", incident.incident_id)
                self._bury(message, f"the decision failed on it: {error!r}")

    def _tell_held(self, incident: Incident, error: LedgerError) -> None:
        row = Row(
            "",
            incident.incident_id,
            incident.job,
            ActionStatus.WAITING,
            rail="ledger",
            reason=str(error),
            detail={"page": "1"},
        )
        self.journal.tell(row)

    def _housekeep(self) -> None:
        for incident in self.desk.due():
            self.desk.consider(incident)
        self.desk.expire_waiting()
        for stored in self.ledger.open_plans():
            if any(row.status is ActionStatus.STARTED for row in self.ledger.rows_of(stored.plan.plan_id)):
                self._launch(stored.plan)

    def _bury(self, message: Message, reason: str) -> None:
        LOG.warning("dead letter from %s: %s", message.place, reason)
        self.metrics.count("tw_dead_letters_total", topic=message.topic)
        bury(message, reason, self._publisher, self.config.cluster, self.clock)

    # --- plans -------------------------------------------------------------------------------------------------------

    def _launch(self, plan: Plan) -> None:
        """Carry `plan` out in a thread of its own; one that is already being carried out is left alone."""
        with self._running_lock:
            if plan.plan_id in self._running:
                return
            self._running.add(plan.plan_id)
            thread = threading.Thread(target=self._carry_out, args=(plan,), name=f"plan-{plan.plan_id}", daemon=True)
            self._plan_threads = [*(t for t in self._plan_threads if t.is_alive()), thread]
            thread.start()

    def _carry_out(self, plan: Plan) -> None:
        try:
            self._executor.run(plan)
        finally:
            with self._running_lock:
                self._running.discard(plan.plan_id)

    def _lost(self, topic: str, key: bytes, value: bytes, reason: str) -> None:
        del value
        LOG.warning("a record for %s (%s) was not delivered: %s", topic, key.decode(errors="replace"), reason)

    def _make_server(self, mount: Mount | None) -> HttpServer:
        actions = self.config.actions
        token = load_token(self.config.path(actions.token_file, "operator.token"))
        router = Router(token, (actions.listen.rpartition(":")[0],))
        api.mount(router, self)
        if mount is not None:
            mount(router, self)
        return HttpServer(actions.listen, router)


def make_rails(config: Config) -> list[Rail]:
    """All rails that are switched on, in their order, with the operator's settings."""
    rails = []
    for name, rail in RAILS.all().items():
        if config.enabled("rails", name):
            settings: Any = config.plugin("rails", name, rail.Settings)
            rails.append(rail(settings))
    return sorted(rails, key=lambda rail: (rail.order, rail.name))


def make_parts(config: Config, clock: Clock, metrics: Metrics | None = None) -> Parts:
    """Bus and backend as configured."""
    backend = BACKENDS.get(config.actions.backend)
    settings: Any = config.plugin("backends", config.actions.backend, backend.Settings)
    bus = connect(config.kafka)
    bus.wait_ready(30.0)
    bus.ensure_topics([INCIDENTS, POLICY, TOPOLOGY, ACTIONS, DEAD])
    return Parts(config, bus, backend(settings, clock), clock, metrics or Metrics("actions"))


def run(config: Config, mount: Mount | None = None, metrics: Metrics | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises
    ------
    TrainwardenError
        When the ledger, the address, the secret or the broker is not to be had; the sentence says what to do.
    """
    parts = make_parts(config, SystemClock(), metrics)
    service = ActionService(parts, mount)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.ask_stop())
    service.start()
    try:
        service.wait()
    finally:
        service.stop()
        parts.bus.close()
