"""The warden's links: what it is asked (``reroute``), what it reports, what it adds to the environment of training processes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from trainwarden_hook import nccl
from trainwarden_hook.addresses import UsageError
from trainwarden_hook.escape import Escape
from trainwarden_hook.mptcp import preload_library
from trainwarden_hook.paths import Move
from trainwarden_hook.rails import read_rails
from trainwarden_hook.warden_state import Memory
from trainwarden_hook.wire import Sender

log = logging.getLogger("trainwarden.links")
NCCL_LOOK_S = 0.25
REROUTE_KEYS = frozenset({"rail", "peers", "undo", "dry_run", "reason"})
Answer = dict[str, Any]
Persist = Callable[[Callable[[Memory], None]], None]


class WardenLinks:
    """Link escape as a part of the warden.

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
        self._job, self._node, self._generation = memory.job, memory.node, generation
        self._sender = Sender(os.environ.get("TRAINWARDEN_SOCKET") or None)
        rails = read_rails(path, memory.node)
        library = preload_library(run_dir) if rails.mptcp else ""
        earlier = [(rail, peer) for rail, peer in memory.avoided]
        self._escape = Escape(rails, secret, self._report, earlier)
        self._tail = nccl.LogTail(os.path.join(run_dir, "logs", "generation-*", "rank-*.*")) if rails.nccl else None
        self.environment = self._environment(library, os.environ)
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    def _environment(self, library: str, given: Mapping[str, str]) -> dict[str, str]:
        """What is added to the environment of the launcher and its workers."""
        added = nccl.environment(given) if self._tail is not None else {}
        if library:
            added["LD_PRELOAD"] = " ".join(filter(None, [library, given.get("LD_PRELOAD", "")]))
        return added

    def start(self) -> None:
        """Begin to watch."""
        self._escape.start()
        if self._tail is not None:
            self._watcher = threading.Thread(target=self._watch_nccl, name="trainwarden-nccl", daemon=True)
            self._watcher.start()

    def close(self) -> None:
        """End, and remove every route and endpoint of ours."""
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join()
        self._escape.close()
        self._sender.close()

    def status(self) -> dict[str, Any]:
        """For the status page."""
        return self._escape.status()

    def reroute(self, args: Mapping[str, Any], persist: Persist) -> Answer:
        """Take a rail out of use, or (``undo``) back; ``dry_run`` only says what would move. Twice is the same as once."""
        if problem := _malformed(args):
            return _answer("refused", problem)
        rail = str(args.get("rail") or self._escape.rail_in_use())
        undo, dry_run = bool(args.get("undo")), bool(args.get("dry_run"))
        try:
            moves = self._escape.order(rail, list(args.get("peers", ())), undo, dry_run)
        except UsageError as error:
            return _answer("refused", str(error))
        if not dry_run:
            avoided = [list(pair) for pair in self._escape.avoided]
            persist(lambda memory: setattr(memory, "avoided", avoided))
        return _answer("done", _sentence(rail, moves, undo, dry_run), {"rail": rail, "moves": self._named(moves)})

    def _named(self, moves: list[Move]) -> list[dict[str, str]]:
        names = self._escape.rails.names
        return [{"peer": move.peer, "from": names[move.source], "to": names[move.target]} for move in moves]

    # -- reports

    def _report(self, fields: dict[str, Any]) -> None:
        identity = {"job": self._job, "generation": self._generation(), "node": self._node, "rank": 0}
        self._sender.send("link", {**identity, **fields})

    def _watch_nccl(self) -> None:
        while not self._ended.wait(NCCL_LOOK_S):
            if self._tail is None:
                return
            for event in self._tail.read():
                log.warning("NCCL %s: %s", event.kind, event.line)
                self._report({"event": f"nccl_{event.kind}", "interface": event.device, "cause": event.line})


def _malformed(args: Mapping[str, Any]) -> str:
    if unknown := sorted(set(args) - REROUTE_KEYS):
        return f"reroute has the unknown argument {unknown[0]!r}, expected {', '.join(sorted(REROUTE_KEYS))}"
    peers = args.get("peers", [])
    if not isinstance(peers, list) or not all(isinstance(peer, str) for peer in peers):
        return f"reroute: peers is {peers!r}, expected a list of nodes"
    if not isinstance(args.get("rail", ""), str):
        return f"reroute: rail is {args['rail']!r}, expected the name of a rail"
    return ""


def _sentence(rail: str, moves: list[Move], undo: bool, dry_run: bool) -> str:
    what = f"rail {rail} may be used again" if undo else f"rail {rail} is out of use until this is undone"
    count = f"{len(moves)} peer(s) {'would move' if dry_run else 'move'}"
    return f"{'dry run: ' if dry_run else ''}{what}; {count}"


def _answer(status: str, reason: str, result: Answer | None = None) -> Answer:
    return {"status": status, "reason": reason, "result": result or {}}
