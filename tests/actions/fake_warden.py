"""A warden in memory with the real API: it keeps the fence, refuses what the real one refuses, answers a repeated id with the
stored answer, and counts what it really did."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = b"0123456789abcdef0123456789abcdef"


@dataclass
class FakeWarden:
    """One node. `effects` are the commands that were carried out: (verb, id, args)."""

    node: str
    job: str = "demo"
    generation: int = 1
    members: list[str] = field(default_factory=list)
    step: int = 100
    steps_per_s: float = 100.0
    hung: bool = False
    excluded: str = ""
    fence: int = 0
    mute: bool = False
    broken_worlds: int = 0
    goes_back: int = 20
    """So many steps were done since the save that a new world starts from."""
    state: str = "running"
    accepts_saves: bool = True
    has_links: bool = True
    late_commits: int = 0
    micro_ms: float = 0.0
    shares: list[int] = field(default_factory=list)
    applied: str = ""
    change_helps: bool = True
    effects: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    on_effect: Callable[[FakeWarden, str], None] | None = None
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    nonces: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)
    started_s: float = field(default_factory=time.monotonic)

    def status(self) -> dict[str, Any]:
        with self.lock:
            running = not self.excluded
            ranks: list[dict[str, Any]] = [
                {
                    "rank": self.members.index(self.node),
                    "local_rank": 0,
                    "pid": 1,
                    "last_step": self.now_step(),
                    "alive": True,
                }
            ]
            if self.shares:
                ranks[0]["shares"] = self.share()
            return {
                "node": self.node, "job": self.job, "state": self.state if running else "excluded", "generation": self.generation,
                "members": self.members, "ranks": ranks if running and self.node in self.members else [], "launcher_pid": 1,
                "fence": self.fence, "exclusions": [{"node": self.node, "reason": self.excluded}] if self.excluded else [],
            }  # fmt: skip

    def share(self) -> dict[str, Any]:
        """As the hook describes a rank; a step takes 100 ms with the shares of a start and half of it with others."""
        recent_ms = 50.0 if self.applied and self.change_helps else 100.0
        return {
            "share": self.shares[self.members.index(self.node)], "total": sum(self.shares), "world": len(self.shares),
            "applied": self.applied, "micro_ms": self.micro_ms, "fixed_ms": 1.0, "recent_ms": recent_ms, "recent_steps": 9,
            "late": "",
        }  # fmt: skip

    def divide(self, args: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
        """Every rank of the fake takes the change when it is prepared; rank 0's go is only counted."""
        if not self.shares:
            return "failed", "rank 0: this script divides no batch by job.shares", {}
        if args["phase"] == "prepare" and not args["dry_run"]:
            self.shares, self.applied = list(args["shares"]), args["id"]
        return "done", "", {"step": self.now_step() + 2}

    def now_step(self) -> int:
        return self.step if self.hung else self.step + int((time.monotonic() - self.started_s) * self.steps_per_s)

    def handle(self, body: bytes, signature: str) -> tuple[int, dict[str, Any]]:
        if not hmac.compare_digest(hmac.new(SECRET, body, hashlib.sha256).hexdigest(), signature):
            return 401, self.refuse("", "the signature does not fit")
        command = json.loads(body)
        if json.dumps(command, sort_keys=True, separators=(",", ":")).encode() != body:
            return 400, self.refuse("", "not canonical")
        with self.lock:
            if command["id"] in self.answers:
                return 200, self.answers[command["id"]]
            if (why := self.refusal(command)) != "":
                return 409, self.refuse(command["id"], why)
            self.fence = max(self.fence, command["fence"])
            self.nonces.add(command["nonce"])
            status, reason, result = self.carry_out(command["verb"], command["args"])
            answer = {"id": command["id"], "status": status, "reason": reason, "fence": self.fence, "result": result}
            if command["verb"] != "status":
                self.effects.append((command["verb"], command["id"], command["args"]))
                self.answers[command["id"]] = answer
        if self.on_effect is not None and command["verb"] != "status":
            self.on_effect(self, command["verb"])
        return (409 if status == "refused" else 200), answer

    def refuse(self, key: str, reason: str) -> dict[str, Any]:
        self.refusals.append(reason)
        return {"id": key, "status": "refused", "reason": reason, "fence": self.fence, "result": {}}

    def refusal(self, command: dict[str, Any]) -> str:
        if (command["node"], command["job"]) != (self.node, self.job):
            return f"this is {self.node} of {self.job}"
        if time.time_ns() >= command["expires_at_ns"]:
            return "expired"
        if command["nonce"] in self.nonces:
            return "nonce seen"
        return f"fence {command['fence']} is lower than {self.fence}" if command["fence"] < self.fence else ""

    def carry_out(self, verb: str, args: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
        if verb == "stop":
            self.excluded = args["reason"]
            return "done", "excluded", {}
        if verb == "admit":
            self.excluded = ""
            return "done", "admitted", {}
        if verb == "world":
            return self.world(args)
        if verb == "save":
            return self.save(args)
        if verb == "reroute" and not self.has_links:
            return "refused", "no links file", {}
        if verb == "reroute":
            return "done", "moved", {"rail": "a", "moves": [{"peer": "n0", "from": "a", "to": "b"}]}
        if verb == "shares":
            return self.divide(args)
        return "done", "", self.status() if verb == "status" else {}

    def world(self, args: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
        if args["generation"] <= self.generation:
            return "refused", f"generation {args['generation']} is not above {self.generation}", {}
        if self.node not in args["members"]:
            self.excluded = "not a member"
            return "done", "excluded", {}
        self.state = "failed" if self.broken_worlds > 0 else "running"
        self.broken_worlds -= 1
        self.generation, self.members, self.excluded, self.hung = args["generation"], args["members"], "", False
        self.step, self.started_s = max(0, self.now_step() - self.goes_back), time.monotonic()
        return "accepted", "starting", {}

    def save(self, args: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
        rank = str(self.members.index(self.node))
        if self.hung or not self.accepts_saves:
            return "failed", f"no answer from rank(s) {rank}", {}
        if args["phase"] == "arm":
            return "done", "", {"steps": {rank: self.now_step()}, "step_ms": 10.0, "silent": [], "refused": {}}
        if self.late_commits > 0:
            self.late_commits -= 1
            return "failed", f"rank {rank} was already in step {args['step']}", {"late": {rank: args["step"]}}
        return "done", "saved", {"steps": {rank: args["step"]}, "stall_ms": 1.5}

    def did(self, verb: str) -> int:
        return sum(1 for effect in self.effects if effect[0] == verb)


@contextmanager
def serve(warden: FakeWarden, port: int = 0) -> Iterator[str]:
    """The warden's address while it answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(200, warden.status())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(*warden.handle(body, self.headers.get("X-Trainwarden-Signature", "")))

        def reply(self, code: int, value: dict[str, Any]) -> None:
            if warden.mute:
                self.close_connection = True
                return
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
