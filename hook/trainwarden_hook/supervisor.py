"""What a launcher does: run the workers, report at once, follow orders, go on alone without them."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from trainwarden_hook import outputs, sharing
from trainwarden_hook.depot import open_depot
from trainwarden_hook.options import Options
from trainwarden_hook.regroup import REGROUP_LIMIT_S, SWITCH
from trainwarden_hook.trainers import Trainers, commit_failure
from trainwarden_hook.wire import Sender
from trainwarden_hook.workers import Worker, Workers
from trainwarden_hook.zygote import Request, Zygote

log = logging.getLogger("trainwarden.launcher")
WORLD_VERBS = ("generation", "members", "rendezvous_id")


class BadArgument(Exception):
    """An argument of a command that cannot be meant; the text names it."""


@dataclass(frozen=True, slots=True)
class Order:
    """A world that the control plane wants."""

    generation: int
    members: list[str]
    rendezvous_id: str
    max_step: int | None = None
    reason: str = ""

    @classmethod
    def parse(cls, args: dict[str, Any]) -> Order:
        """From the arguments of a ``world`` command.

        Raises
        ------
        BadArgument
            Names the argument that is missing or of the wrong kind.
        """
        generation, members, rendezvous_id = (args.get(key) for key in WORLD_VERBS)
        if not isinstance(generation, int) or isinstance(generation, bool):
            raise BadArgument(f"args.generation is {generation!r}, expected a whole number")
        if not isinstance(members, list) or not members or not all(isinstance(name, str) for name in members):
            raise BadArgument(f"args.members is {members!r}, expected a list of node names")
        if len(set(members)) != len(members):
            raise BadArgument(f"args.members names a node twice: {members}")
        if not isinstance(rendezvous_id, str) or not rendezvous_id:
            raise BadArgument(f"args.rendezvous_id is {rendezvous_id!r}, expected a text")
        for key in ("min", "max"):
            if args.get(key, len(members)) != len(members):
                raise BadArgument(f"args.{key} is {args[key]!r}, expected the number of members, {len(members)}")
        limit = args.get("max_step")
        if limit is not None and not isinstance(limit, int):
            raise BadArgument(f"args.max_step is {limit!r}, expected a whole number")
        return cls(generation, list(members), rendezvous_id, limit, str(args.get("reason", "")))


@dataclass
class Shared:
    """State that the main thread and the command threads share, under ``changed``."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    state: str = "starting"
    generation: int = 0
    members: list[str] = field(default_factory=list)
    order: Order | None = None
    stopping: bool = False


class Supervisor:
    """Thread-safe heart of a launcher; the main thread runs worlds, other threads bring commands."""

    def __init__(self, options: Options, zygote: Zygote, run_dir: str) -> None:
        self.options = options
        self.shared = Shared()
        self.sender = Sender(options.socket_path or None)
        self.workers = Workers(zygote, self._on_exit, options.grace_s)
        self.mailbox_path = os.path.join(run_dir, "mailbox.sock")
        self.trainers = Trainers(self.mailbox_path)
        self.depot = open_depot(options.local_addr, options.job, options.node)
        self.max_step: int | None = None
        self.on_change = threading.Event()

    # -- the workers

    def reached(self) -> int:
        """Highest step that a local rank was ever heard to have begun, -1 before the first."""
        return self.trainers.reached

    def launch(self, worker: Worker, environment: dict[str, str]) -> None:
        """Start one worker of the present world."""
        out, err = outputs.paths_of(self.options, worker)
        if self.options.virtual_local_rank:
            environment = outputs.virtual(environment, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        env = {**environment, **self.own_environment(worker.generation)}
        request = Request(0, self.options.script, env, out, err, self.options.fresh_interpreter)
        self.workers.start(worker, request)
        log.info("rank %d of generation %d is process %d", worker.rank, worker.generation, worker.pid)
        self.on_change.set()

    def own_environment(self, generation: int) -> dict[str, str]:
        """What is added to torchrun's variables."""
        options = self.options
        return {
            "TRAINWARDEN_JOB": options.job,
            "TRAINWARDEN_NODE": options.node,
            "TRAINWARDEN_GENERATION": str(generation),
            "TRAINWARDEN_SOCKET": options.socket_path,
            "TRAINWARDEN_MAILBOX": self.mailbox_path,
            "TRAINWARDEN_RUN_DIR": os.path.dirname(self.mailbox_path),
            "TRAINWARDEN_CHECKPOINT_DIR": options.checkpoint_dir,
            "TRAINWARDEN_PG_TIMEOUT_S": str(options.pg_timeout_s),
            SWITCH: "1" if options.in_process else "0",
            "TRAINWARDEN_MAX_STEP": "" if self.max_step is None else str(self.max_step),
            "TRAINWARDEN_DEPOT": self.depot.address if self.depot is not None else "",
        }

    def _on_exit(self, worker: Worker) -> None:
        self.sender.send(
            "exit",
            {
                "job": self.options.job,
                "generation": worker.generation,
                "node": self.options.node,
                "rank": worker.rank,
                "pid": worker.pid,
                "exit_code": worker.exit_code,
                "at_ns": time.time_ns(),
            },
        )
        log.info("rank %d (process %d) ended with %s", worker.rank, worker.pid, worker.exit_code)
        self.on_change.set()

    # -- state

    def enter(self, state: str, generation: int | None = None, members: list[str] | None = None) -> None:
        """Change the state that status shows."""
        with self.shared.changed:
            self.shared.state = state
            if generation is not None:
                self.shared.generation = generation
            if members is not None:
                self.shared.members = members
            self.shared.changed.notify_all()
        self.on_change.set()

    def take_order(self, timeout_s: float) -> Order | None:
        """Wait for an order (or a stop); the order leaves the box."""
        with self.shared.changed:
            self.shared.changed.wait_for(lambda: self.shared.order or self.shared.stopping, timeout_s)
            order, self.shared.order = self.shared.order, None
            return order

    def interrupted(self) -> bool:
        """Whether an order or a stop waits for the main thread."""
        return self.shared.order is not None or self.shared.stopping

    # -- commands, called by the link's threads

    def command(self, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        """Carry one command out; the answer has ``status``, ``reason`` and ``result``."""
        actions = {
            "world": self._world,
            "stop": self._stop,
            "kill": self._kill,
            "save": self._save,
            "shares": self._shares,
            "status": self._status,
        }
        action = actions.get(verb)
        if action is None:
            return _answer("refused", f"the launcher does not know the verb {verb!r}")
        try:
            return action(args)
        except BadArgument as error:
            return _answer("refused", f"{error}")

    def _world(self, args: dict[str, Any]) -> dict[str, Any]:
        order = Order.parse(args)
        if self.options.node not in order.members:
            return _answer("refused", f"node {self.options.node} is not a member of generation {order.generation}")
        with self.shared.changed:
            newest = max(self.shared.generation, self.shared.order.generation if self.shared.order else 0)
            if order.generation <= newest:
                return _answer("refused", f"generation {order.generation} is not above {newest}, the newest known here")
            self.shared.order = order
            self.shared.changed.notify_all()
        return _answer("accepted", f"generation {order.generation} with {len(order.members)} nodes is being started")

    def _stop(self, args: dict[str, Any]) -> dict[str, Any]:
        with self.shared.changed:
            self.shared.stopping = True
            self.shared.changed.notify_all()
        return _answer("accepted", "the launcher is stopping")

    def _kill(self, args: dict[str, Any]) -> dict[str, Any]:
        rank = args.get("rank")
        if not isinstance(rank, int):
            raise BadArgument(f"args.rank is {rank!r}, expected the number of a rank")
        pid = self.workers.kill(rank)
        if pid is None:
            return _answer("refused", f"no live worker of rank {rank} on node {self.options.node}")
        return _answer("done", f"rank {rank}, process {pid}, got SIGKILL", {"rank": rank, "pid": pid})

    def _save(self, args: dict[str, Any]) -> dict[str, Any]:
        deadline_s = float(args.get("deadline_ms", 3000)) / 1000.0
        expected = [worker.rank for worker in self.workers.current if worker.alive]
        if not expected:
            return _answer("refused", f"no worker runs on node {self.options.node}")
        phase = args.get("phase")
        if phase == "arm":
            return _armed(self.trainers.arm(expected))
        if phase == "commit":
            return self._commit(expected, args.get("step"), deadline_s)
        if phase is not None:
            raise BadArgument(f"args.phase is {phase!r}, expected arm or commit")
        if len(self.shared.members) > 1:
            return _answer("refused", "the job spans several nodes; use phase arm on all of them, then phase commit")
        return self._save_alone(expected, deadline_s)

    def _commit(self, expected: list[int], step: object, deadline_s: float) -> dict[str, Any]:
        if not isinstance(step, int):
            raise BadArgument(f"args.step is {step!r}, expected the number of a step")
        result = self.trainers.commit(expected, step, deadline_s)
        why = commit_failure(result)
        return _answer("failed" if why else "done", why or f"all ranks saved step {step}", result)

    def _save_alone(self, expected: list[int], deadline_s: float) -> dict[str, Any]:
        until = time.monotonic() + deadline_s
        answer = _answer("failed", "the save was not tried")
        for _ in range(2):
            armed = _armed(self.trainers.arm(expected))
            if armed["status"] != "done":
                return armed
            step = margin_step(armed["result"])
            answer = self._commit(expected, step, max(0.1, until - time.monotonic()))
            if not answer["result"].get("late"):
                return answer
        return answer

    def _shares(self, args: dict[str, Any]) -> dict[str, Any]:
        expected = [worker.rank for worker in self.workers.current if worker.alive]
        if not expected:
            return _answer("refused", f"no worker runs on node {self.options.node}")
        return sharing.change(self.trainers.peers(), expected, args)

    def _status(self, args: dict[str, Any]) -> dict[str, Any]:
        return _answer("done", "", self.describe(with_steps=True))

    def describe(self, with_steps: bool = False) -> dict[str, Any]:
        """State, generation, members and ranks as status shows them."""
        said = self.trainers.look() if with_steps else {}
        shares = sharing.shares_of(said)
        ranks = [
            {
                "rank": worker.rank,
                "local_rank": worker.local_rank,
                "pid": worker.pid,
                "last_step": said.get(worker.rank, {}).get("step"),
                "alive": worker.alive,
                "exit_code": worker.exit_code,
                **({"shares": shares[worker.rank]} if worker.rank in shares else {}),
            }
            for worker in list(self.workers.current)
        ]
        with self.shared.changed:
            return {
                "state": self.shared.state,
                "generation": self.shared.generation,
                "members": list(self.shared.members),
                # so long nobody else need do anything about a dead rank: both waits of a world that heals itself
                "heals_s": 2 * REGROUP_LIMIT_S if self.options.in_process and self.shared.state == "running" else 0.0,
                "ranks": ranks,
                "pid": os.getpid(),
            }


def margin_step(armed: dict[str, Any], reach_ms: float = 150.0) -> int:
    """The step to save: far enough ahead that the commit reaches every rank before it begins."""
    newest = max(int(step) for step in armed["steps"].values())
    step_ms = float(armed.get("step_ms") or 0.0)
    ahead = 2 if step_ms <= 0 else 2 + int(reach_ms // step_ms)
    return newest + min(ahead, 50)


def _answer(status: str, reason: str, result: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"status": status, "reason": reason, "result": result or {}}


def _armed(result: dict[str, Any]) -> dict[str, Any]:
    if result["refused"]:
        rank, why = next(iter(result["refused"].items()))
        return _answer("failed", f"rank {rank} refuses to save: {why}", result)
    if result["silent"]:
        return _answer("failed", f"no answer from rank(s) {', '.join(map(str, result['silent']))}", result)
    return _answer("done", "", result)
