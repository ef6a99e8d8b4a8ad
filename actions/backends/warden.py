"""Backend `warden`: our node daemon around the launcher, on any host. Many nodes are asked at once, each in its own thread."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from actions.backends.base import Backend, Order, Outcome
from actions.backends.client import Answer, Command, Unreachable, WardenClient, address_of
from actions.shares import RankShare, text_of
from actions.world import JobState, NodeState
from trainwarden.clock import NS_PER_MS, Clock
from trainwarden.errors import ConfigError, UnavailableError, UsageError
from trainwarden.records import Verb
from trainwarden.settings import option

LOG = logging.getLogger("trainwarden.actions.warden")

T = TypeVar("T")
MIN_SECRET_BYTES = 16
COMMIT_REACH_MS = 150.0
"""Least time allowed for a commit to reach every rank before the step that it names begins; twice the arming if that took longer."""
MAX_MARGIN_STEPS = 200
SAVE_ATTEMPTS = 3
REACH_GROWS = 4
GO_LEAST_MS = 3000.0
"""Least time for rank 0 to come to a step boundary, and as much again for its answer to come back."""
MAX_THREADS = 64
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names come from the topology: one with other characters could lead a command to another host or port."""
_CANNOT = {
    Verb.NOTIFY: "notifying is the notifiers' work",
}


@dataclass(frozen=True)
class WardenSettings:
    """Where the wardens are and how long to wait for them."""

    nodes: dict[str, str] = option({}, 'node = "http://host:port" of its warden')
    url_template: str = option(
        "", 'address of nodes that only the topology names, e.g. "http://{node}:9470"; empty: none'
    )
    secret_file: Path | None = option(None, "file with the secret that wardens share")
    connect_timeout_ms: float = option(500.0, "a warden that does not accept a connection by then is out of reach")
    status_timeout_ms: float = option(1500.0, "longest wait for a status")
    answer_timeout_ms: float = option(6000.0, "longest wait for the answer to stop, admit and world")


class WardenBackend(Backend):
    """Commands wardens over signed HTTP."""

    name = "warden"
    Settings = WardenSettings

    def __init__(self, settings: WardenSettings, clock: Clock) -> None:
        super().__init__(settings, clock)
        self._secret = read_secret(settings.secret_file)
        self._clients: dict[str, WardenClient] = {}
        self._seen: dict[str, NodeState] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(MAX_THREADS, "warden")
        for node, url in settings.nodes.items():
            self._add(node, url)

    def learn(self, nodes: tuple[str, ...]) -> None:
        for node in nodes:
            if node not in self._clients and self.settings.url_template:
                if not _HOST_NAME.fullmatch(node):
                    raise UsageError(f"node {node!r} is no host name: no address is made of it by url_template")
                self._add(node, self.settings.url_template.replace("{node}", node))

    def can(self, verb: Verb) -> str:
        return _CANNOT.get(verb, "")

    def cluster(self) -> dict[str, NodeState]:
        timeout_s = self.settings.status_timeout_ms / 1000
        futures = {node: self._pool.submit(client.status, timeout_s) for node, client in self._all().items()}
        states = {node: self._state(node, future) for node, future in futures.items()}
        with self._lock:
            self._seen.update({node: state for node, state in states.items() if state.reachable})
        return states

    def announce(self, order: Order) -> dict[str, int]:
        answers = self._ask_all(self._all(), "status", order, {})
        return {node: answer.fence for node, answer in answers.items() if answer is not None}

    def save(self, order: Order, deadline_ms: float) -> Outcome:
        """Arm everywhere (which step is each rank in), then name one step ahead of all for everybody; further if somebody was late."""
        nodes = self._members(order.job)
        until_ns = self.clock.monotonic_ns() + int(deadline_ms * NS_PER_MS)
        outcome = Outcome("failed", "no time was left to save")
        for attempt in range(1, SAVE_ATTEMPTS + 1):
            left_ms = (until_ns - self.clock.monotonic_ns()) / NS_PER_MS
            if left_ms <= 0:
                break
            outcome, late = self._save_once(
                order.part(f"save{attempt}"), nodes, left_ms, COMMIT_REACH_MS * REACH_GROWS ** (attempt - 1)
            )
            if not late:
                break
        return outcome

    def _save_once(
        self, order: Order, nodes: Mapping[str, WardenClient], deadline_ms: float, reach_ms: float
    ) -> tuple[Outcome, bool]:
        """How it went, and whether it is worth another try: a rank had gone past the step when it heard of it."""
        began_ns = self.clock.monotonic_ns()
        armed = self._ask_all(
            nodes, "save", order.part("arm"), {"phase": "arm", "deadline_ms": deadline_ms}, deadline_ms
        )
        if (failure := _first_failure(armed)) is not None:
            return failure, False
        took_ms = (self.clock.monotonic_ns() - began_ns) / NS_PER_MS
        step = save_step([answer.result for answer in armed.values() if answer is not None], max(reach_ms, 2 * took_ms))
        if step is None or took_ms >= deadline_ms:
            return Outcome(
                "failed", "no rank said its step" if step is None else "arming took the whole deadline"
            ), False
        args = {"phase": "commit", "step": step, "deadline_ms": deadline_ms - took_ms}
        timeout_ms = deadline_ms - took_ms + self.settings.connect_timeout_ms
        saved = self._ask_all(nodes, "save", order.part("commit"), args, timeout_ms)
        late = any(answer is not None and answer.result.get("late") for answer in saved.values())
        return _first_failure(saved) or Outcome("done", f"all ranks saved step {step}", _save_detail(step, saved)), late

    def isolate(self, order: Order, node: str) -> Outcome:
        answer = self._ask_all(self._only(node), "stop", order, {"reason": order.reason})[node]
        if answer is None:
            return Outcome("pending", f"{node} is out of reach: it is stopped as soon as it answers", silent=(node,))
        return _outcome(node, answer)

    def restart(self, order: Order, members: tuple[str, ...], generation: int, job: JobState) -> Outcome:
        args: dict[str, Any] = {
            "generation": generation, "members": list(members), "rendezvous_id": f"{order.job}.{generation}",
            "min": len(members), "max": len(members), "reason": order.reason,
        }  # fmt: skip
        clients = {node: client for node, client in self._all().items() if node in members or node in job.nodes}
        outside = {node: client for node, client in clients.items() if node not in members}
        futures = self._submit(outside, "world", order, args)
        answers = self._ask_all({n: c for n, c in clients.items() if n in members}, "world", order, args)
        for future in futures.values():
            future.add_done_callback(_log_outside)
        return _restart_outcome(answers, members, generation)

    def reroute(self, order: Order, node: str, rail: str = "", undo: bool = False, dry_run: bool = False) -> Outcome:
        args = {"rail": rail, "undo": undo, "dry_run": dry_run, "reason": order.reason}
        answer = self._ask_all(self._only(node), "reroute", order, args)[node]
        if answer is None:
            return Outcome("failed", f"{node} is out of reach", silent=(node,))
        outcome = _outcome(node, answer)
        moves = answer.result.get("moves") or ()
        told = {
            "rail": str(answer.result.get("rail", "")),
            "moves": ",".join(f"{m['peer']}:{m['from']}>{m['to']}" for m in moves),
        }
        return replace(outcome, detail={**outcome.detail, **told}) if answer.good else outcome

    def rebalance(self, order: Order, shares: tuple[int, ...], dry_run: bool = False) -> Outcome:
        """Told to every rank, the node of rank 0 first, then rank 0 goes; what fails before that has changed nothing."""
        nodes = self._members(order.job)
        if not nodes:
            return Outcome("failed", f"no node of job {order.job} is known")
        first = next(iter(nodes))
        change = {"id": order.key, "shares": list(shares)}
        told: dict[str, Answer | None] = {}
        for some in ({first: nodes[first]}, {node: client for node, client in nodes.items() if node != first}):
            told |= self._ask_all(
                some, "shares", order.part("prepare"), {**change, "phase": "prepare", "dry_run": dry_run}
            )
            if (failure := _first_failure(told)) is not None:
                self._ask_all({first: nodes[first]}, "shares", order.part("void"), {**change, "phase": "void"})
                return failure
        if dry_run:
            return Outcome("done", f"{len(nodes)} nodes would take the shares {text_of(shares)}")
        deadline_ms = GO_LEAST_MS + 3 * self._pace_ms(order.job)
        args = {**change, "phase": "go", "deadline_ms": deadline_ms}
        answer = self._ask_all({first: nodes[first]}, "shares", order.part("go"), args, deadline_ms + GO_LEAST_MS)
        return _first_failure(answer) or Outcome("done", f"shares {text_of(shares)}", _change_detail(answer[first]))

    def _pace_ms(self, job: str) -> float:
        with self._lock:
            ranks = [rank for state in self._seen.values() if state.job == job for rank in state.shares.values()]
        return max((rank.recent_ms for rank in ranks), default=0.0)

    def return_node(self, order: Order, node: str) -> Outcome:
        answer = self._ask_all(self._only(node), "admit", order, {"reason": order.reason})[node]
        return Outcome("failed", f"{node} is out of reach") if answer is None else _outcome(node, answer)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _add(self, node: str, url: str) -> None:
        address_of(node, url)
        timeout_s = self.settings.connect_timeout_ms / 1000
        self._clients[node] = WardenClient(node, url, self._secret, self.clock, timeout_s)

    def _all(self) -> dict[str, WardenClient]:
        return dict(self._clients)

    def _only(self, node: str) -> dict[str, WardenClient]:
        if node not in self._clients:
            raise UnavailableError(f"node {node} has no warden: add it to backends.warden.nodes")
        return {node: self._clients[node]}

    def _members(self, job: str) -> dict[str, WardenClient]:
        with self._lock:
            state = JobState(job, {n: s for n, s in self._seen.items() if s.job == job})
        return {node: self._clients[node] for node in state.members if node in self._clients}

    def _state(self, node: str, future: Future[dict[str, Any]]) -> NodeState:
        try:
            return parse_status(node, future.result())
        except Unreachable as error:
            with self._lock:
                known = self._seen.get(node, NodeState(node))
            return _unreachable(known, str(error))

    def _ask_all(
        self,
        clients: Mapping[str, WardenClient],
        verb: str,
        order: Order,
        args: Mapping[str, Any],
        timeout_ms: float = 0.0,
    ) -> dict[str, Answer | None]:
        futures = self._submit(clients, verb, order, args, timeout_ms)
        return {node: _result(node, future) for node, future in futures.items()}

    def _submit(
        self,
        clients: Mapping[str, WardenClient],
        verb: str,
        order: Order,
        args: Mapping[str, Any],
        timeout_ms: float = 0.0,
    ) -> dict[str, Future[Answer]]:
        timeout_s = (timeout_ms or self.settings.answer_timeout_ms) / 1000

        def send(node: str, client: WardenClient) -> Answer:
            job = order.job or self._job_of(node)
            return client.command(Command(f"{order.key}@{node}", verb, node, job, order.fence, args), timeout_s)

        return {node: self._pool.submit(send, node, client) for node, client in clients.items()}

    def _job_of(self, node: str) -> str:
        with self._lock:
            return self._seen[node].job if node in self._seen else ""


def read_secret(path: Path | None) -> bytes:
    """The shared secret without surrounding blanks, at least 16 bytes."""
    if path is None:
        raise ConfigError("backends.warden.secret_file is missing: wardens take signed commands only")
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UnavailableError(f"backends.warden.secret_file = {str(path)!r}: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"backends.warden.secret_file = {str(path)!r}: {len(secret)} bytes, expected at least {MIN_SECRET_BYTES}"
        )
    return secret


def parse_status(node: str, value: Mapping[str, Any]) -> NodeState:
    """A warden's status page as `NodeState`; raises `Unreachable` when it is none."""
    try:
        ranks = list(value.get("ranks") or ())
        steps = {int(r["rank"]): int(r["last_step"]) for r in ranks if r.get("last_step") is not None}
        alive = frozenset(int(r["rank"]) for r in ranks if r.get("alive"))
        members = tuple(str(member) for member in value.get("members") or ())
        excluded = value.get("state") == "excluded" or any(
            _names(entry, node) for entry in value.get("exclusions") or ()
        )
        numbers = int(value.get("generation") or 0), int(value.get("fence") or 0)
        shares = {int(r["rank"]): RankShare.parse(r["shares"]) for r in ranks if r.get("shares")}
        heals_s = float(value.get("heals_s") or 0.0) if value.get("state") == "running" else 0.0
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise Unreachable(f"{node}: its status cannot be read ({error!r})") from None
    job, state = str(value.get("job", "")), str(value.get("state", ""))
    return NodeState(
        node, True, job, state, numbers[0], members, steps, alive, numbers[1], excluded, str(value.get("reason", "")),
        {rank: share for rank, share in shares.items() if share is not None}, heals_s,
    )  # fmt: skip


def _names(entry: object, node: str) -> bool:
    return (entry.get("node") if isinstance(entry, Mapping) else entry) == node


def save_step(armed: Iterable[Mapping[str, Any]], reach_ms: float = COMMIT_REACH_MS) -> int | None:
    """The step that everybody can still save at: ahead of the fastest rank by the time a commit needs to arrive (`reach_ms`)."""
    answers = list(armed)
    steps = [int(step) for answer in answers for step in dict(answer.get("steps") or {}).values()]
    if not steps:
        return None
    step_ms = max((float(answer.get("step_ms") or 0.0) for answer in answers), default=0.0)
    ahead = 2 if step_ms <= 0 else 2 + int(reach_ms // step_ms)
    return max(steps) + min(ahead, MAX_MARGIN_STEPS)


def _unreachable(known: NodeState, reason: str) -> NodeState:
    return NodeState(
        known.node,
        False,
        known.job,
        "unreachable",
        known.generation,
        known.members,
        {},
        frozenset(),
        known.fence,
        known.excluded,
        reason,
    )


def _result(node: str, future: Future[Answer]) -> Answer | None:
    try:
        return future.result()
    except Unreachable as error:
        LOG.warning("%s did not answer: %s", node, error)
        return None


def _outcome(node: str, answer: Answer) -> Outcome:
    if answer.good:
        return Outcome("done", answer.reason, {"fence": str(answer.fence)})
    return Outcome("refused" if answer.status == "refused" else "failed", f"{node}: {answer.reason}")


def _first_failure(answers: Mapping[str, Answer | None]) -> Outcome | None:
    if not answers:
        return Outcome("failed", "no node of the job is known")
    for node, answer in answers.items():
        if answer is None:
            return Outcome("failed", f"{node} did not answer", silent=(node,))
        if not answer.good:
            return _outcome(node, answer)
    return None


def _save_detail(step: int, saved: Mapping[str, Answer | None]) -> dict[str, str]:
    stall_ms = max((float(a.result.get("stall_ms") or 0.0) for a in saved.values() if a is not None), default=0.0)
    return {"step": str(step), "stall_ms": f"{stall_ms:.1f}"}


def _change_detail(answer: Answer | None) -> dict[str, str]:
    return {"step": str(answer.result.get("step", ""))} if answer is not None else {}


def _restart_outcome(answers: Mapping[str, Answer | None], members: tuple[str, ...], generation: int) -> Outcome:
    silent = tuple(node for node in members if answers.get(node) is None)
    refused = [f"{node}: {answer.reason}" for node, answer in answers.items() if answer is not None and not answer.good]
    if refused:
        return Outcome("refused", refused[0], silent=silent)
    if silent:
        return Outcome("failed", f"no answer from {', '.join(silent)}", silent=silent)
    return Outcome("done", f"generation {generation} with {', '.join(members)}", {"generation": str(generation)})


def _log_outside(future: Future[Answer]) -> None:
    report: Callable[..., None] = LOG.info
    try:
        text: object = future.result().reason
    except Unreachable as error:
        report, text = LOG.warning, error
    report("a node outside of the new world: %s", text)
