"""The process beside the warden that watches the links. It has one thread: nothing of ours can keep it from the processor.

It is begun and asked over a socket, one JSON object each way. When the warden is gone it ends and leaves the routes as they are: the next
warden's takes them over.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from trainwarden_hook.addresses import UsageError
from trainwarden_hook.escape import Escape
from trainwarden_hook.paths import Move
from trainwarden_hook.rails import read_rails
from trainwarden_hook.wire import Sender

log = logging.getLogger("trainwarden.links")
REALTIME_PRIORITY = 10
MAX_MESSAGE_BYTES = 1 << 18
ANSWER_S, BEGIN_S = 5.0, 60.0
"""Longest wait for an answer; the first one waits for an interpreter to start."""
Message = dict[str, Any]


class Client:
    """Starts the process and asks it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "trainwarden_hook.link_keeper", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def ask(self, verb: str, **arguments: Any) -> Message:
        """The answer.

        Raises
        ------
        UsageError
            The answer is that it cannot be done.
        OSError
            The process does not answer.
        """
        self._socket.settimeout(BEGIN_S if verb == "begin" else ANSWER_S)
        self._socket.send(json.dumps({"verb": verb, **arguments}).encode())
        answer = self._socket.recv(MAX_MESSAGE_BYTES)
        if not answer:
            raise BrokenPipeError("the process that watches the links has ended")
        told: Message = json.loads(answer)
        if "error" in told:
            raise UsageError(told["error"])
        return told

    @property
    def alive(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def close(self, wait_s: float = 5.0) -> None:
        """Hang up and wait for its end."""
        self._socket.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            log.warning("the process that watches the links did not end; killing it")
            self._process.kill()
            self._process.wait()


class Keeper:
    """The process's side."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._identity: Message = {}
        self._sender = Sender(None)
        self._escape: Escape | None = None

    def run(self) -> None:
        """Until the warden hangs up or says ``end``."""
        _be_prompt()
        while self._escape is None:
            if not self._handle():
                return
        # what was made so far stays: the collector of cycles need not look through it again and again
        gc.freeze()
        try:
            self._escape.run(self._link.fileno(), self._handle)
        finally:
            self._escape.close()

    def _handle(self) -> bool:
        data = self._link.recv(MAX_MESSAGE_BYTES)
        if not data:
            return False
        request: Message = json.loads(data)
        verb = str(request.pop("verb"))
        try:
            answer = self._verbs()[verb](**request)
        except UsageError as error:
            answer = {"error": str(error)}
        self._link.send(json.dumps(answer).encode())
        return verb != "end"

    def _verbs(self) -> dict[str, Callable[..., Message]]:
        return {
            "begin": self._begin,
            "generation": self._set_generation,
            "order": self._order,
            "report": self._report_for,
            "status": lambda: self._running().status(),
            "end": self._end,
        }

    def _begin(
        self, path: str, secret: str, avoided: list[tuple[str, str]], collector: str, identity: Message
    ) -> Message:
        self._identity = identity
        self._sender = Sender(collector or None)
        self._escape = Escape(read_rails(path, identity["node"]), bytes.fromhex(secret), self._report, avoided)
        return {}

    def _set_generation(self, generation: int) -> Message:
        self._identity["generation"] = generation
        return {}

    def _order(self, rail: str, peers: list[str], undo: bool, dry_run: bool) -> Message:
        escape = self._running()
        rail = rail or escape.rail_in_use()
        moves = escape.order(rail, peers, undo, dry_run)
        return {"rail": rail, "moves": _named(escape, moves), "avoided": escape.avoided}

    def _end(self) -> Message:
        self._running().clear()
        return {}

    def _running(self) -> Escape:
        if self._escape is None:
            raise UsageError("the links are not watched yet")
        return self._escape

    def _report_for(self, fields: Message) -> Message:
        self._report(fields)
        return {}

    def _report(self, fields: Message) -> None:
        self._sender.send("link", {**self._identity, **fields})


def _named(escape: Escape, moves: list[Move]) -> list[dict[str, str]]:
    names = escape.rails.names
    return [{"peer": move.peer, "from": names[move.source], "to": names[move.target]} for move in moves]


def _be_prompt() -> None:
    """A busy node must not look like a node with a dead link: this process works some hundred times a second, microseconds each."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REALTIME_PRIORITY))
    except OSError as error:
        log.info("no real-time priority for the link watch: %s", error.strerror)


def main() -> None:
    """Serve the socket whose number is the argument."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as link:
        Keeper(link).run()


if __name__ == "__main__":
    main()
