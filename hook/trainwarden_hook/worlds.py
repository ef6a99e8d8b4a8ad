"""The launcher's main thread: one world after the other, by order or alone."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters

from trainwarden_hook.addresses import first_line
from trainwarden_hook.elastic import Agent, CalledOff, FreeRendezvous, Interrupted, OrderedRendezvous
from trainwarden_hook.giving_up import GivenUp, Judge, Notice
from trainwarden_hook.lines import connect
from trainwarden_hook.peers import Peer
from trainwarden_hook.regroup import REGROUP_LIMIT_S
from trainwarden_hook.supervisor import Order, Supervisor

log = logging.getLogger("trainwarden.launcher")
WARDEN_RETRY_S = 0.5
WARDEN_LOST_WAIT_S = 5.0
EXIT_WORKERS_FAILED = 1


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the warden tells a launcher that reports to it."""

    generation: int
    order: Order | None
    resume: bool


class WardenLink:
    """Keeps a connection to the warden, over the warden's restarts."""

    def __init__(self, supervisor: Supervisor, path: str) -> None:
        self._supervisor = supervisor
        self._path = path
        self._peer: Peer | None = None
        self.welcome: Welcome | None = None
        self._welcomed = threading.Event()
        threading.Thread(target=self._keep, name="trainwarden-warden", daemon=True).start()
        threading.Thread(target=self._report, name="trainwarden-report", daemon=True).start()

    @property
    def up(self) -> bool:
        """Whether the warden is there now."""
        return self._peer is not None and not self._peer.gone

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        """The first welcome; ``None`` if the warden does not speak in time."""
        self._welcomed.wait(timeout_s)
        return self.welcome

    def _keep(self) -> None:
        while True:
            try:
                link = connect(self._path)
            except OSError:
                time.sleep(WARDEN_RETRY_S)
                continue
            peer = Peer(link, self._handle)
            peer.tell({"hello": self._supervisor.describe()})
            self._peer = peer
            peer.run()
            log.info("the warden is gone; the workers go on")
            time.sleep(WARDEN_RETRY_S)

    def _handle(self, peer: Peer, message: dict[str, object]) -> dict[str, object] | None:
        if "welcome" in message:
            self._take_welcome(message["welcome"])
            return None
        verb, args = message.get("verb"), message.get("args")
        # In a thread of its own: a save waits seconds and a kill must not wait behind it.
        threading.Thread(
            target=lambda: peer.answer(message, self._supervisor.command(str(verb), dict(args or {}))),  # type: ignore[call-overload]
            name="trainwarden-command",
            daemon=True,
        ).start()
        return None

    def _take_welcome(self, body: object) -> None:
        if not isinstance(body, dict) or self.welcome is not None:
            return
        order = Order.parse(body["order"]) if body.get("order") else None
        self.welcome = Welcome(int(body.get("generation", 0)), order, bool(body.get("resume")))
        self._welcomed.set()

    def _report(self) -> None:
        while True:
            self._supervisor.on_change.wait()
            self._supervisor.on_change.clear()
            if self._peer is not None:
                self._peer.tell({"state": self._supervisor.describe()})


class Runner:
    """Runs worlds until the job is finished, stopped, or has failed too often."""

    def __init__(self, supervisor: Supervisor, run_dir: str) -> None:
        self._supervisor = supervisor
        self._options = supervisor.options
        self._restarts_left = self._options.max_restarts
        self._free: FreeRendezvous | None = None
        self._ordered: OrderedRendezvous | None = None
        self._own_store: dist.TCPStore | None = None
        self._endpoint = self._options.endpoint
        self._judge = Judge(self._options.no_restart_codes, self._options.no_progress_limit)
        self._notice = Notice(self._options.rdzv_id)
        self._warden: WardenLink | None = None
        if self._options.warden_path:
            self._warden = WardenLink(supervisor, self._options.warden_path)

    def run(self) -> int:
        """The exit code of the launcher."""
        try:
            return self._run()
        except GivenUp as end:
            log.error("the job is not restarted: %s", end)
            self._notice.tell(self._endpoint, str(end))
            self._supervisor.workers.stop()
            self._supervisor.enter("failed")
            return EXIT_WORKERS_FAILED

    def _run(self) -> int:
        if self._options.hosts_store:
            self._own_store = host_store(*self._endpoint)
        if self._options.standalone:
            self._own_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._endpoint = ("127.0.0.1", self._own_store.port)
        order = self._first_order()
        self._notice.take_down(self._endpoint)
        while not self._supervisor.shared.stopping:
            outcome = self._run_world(order)
            if outcome == "finished" and not self._supervisor.interrupted():
                self._supervisor.enter("finished")
                return 0
            order = self._next_order(outcome)
            if order is None and self._restarts_left < 0:
                self._supervisor.enter("failed")
                return EXIT_WORKERS_FAILED
        self._supervisor.workers.stop()
        self._supervisor.enter("stopped")
        return 0

    def _first_order(self) -> Order | None:
        """At the very first start a launcher meets the others freely; later it waits to be told."""
        if self._warden is None:
            return self._static_order() or self._gather()
        welcome = self._warden.wait_welcome(WARDEN_LOST_WAIT_S)
        if welcome is None:
            return self._gather()
        self._supervisor.enter("starting", generation=welcome.generation)
        if welcome.order is not None:
            self._supervisor.enter("starting", generation=welcome.order.generation - 1)
            return welcome.order
        if welcome.resume:
            return self._supervisor.take_order(self._options.order_timeout_s)
        return self._gather()

    def _static_order(self) -> Order | None:
        """Nodes that know each other by number need not ask who is there."""
        options = self._options
        if options.node_rank < 0:
            return None
        members = [f"node{number}" for number in range(options.max_nodes)]
        return Order(1, members, f"{options.rdzv_id}.static", None, "static rendezvous")

    def _gather(self) -> Order | None:
        """Wait until as many launchers as MAX have reported once, so that the first world is whole."""
        if self._options.max_nodes == 1:
            return None
        deadline = time.monotonic() + self._options.start_wait_s
        while time.monotonic() < deadline:
            try:
                host, port = self._endpoint
                store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
                return self._count_arrivals(store, deadline)
            except dist.DistError as error:
                log.info("the rendezvous store at %s:%d does not answer yet: %s", *self._endpoint, str(error)[:80])
                if self._supervisor.interrupted():
                    return self._supervisor.take_order(0)
        return None

    def _count_arrivals(self, store: dist.TCPStore, deadline: float) -> Order | None:
        key = f"trainwarden/{self._options.rdzv_id}/arrived"
        arrived = store.add(key, 1)
        while arrived < self._options.max_nodes and time.monotonic() < deadline:
            order = self._supervisor.take_order(0.1)
            if order is not None or self._supervisor.shared.stopping:
                return order
            arrived = store.add(key, 0)
        return None

    def _next_order(self, outcome: str) -> Order | None:
        supervisor = self._supervisor
        if outcome != "interrupted":
            supervisor.enter("failed")
        order = supervisor.take_order(self._order_wait_s(outcome))
        waits = self._options.spare and outcome == "lonely"
        if order is None and not supervisor.shared.stopping and not waits:
            self._restarts_left -= 1
            log.info("no order: going on alone (%d restarts left)", max(self._restarts_left, 0))
        return order

    def _order_wait_s(self, outcome: str) -> float:
        if self._warden is None or outcome == "called-off":
            return 0.0
        return self._options.order_timeout_s if self._warden.up else WARDEN_LOST_WAIT_S

    def _run_world(self, order: Order | None) -> str:
        """One world: ``finished``, ``failed``, ``lonely`` (nobody came), ``called-off`` or ``interrupted``."""
        try:
            meeting = self._meet_ordered(order) if order else self._meet_freely()
            agent = self._agent(meeting, order)
            result = agent.run()
            if result.state == WorkerState.SUCCEEDED:
                return "finished"
            self._judge_failure({rank: failure.exitcode for rank, failure in result.failures.items()})
            return "failed"
        except Interrupted:
            return "interrupted"
        except CalledOff:
            log.info("another node goes on without orders; joining it")
            return "called-off"
        except (TimeoutError, ConnectionError, RendezvousError, dist.DistError) as error:
            log.warning("the world did not come together: %s", first_line(error))
            return "lonely"
        finally:
            self._supervisor.workers.stop()

    def _meet_ordered(self, order: Order) -> OrderedRendezvous:
        options = self._options
        self._free = None
        self._supervisor.max_step = order.max_step
        self._supervisor.enter("starting", members=order.members)
        self._ordered = OrderedRendezvous(
            self._endpoint,
            order.rendezvous_id,
            order.members,
            options.node,
            order.generation,
            self._check,
            options.local_addr,
            options.join_timeout_s,
        )
        return self._ordered

    def _meet_freely(self) -> FreeRendezvous:
        options = self._options
        if self._ordered is not None:
            self._ordered.call_off()
            self._ordered = None
        self._supervisor.enter("starting", members=[])
        generation = self._supervisor.shared.generation
        if self._free is None:
            host, port = self._endpoint
            self._free = FreeRendezvous(
                RendezvousParameters(
                    "c10d",
                    f"{host}:{port}",
                    f"{options.rdzv_id}.free",
                    options.min_nodes,
                    options.max_nodes,
                    options.local_addr,
                    **options.rdzv_conf,
                ),
                self._check,
                options.node,
                generation,
            )
        self._free.generation = max(generation, self._free.generation)
        return self._free

    def _agent(self, meeting: OrderedRendezvous | FreeRendezvous, order: Order | None) -> Agent:
        options = self._options
        spec = WorkerSpec(
            role=options.role,
            local_world_size=options.workers_per_node,
            rdzv_handler=meeting,
            entrypoint=os.path.basename(options.script[0]),
            max_restarts=0,
            monitor_interval=options.monitor_interval_s,
            local_addr=options.local_addr,
        )
        return Agent(
            spec, meeting, self._supervisor.workers, self._supervisor.launch, self._on_world, options.exit_barrier_s,
            self._regroup,
        )  # fmt: skip

    def _regroup(self, agent: Agent, group: WorkerGroup, codes: dict[int, int]) -> bool:
        """Whether the world was put together again around the workers that live."""
        supervisor = self._supervisor
        trainers, workers = supervisor.trainers, supervisor.workers
        if not self._options.in_process or not (codes or trainers.asking()):
            return False
        try:
            if self._restarts_left <= 0:
                raise TimeoutError("no restart is left")
            self._judge_failure(codes)
            self._restarts_left -= 1
            if not trainers.wait_asking(workers.alive_ranks, REGROUP_LIMIT_S):
                raise TimeoutError(f"not every live rank of this node has asked in {REGROUP_LIMIT_S:g} s")
            agent.meet_again(group, REGROUP_LIMIT_S)
        except (TimeoutError, dist.DistError) as error:
            why = first_line(error)
            log.warning("the world is not put together around the survivors: %s", why)
            for rank in trainers.asking():
                trainers.answer(rank, {"why": why})
            return False
        own = supervisor.own_environment(supervisor.shared.generation)
        for rank in trainers.asking():
            trainers.answer(rank, {"environment": {**agent.environment_of(group, rank), **own}})
        return True

    def _judge_failure(self, codes: dict[int, int]) -> None:
        if why := self._judge.failed(codes, self._supervisor.reached()):
            raise GivenUp(why)

    def _on_world(self, generation: int, members: list[str]) -> None:
        self._supervisor.enter("running", generation=generation, members=members)

    def _check(self) -> None:
        if self._supervisor.interrupted():
            raise Interrupted
        if self._supervisor.shared.state == "starting":
            self._notice.look(self._endpoint)


def host_store(host: str, port: int) -> dist.TCPStore | None:
    """The rendezvous store in this process, unless somebody serves it already; it ends with this launcher."""
    try:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    except (RuntimeError, dist.DistError) as error:
        log.info("the store at %s:%d is somebody else's: %s", host, port, first_line(error)[:100])
        return None
