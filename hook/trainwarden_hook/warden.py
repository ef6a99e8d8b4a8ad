"""``trainwarden-warden``: the node daemon that owns the launcher and takes commands."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from trainwarden_hook import segments
from trainwarden_hook.addresses import UsageError, parse_endpoint
from trainwarden_hook.commands import Command, Gate
from trainwarden_hook.launcher_process import LauncherProcess
from trainwarden_hook.lines import Link, Listener, Message
from trainwarden_hook.peers import Peer
from trainwarden_hook.supervisor import BadArgument, Order
from trainwarden_hook.warden_http import Server
from trainwarden_hook.warden_links import WardenLinks
from trainwarden_hook.warden_state import Memory, StateFile
from trainwarden_hook.wire import Sender

log = logging.getLogger("trainwarden.warden")
ACK_TIMEOUT_S = 2.0
WATCH_S = 0.1
ADOPT_S = 3.0
MIN_SECRET_BYTES = 16
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
WELL_S = 60.0
Answer = dict[str, Any]


class Warden:
    """Executes commands, keeps the launcher alive, knows its state.

    Parameters
    ----------
    process
        Starts and stops the launcher.
    """

    def __init__(self, memory: Memory, file: StateFile, secret: bytes, process: LauncherProcess) -> None:
        self.memory = memory
        self._process = process
        self.gate = Gate(secret, memory, file, self.execute, time.time_ns)
        self._changed = threading.Condition()
        self._peer: Peer | None = None
        self._told: dict[str, Any] = {}
        self._failed = ""
        self._ending = False
        self._deaths = 0
        self._started_at = 0.0
        self.wake = threading.Event()
        self._listener: Listener | None = None
        self._sender = Sender(os.environ.get("TRAINWARDEN_SOCKET") or None)
        self.links: WardenLinks | None = None

    def listen(self, run_dir: str) -> None:
        """Open the socket that launchers report to.

        Raises
        ------
        OSError
            It cannot be made in ``run_dir``.
        """
        self._listener = Listener(os.path.join(run_dir, "warden.sock"), self._serve)

    # -- the launcher's link

    def _serve(self, link: Link) -> None:
        peer = Peer(link, self._take)
        opening = link.read()
        if opening is None or "hello" not in opening:
            link.close()
            return
        with self._changed:
            self._peer, self._told = peer, opening["hello"]
            self._process.adopt(int(self._told["pid"]))
            self._changed.notify_all()
        peer.tell({"welcome": self._welcome()})
        log.info("launcher %s has reported", self._told["pid"])
        peer.run()
        with self._changed:
            if self._peer is peer:
                self._peer = None
        self.wake.set()

    def _welcome(self) -> Message:
        """A launcher that was started anew gets the order it has not begun, and waits for one if the job has run."""
        memory = self.memory
        order = memory.order if memory.order and memory.order["generation"] > memory.generation else None
        return {"generation": memory.generation, "order": order, "resume": memory.generation > 0}

    def _take(self, _: Peer, message: Message) -> None:
        if "state" not in message:
            return
        with self._changed:
            self._told = message["state"]
            generation = int(self._told.get("generation", 0))
            self._changed.notify_all()
        running = self._told.get("state") == "running"
        if running and generation > self.memory.generation:
            self.gate.persist(lambda memory: setattr(memory, "generation", generation))
        self.wake.set()

    # -- commands

    def execute(self, command: Command) -> Answer:
        """Carry one admitted command out."""
        log.info("command %s: %s %s (fence %d)", command.id, command.verb, command.args, command.fence)
        if command.verb == "world":
            return self._world(command.args)
        if command.verb == "stop":
            return self._exclude(str(command.args.get("reason", "stopped by command")))
        if command.verb == "admit":
            return self._admit()
        if command.verb == "status":
            return _answer("done", "", self.status())
        if command.verb == "reroute":
            return self._reroute(command.args)
        wait_s = float(command.args.get("deadline_ms", 3000)) / 1000.0 + ACK_TIMEOUT_S
        return self._forward(command.verb, command.args, wait_s)

    def _reroute(self, args: dict[str, Any]) -> Answer:
        if self.links is None:
            return _answer(
                "refused", f"the warden of node {self.memory.node} knows no links; start it with --links FILE"
            )
        return self.links.reroute(args, self.gate.persist)

    def generation(self) -> int:
        """The generation that runs, as far as it was told."""
        return int(self._told.get("generation", 0) or self.memory.generation)

    def _world(self, args: dict[str, Any]) -> Answer:
        try:
            order = Order.parse(args)
        except BadArgument as error:
            return _answer("refused", str(error))
        if self.memory.order and order.generation < self.memory.order["generation"]:
            newest = self.memory.order["generation"]
            return _answer("refused", f"generation {order.generation} is below {newest}, ordered before")
        # the launcher says so a moment before it has ended and the warden has written it down
        if self.memory.finished or self.status()["state"] == "finished":
            return _answer("refused", f"the job is finished on node {self.memory.node}")
        if self.memory.node not in order.members:
            self.gate.persist(lambda memory: setattr(memory, "order", args))
            return self._exclude(f"not a member of generation {order.generation}: {order.reason}".rstrip(": "))
        self.gate.persist(lambda memory: _readmit(memory, args))
        self._failed = ""
        self._deaths = 0
        return self._deliver(order, args)

    def _deliver(self, order: Order, args: dict[str, Any]) -> Answer:
        if self._peer is None:
            self.wake.set()
            return _answer("accepted", f"the launcher is being started for generation {order.generation}")
        answer = self._forward("world", args, ACK_TIMEOUT_S)
        if answer["status"] == "failed":
            return _answer("accepted", "the launcher does not answer; it gets the order when it is back")
        return answer

    def _exclude(self, reason: str) -> Answer:
        def change(memory: Memory) -> None:
            memory.excluded = reason

        self.gate.persist(change)
        stuck = self._stop_launcher()
        if stuck:
            return _answer("failed", f"process {stuck} could not be killed; the node is excluded all the same")
        return _answer("done", f"node {self.memory.node} is excluded: {reason}")

    def _stop_launcher(self) -> int | None:
        """Process id of one that could not be killed."""
        stuck = self._process.stop()
        segments.unlink_all(self.memory.job, self.memory.node)
        return stuck

    def _admit(self) -> Answer:
        if self.memory.excluded:
            self.gate.persist(_admitted)
        return _answer("done", f"node {self.memory.node} may be named in a world again")

    def _forward(self, verb: str, args: dict[str, Any], wait_s: float) -> Answer:
        peer = self._peer
        if peer is None:
            return _answer("failed", "no launcher runs on this node")
        reply = peer.ask({"verb": verb, "args": args}, wait_s)
        if reply is None:
            return _answer("failed", f"the launcher did not answer in {wait_s:.1f} s")
        return _answer(reply["status"], reply["reason"], reply["result"])

    # -- state

    def status(self) -> dict[str, Any]:
        """The body of ``GET /v1/status``."""
        told = dict(self._told)
        peer = self._peer
        if peer is not None:
            reply = peer.ask({"verb": "status", "args": {}}, ACK_TIMEOUT_S)
            told = reply["result"] if reply else told
            if told.get("state") == "finished":
                # its last word counts after it has hung up, too
                self._told = told
        running = self._process.pid is not None
        return {
            "node": self.memory.node,
            "job": self.memory.job,
            "state": self._state(told, running),
            "generation": int(told.get("generation", self.memory.generation) or self.memory.generation),
            "members": told.get("members", []),
            "ranks": told.get("ranks", []) if running else [],
            "launcher_pid": self._process.pid,
            "fence": self.memory.fence,
            "exclusions": [{"node": self.memory.node, "reason": self.memory.excluded}] if self.memory.excluded else [],
            "reason": self._failed,
            "heals_s": told.get("heals_s", 0.0) if running else 0.0,
            **({"links": self.links.status()} if self.links is not None else {}),
        }

    def _state(self, told: dict[str, Any], running: bool) -> str:
        if self.memory.excluded:
            return "excluded"
        if self.memory.finished or told.get("state") == "finished":
            return "finished"
        if self._failed:
            return "failed"
        if self.memory.stopped:
            return "stopped"
        return str(told.get("state", "starting")) if running and self._peer else "starting"

    # -- the launcher's life

    def keep(self) -> None:
        """Start the launcher and start it again whenever it should run and does not; until `end`."""
        self._wait_adoption()
        while not self._ending:
            self.wake.wait(WATCH_S)
            self.wake.clear()
            try:
                self._look_after()
            except Exception:
                # for example a full disk: who keeps the launcher alive must not die of it
                log.exception("the launcher could not be looked after; trying again")

    def _look_after(self) -> None:
        code = self._process.poll()
        if code is not None:
            self._ended(code)
        if self._should_run():
            if self._process.pid is None:
                self._start()
        elif self._process.pid is not None and not self._ending:
            log.warning("launcher %d runs and must not (%s): stopping it", self._process.pid, self._state({}, True))
            self._stop_launcher()

    def _wait_adoption(self) -> None:
        """A launcher of an earlier warden reports within moments; starting a second one would double the node."""
        if self._process.find_earlier():
            with self._changed:
                self._changed.wait_for(lambda: self._peer is not None, ADOPT_S)

    def _should_run(self) -> bool:
        memory = self.memory
        return not (memory.excluded or memory.stopped or memory.finished or self._failed or self._ending)

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._told = {}
        try:
            self._process.start()
        except OSError as error:
            self._failed = f"the launcher cannot be started: {error.strerror or error}"
            log.error("%s", self._failed)

    def _ended(self, code: int) -> None:
        log.warning("the launcher ended with %d", code)
        # an adopted launcher leaves no exit code, but its last word
        if (code == 0 or self._told.get("state") == "finished") and not self._ending:
            self.gate.persist(lambda memory: setattr(memory, "finished", True))
        elif code in {1, 2}:
            self._failed = (
                "the workers failed more often than --max-restarts" if code == 1 else "the launcher was called wrongly"
            )
        elif self._should_run():
            self._report_lost_workers()
            self._back_off()
        if not self._should_run():
            segments.unlink_all(self.memory.job, self.memory.node)

    def _report_lost_workers(self) -> None:
        """A launcher that dies takes its workers along and cannot report them itself."""
        for rank in self._told.get("ranks", []):
            if rank.get("alive"):
                self._sender.send(
                    "exit",
                    {
                        "job": self.memory.job,
                        "generation": self._told.get("generation"),
                        "node": self.memory.node,
                        "rank": rank["rank"],
                        "pid": rank["pid"],
                        "exit_code": -int(signal.SIGKILL),
                        "at_ns": time.time_ns(),
                    },
                )

    def _back_off(self) -> None:
        if time.monotonic() - self._started_at > WELL_S:
            self._deaths = 0
        pause_s = BACKOFF_S[min(self._deaths, len(BACKOFF_S) - 1)]
        self._deaths += 1
        self.wake.wait(pause_s)

    def end(self) -> None:
        """Stop the launcher and let `keep` return."""
        self._ending = True
        self._stop_launcher()
        if self._listener is not None:
            self._listener.close()
        self.wake.set()


def _admitted(memory: Memory) -> None:
    """Out of the running world still: it comes back by a world order, not by starting on its own."""
    memory.excluded = ""
    memory.stopped = True


def _readmit(memory: Memory, order: dict[str, Any]) -> None:
    memory.excluded = ""
    memory.stopped = False
    memory.order = order


def _answer(status: str, reason: str, result: Answer | None = None) -> Answer:
    return {"status": status, "reason": reason, "result": result or {}}


def read_secret(path: str) -> bytes:
    """The shared secret, without surrounding white space.

    Raises
    ------
    UsageError
        The file cannot be read or is too short.
    """
    try:
        with open(path, "rb") as file:
            secret = file.read().strip()
    except OSError as error:
        raise UsageError(f"cannot read the secret file {path}: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise UsageError(f"the secret in {path} has {len(secret)} bytes, expected at least {MIN_SECRET_BYTES}")
    return secret


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    own, dashes, launcher = list(argv), "--", []
    if dashes in own:
        cut = own.index(dashes)
        own, launcher = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(prog="trainwarden-warden", description=__doc__, epilog="-- trainwarden-run ...")
    for flag in ("--node", "--job", "--listen", "--secret-file", "--state-dir", "--run-dir"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--links", default="", metavar="FILE", help="rails of the nodes: move traffic off a bad one")
    given = parser.parse_args(own)
    if not launcher:
        raise UsageError("no launcher given; expected: trainwarden-warden [flags] -- trainwarden-run ... script.py")
    return given, launcher


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; exit code 2 for wrong use."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    try:
        given, launcher = _parse(sys.argv[1:] if argv is None else argv)
        return _serve(given, launcher)
    except UsageError as error:
        print(f"trainwarden-warden: {error}", file=sys.stderr)
        return 2


def _serve(given: argparse.Namespace, launcher: list[str]) -> int:
    secret = read_secret(given.secret_file)
    file = StateFile(given.state_dir)
    memory = file.load(given.node, given.job)
    _make_run_dir(given.run_dir)
    run_dir = os.path.abspath(given.run_dir)
    process = LauncherProcess(launcher, given.node, given.job, run_dir)
    address = parse_endpoint(given.listen, "--listen")
    warden = Warden(memory, file, secret, process)
    if given.links:
        warden.links = WardenLinks(given.links, memory, secret, run_dir, warden.generation)
        os.environ.update(warden.links.environment)
    server = Server(address, warden.gate.handle, warden.status)
    try:
        warden.listen(run_dir)
    except OSError as error:
        raise UsageError(f"cannot serve in the run directory {run_dir}: {error.strerror or error}") from error
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    threading.Thread(target=server.serve, name="trainwarden-http", daemon=True).start()
    keeper = threading.Thread(target=warden.keep, name="trainwarden-keep", daemon=True)
    keeper.start()
    log.info("warden of node %s serves on %s:%d", given.node, address[0], server.server_port)
    ended.wait()
    server.end()
    warden.end()
    keeper.join()
    if warden.links is not None:
        warden.links.close()
    server.server_close()
    return 0


def _make_run_dir(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create the run directory {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise UsageError(f"no permission to write in the run directory {path}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
