"""The warden's links: what it is asked (``reroute``), and what it adds to the environment of training processes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from trainwarden_hook import nccl
from trainwarden_hook.addresses import UsageError
from trainwarden_hook.link_keeper import Client, Message
from trainwarden_hook.mptcp import preload_library
from trainwarden_hook.rails import read_rails
from trainwarden_hook.warden_state import Memory

log = logging.getLogger("trainwarden.links")
LOOK_S = 0.25
RESTART_PAUSE_S = 1.0
REROUTE_KEYS = frozenset({"rail", "peers", "undo", "dry_run", "reason"})
Answer = dict[str, Any]
Persist = Callable[[Callable[[Memory], None]], None]


class WardenLinks:
    """Link escape as a part of the warden: keeps the process that does it, and asks it.

    Parameters
    ----------
    path
        The links file.
    generation
        Tells the generation that runs, for the reports.

    Raises
    ------
    UsageError
        The file, or what this machine allows, is not enough.
    """

    def __init__(self, path: str, memory: Memory, secret: bytes, run_dir: str, generation: Callable[[], int]) -> None:
        self._path, self._memory, self._secret, self._generation = path, memory, secret, generation
        rails = read_rails(path, memory.node)
        library = preload_library(run_dir) if rails.mptcp else ""
        self._tail = nccl.LogTail(os.path.join(run_dir, "logs", "generation-*", "rank-*.*")) if rails.nccl else None
        self.environment = self._environment(library, os.environ)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._told_generation = -1
        self._client = self._begin()
        self._watcher = threading.Thread(target=self._watch, name="trainwarden-links", daemon=True)
        self._watcher.start()

    def _environment(self, library: str, given: Mapping[str, str]) -> dict[str, str]:
        """What is added to the environment of the launcher and its workers."""
        added = nccl.environment(given) if self._tail is not None else {}
        if library:
            added["LD_PRELOAD"] = " ".join(filter(None, [library, given.get("LD_PRELOAD", "")]))
        return added

    def _begin(self) -> Client:
        client = Client()
        memory = self._memory
        self._told_generation = self._generation()
        identity = {"job": memory.job, "generation": self._told_generation, "node": memory.node, "rank": 0}
        try:
            client.ask(
                "begin", path=os.path.abspath(self._path), secret=self._secret.hex(), avoided=memory.avoided,
                collector=os.environ.get("TRAINWARDEN_SOCKET", ""), identity=identity,
            )  # fmt: skip
        except (UsageError, OSError):
            client.close()
            raise
        return client

    def _ask(self, verb: str, **arguments: Any) -> Message:
        with self._lock:
            return self._client.ask(verb, **arguments)

    def close(self) -> None:
        """End, and remove every route and endpoint of ours."""
        self._ended.set()
        self._watcher.join()
        try:
            self._ask("end")
        except (OSError, UsageError) as error:
            log.warning("routes to peers may be left (ip route flush proto 116 removes them): %s", error)
        self._client.close()

    def status(self) -> Message:
        """For the status page."""
        try:
            return self._ask("status")
        except (OSError, UsageError) as error:
            return {"error": str(error)}

    def reroute(self, args: Mapping[str, Any], persist: Persist) -> Answer:
        """Take a rail out of use, or (``undo``) back; ``dry_run`` only says what would move. Twice is the same as once."""
        if problem := _malformed(args):
            return _answer("refused", problem)
        undo, dry_run = bool(args.get("undo")), bool(args.get("dry_run"))
        try:
            told = self._ask(
                "order", rail=args.get("rail", ""), peers=args.get("peers", []), undo=undo, dry_run=dry_run
            )
        except UsageError as error:
            return _answer("refused", str(error))
        except OSError as error:
            return _answer("failed", f"the links of node {self._memory.node} are not watched now: {error}")
        if not dry_run:
            persist(lambda memory: setattr(memory, "avoided", told["avoided"]))
        rail, moves = told["rail"], told["moves"]
        return _answer("done", _sentence(rail, len(moves), undo, dry_run), {"rail": rail, "moves": moves})

    # -- beside it

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self._look()
            except (OSError, UsageError) as error:
                log.error("links are not watched: %s; trying again", error)
                self._ended.wait(RESTART_PAUSE_S)

    def _look(self) -> None:
        if not self._client.alive:
            log.error("the process that watches the links has ended; starting it anew")
            with self._lock:
                self._client.close()
                self._client = self._begin()
        if (generation := self._generation()) != self._told_generation:
            self._ask("generation", generation=generation)
            self._told_generation = generation
        for event in self._tail.read() if self._tail is not None else ():
            log.warning("NCCL %s: %s", event.kind, event.line)
            self._ask("report", fields={"event": f"nccl_{event.kind}", "interface": event.device, "cause": event.line})


def _malformed(args: Mapping[str, Any]) -> str:
    if unknown := sorted(set(args) - REROUTE_KEYS):
        return f"reroute has the unknown argument {unknown[0]!r}, expected {', '.join(sorted(REROUTE_KEYS))}"
    peers = args.get("peers", [])
    if not isinstance(peers, list) or not all(isinstance(peer, str) for peer in peers):
        return f"reroute: peers is {peers!r}, expected a list of nodes"
    for key in ("undo", "dry_run"):
        if not isinstance(args.get(key, False), bool):
            return f"reroute: {key} is {args[key]!r}, expected true or false"
    if not isinstance(args.get("rail", ""), str):
        return f"reroute: rail is {args['rail']!r}, expected the name of a rail"
    return ""


def _sentence(rail: str, count: int, undo: bool, dry_run: bool) -> str:
    what = f"rail {rail} may be used again" if undo else f"rail {rail} is out of use until this is undone"
    moving = f"{count} peer(s) {'would move' if dry_run else 'move'}"
    return f"{'dry run: ' if dry_run else ''}{what}; {moving}"


def _answer(status: str, reason: str, result: Answer | None = None) -> Answer:
    return {"status": status, "reason": reason, "result": result or {}}
