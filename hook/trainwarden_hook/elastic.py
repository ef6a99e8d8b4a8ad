"""The bridge to ``torch.distributed.elastic``: the only file that touches its non-public names.

Used beyond the public surface: the four methods that ``SimpleElasticAgent`` leaves to its
subclasses (`_start_workers`, `_stop_workers`, `_monitor_workers`, `_shutdown`), and
`_get_fq_hostname`, which is replaced because a DNS look-up that times out stalls a restart.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.elastic.agent.server.api as agent_api
from torch.distributed.elastic.agent.server import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from trainwarden_hook.workers import Worker, Workers

__all__ = [
    "Agent",
    "CalledOff",
    "FreeRendezvous",
    "Interrupted",
    "OrderedRendezvous",
    "SignalException",
    "quiet_hostname",
]
POLL_S = 0.25
CONNECT_TIMEOUT_S = 5.0
STORE_TIMEOUT_S = 60.0
EXCHANGE_TIMEOUT_S = 15.0
WAITING_CHECK_S = 1.0
ROUND_POLL_S = 0.01


class CalledOff(Exception):
    """Another member of this world has gone on without orders."""


class Interrupted(Exception):
    """Something more important than the present world has come (an order, a stop)."""


Check = Callable[[], None]


class _Rendezvous(RendezvousHandler):
    """What both ways of meeting share: the workers' store and the generation.

    Rank 0's launcher serves a new store for every generation, so a worker never reads the
    addresses of an older one and no port is raced for.
    """

    def __init__(self, run_id: str, check: Check, local_addr: str) -> None:
        self._run_id = run_id
        self._check = check
        self._local_addr = local_addr
        self._worker_store: dist.TCPStore | None = None
        self._met: tuple[dist.Store, int, int] | None = None
        self.generation = 0
        self.members: list[str] = []

    @property
    def use_agent_store(self) -> bool:
        """Workers are clients of the launcher's store."""
        return True

    def get_backend(self) -> str:
        """Name shown in events."""
        return "c10d"

    def get_run_id(self) -> str:
        """The rendezvous id."""
        return self._run_id

    def is_closed(self) -> bool:
        """Never: whether to go on is the launcher's decision."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def shutdown(self) -> bool:
        """Drop the workers' store."""
        self._worker_store = None
        return True

    def announce(self, speaks: bool) -> None:
        """Say that the present generation is the newest, where others could form one without us."""

    def next_round(self, limit_s: float) -> RendezvousInfo:
        """Meet the same members again while their workers live on; a generation higher, with a new store for the workers.

        Raises
        ------
        TimeoutError
            A member did not come in ``limit_s``.
        """
        assert self._met is not None, "there was no rendezvous before"
        store, rank, world = self._met
        shelf = dist.PrefixStore(f"round/{self.generation + 1}", store)
        shelf.set(f"here/{rank}", "1")
        deadline = time.monotonic() + limit_s
        for other in range(world):
            while not shelf.check([f"here/{other}"]):
                self._check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"node {other} of {world} did not meet again in {limit_s:g} s")
                time.sleep(ROUND_POLL_S)
        self.generation += 1
        self.announce(rank == 0)
        info = self._publish(shelf, rank, world)
        self._met = (store, rank, world)
        return info

    def _publish(self, store: dist.Store, rank: int, world: int) -> RendezvousInfo:
        self._met = (store, rank, world)
        port = 0
        if rank == 0:
            self._worker_store = dist.TCPStore(
                self._local_addr,
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
            )
            port = self._worker_store.port
        # torchelastic has published a port under the plain keys already; ours must not be mistaken for it.
        shelf = dist.PrefixStore("workers", store)
        info = RendezvousStoreInfo.build(rank, shelf, self._local_addr, server_port=port or None)
        return RendezvousInfo(store, rank, world, info)


class OrderedRendezvous(_Rendezvous):
    """A world whose members are known beforehand: complete the moment the last one is there.

    Parameters
    ----------
    members
        Node names in rank order; ``node`` is one of them.
    join_timeout_s
        How long to wait for the others before `TimeoutError`.
    """

    def __init__(
        self,
        endpoint: tuple[str, int],
        run_id: str,
        members: list[str],
        node: str,
        generation: int,
        check: Check,
        local_addr: str,
        join_timeout_s: float,
    ) -> None:
        super().__init__(run_id, check, local_addr)
        self._endpoint = endpoint
        self._store: dist.Store | None = None
        self._looked_at = 0.0
        self.members = members
        self._node = node
        self._join_timeout_s = join_timeout_s
        self.generation = generation

    def next_rendezvous(self) -> RendezvousInfo:
        """Say "here", wait for all members, return the rank by position in the order."""
        deadline = time.monotonic() + self._join_timeout_s
        host, port = self._endpoint
        server = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_TIMEOUT_S))
        server.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        self._store = store = dist.PrefixStore(f"trainwarden/{self._run_id}", server)
        store.set(f"here/{self._node}", "1")
        for member in self.members:
            self._wait_for(store, member, deadline)
        return self._publish(store, self.members.index(self._node), len(self.members))

    def _wait_for(self, store: dist.Store, member: str, deadline: float) -> None:
        while True:
            self._check()
            try:
                store.wait([f"here/{member}"], timedelta(seconds=POLL_S))
                return
            except dist.DistNetworkError as error:
                raise ConnectionError(f"the rendezvous store is lost: {error}") from error
            except dist.DistStoreError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"node {member} did not come to the rendezvous {self._run_id} in {self._join_timeout_s:.0f} s"
                    ) from error

    def num_nodes_waiting(self) -> int:
        """Membership changes by order only; the monitor's call is where an order is noticed."""
        self._check()
        now = time.monotonic()
        if self._store is not None and now - self._looked_at >= WAITING_CHECK_S:
            self._looked_at = now
            if self._called_off():
                raise CalledOff
        return 0

    def _called_off(self) -> bool:
        try:
            return self._store is not None and bool(self._store.check(["called-off"]))
        except dist.DistError:
            # Without the store nothing can be learnt, and the workers do not need it: they go on.
            self._store = None
            return False

    def call_off(self) -> None:
        """Tell the other members that this world is over and the free rendezvous is the place to meet."""
        try:
            if self._store is not None:
                self._store.set("called-off", "1")
        except dist.DistError:
            self._store = None


class _InterruptibleBackend(RendezvousBackend):
    """Looks for an order at every poll of the join loop, which may last minutes."""

    def __init__(self, inner: RendezvousBackend, check: Check) -> None:
        self._inner = inner
        self._check = check

    @property
    def name(self) -> str:
        return self._inner.name

    def get_state(self) -> tuple[bytes, Any] | None:
        self._look()
        return self._inner.get_state()

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        self._look()
        return self._inner.set_state(state, token)

    def _look(self) -> None:
        # The keep-alive timer comes here too, in its own thread: it must not be broken.
        if threading.current_thread() is threading.main_thread():
            self._check()


class FreeRendezvous(_Rendezvous):
    """torchelastic's own dynamic rendezvous (min:max), for starting and for life without a control plane."""

    def __init__(self, parameters: RendezvousParameters, check: Check, node: str, known_generation: int) -> None:
        local_addr = parameters.local_addr or "127.0.0.1"
        super().__init__(parameters.run_id, check, local_addr)
        backend, store = create_backend(parameters)
        self._newest = Newest(store, parameters.run_id)
        self._inner = create_handler(store, _InterruptibleBackend(backend, check), parameters)
        self._node = node
        self._looked_at = 0.0
        self.generation = known_generation

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet whoever comes; agree on a generation above every one that any member knows."""
        met = self._inner.next_rendezvous()
        # All who met are here now. One that has left meanwhile must not hold the others for the store's own minute: they
        # would come back one by one, each into the round that the next one has just given up.
        met.store.set_timeout(timedelta(seconds=EXCHANGE_TIMEOUT_S))
        met.store.set(f"known/{met.rank}", json.dumps([self.generation, self._node]))
        known = [json.loads(met.store.get(f"known/{rank}")) for rank in range(met.world_size)]
        if met.rank == 0:
            met.store.set("elsewhere", str(self._newest.generation()))
        elsewhere = int(met.store.get("elsewhere"))
        self.generation = max(elsewhere, *(generation for generation, _ in known)) + 1
        self.members = [node for _, node in known]
        self._newest.announce(self.generation, met.rank == 0)
        return self._publish(met.store, met.rank, met.world_size)

    def announce(self, speaks: bool) -> None:
        """See `_Rendezvous`."""
        self._newest.announce(self.generation, speaks)

    def num_nodes_waiting(self) -> int:
        """Nodes that ask to join; looked up at most once a second.

        Raises
        ------
        CalledOff
            A newer world of this job was formed without this node.
        """
        self._check()
        now = time.monotonic()
        if now - self._looked_at < WAITING_CHECK_S:
            return 0
        self._looked_at = now
        if self._newest.generation() > self.generation:
            raise CalledOff
        try:
            return int(self._inner.num_nodes_waiting())
        except RendezvousConnectionError:
            # Nobody can ask to join through a store that is gone; the workers do not need it and go on.
            return 0


class Newest:
    """The newest world of a job, by generation, where every launcher can read it.

    A node whose keep-alives are late (a machine that is overloaded, a pause) is taken out of the rendezvous while its workers
    run; the others may then form a world of their own, and so may the rest of it: two worlds would train one job. Who finds a
    newer one than its own leaves it and joins.
    """

    def __init__(self, store: dist.Store, run_id: str) -> None:
        self._store: dist.Store | None = store
        self._key = f"trainwarden/{run_id}/newest"

    def generation(self) -> int:
        """0 while there was none; the same when the store is gone, for then nobody can form another."""
        try:
            if self._store is not None and self._store.check([self._key]):
                return int(self._store.get(self._key))
        except dist.DistError:
            self._store = None
        return 0

    def announce(self, generation: int, speaks: bool) -> None:
        """Say that this is the newest; one member speaks for all."""
        if speaks and self._store is not None:
            self._store.set(self._key, str(generation))


class Agent(SimpleElasticAgent):
    """One attempt at running the workers, on our zygote.

    Parameters
    ----------
    launch
        Starts one worker: ``launch(worker, environment)``.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rendezvous: _Rendezvous,
        workers: Workers,
        launch: Callable[[Worker, dict[str, str]], None],
        on_world: Callable[[int, list[str]], None],
        exit_barrier_s: float,
        regroup: Callable[[Agent, WorkerGroup, dict[int, int]], bool] = lambda agent, group, codes: False,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=exit_barrier_s, shutdown_timeout=1)
        self._meeting = rendezvous
        self._workers = workers
        self._launch = launch
        self._on_world = on_world
        self._regroup = regroup

    def meet_again(self, group: WorkerGroup, limit_s: float) -> None:
        """A new round with the same members; workers that have ended are started anew in it."""
        place: Any = self._meeting.next_round(limit_s).bootstrap_store_info
        group.master_addr, group.master_port = place.master_addr, place.master_port
        self._on_world(self._meeting.generation, self._meeting.members)
        for slot in group.workers:
            worker = next((w for w in self._workers.current if w.local_rank == slot.local_rank and w.alive), None)
            if worker is None:
                self._workers.forget_ended(slot.local_rank)
                fresh = Worker(slot.global_rank, slot.local_rank, self._meeting.generation)
                self._launch(fresh, worker_environment(group, slot, self._meeting))
            else:
                worker.generation = self._meeting.generation

    def environment_of(self, group: WorkerGroup, rank: int) -> dict[str, str]:
        """What a worker of the present round finds in its environment."""
        slot = next(slot for slot in group.workers if slot.global_rank == rank)
        return worker_environment(group, slot, self._meeting)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._on_world(self._meeting.generation, self._meeting.members)
        pids = {}
        for slot in worker_group.workers:
            worker = Worker(slot.global_rank, slot.local_rank, self._meeting.generation)
            self._launch(worker, worker_environment(worker_group, slot, self._meeting))
            pids[slot.local_rank] = worker.pid
        return pids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._workers.stop()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._workers.stop()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = [worker for worker in self._workers.current if worker.exit_code is not None]
        failed = {
            worker.rank: ProcessFailure(worker.local_rank, worker.pid, worker.exit_code or 0, "")
            for worker in ended
            if worker.exit_code != 0
        }
        if self._regroup(self, worker_group, {rank: failure.exitcode for rank, failure in failed.items()}):
            return RunResult(state=WorkerState.HEALTHY)
        if failed:
            return RunResult(state=WorkerState.FAILED, failures=failed)
        if ended and len(ended) == len(self._workers.current):
            return RunResult(state=WorkerState.SUCCEEDED, return_values={worker.rank: None for worker in ended})
        return RunResult(state=WorkerState.HEALTHY)


def worker_environment(group: WorkerGroup, slot: agent_api.Worker, meeting: _Rendezvous) -> dict[str, str]:
    """The variables that torchrun sets, with the generation as restart count."""
    spec = group.spec
    return {
        "RANK": str(slot.global_rank),
        "LOCAL_RANK": str(slot.local_rank),
        "WORLD_SIZE": str(slot.world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_RANK": str(slot.role_rank),
        "ROLE_WORLD_SIZE": str(slot.role_world_size),
        "ROLE_NAME": spec.role,
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(meeting.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": meeting.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "",
    }


def quiet_hostname(node: str) -> None:
    """Name events by the node instead of by a reverse DNS look-up."""
    agent_api._get_fq_hostname = lambda: node
