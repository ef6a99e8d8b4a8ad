"""A whole action service in this process, over fake wardens and the bus in memory."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actions.service import ActionService, make_parts
from tests.actions.builders import NODES, incident
from tests.actions.fake_warden import SECRET, FakeWarden, serve
from trainwarden.bus import Bus, Publisher, Subscriber, connect
from trainwarden.clock import SystemClock
from trainwarden.config import Config, from_table
from trainwarden.records import ActionResult, ActionStatus, DeadLetter, Incident, Plan, decode, encode
from trainwarden.topics import ACTIONS, ALL, DEAD, INCIDENTS

TERMINAL = {ActionStatus(s) for s in ("recommended", "skipped", "denied", "expired", "failed", "reverted", "verified")}
LEASE_S = 0.8


def wait_for(what: str, look: Callable[[], Any], timeout_s: float = 90.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError(f"waited {timeout_s} s in vain for {what}")


@dataclass
class Rig:
    """Wardens, bus, and services on top of them."""

    directory: Path
    wardens: dict[str, FakeWarden]
    urls: dict[str, str]
    bus: Bus
    bus_url: str
    publisher: Publisher
    reader: Subscriber
    dead_reader: Subscriber
    services: list[ActionService] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    results: list[ActionResult] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)
    timeouts_ms: tuple[int, int, int] = (200, 400, 1000)
    """For a connection, a status and any other answer; short, for some wardens here never answer."""

    def config(self, **over: Any) -> Config:
        table: dict[str, Any] = {
            "run_dir": str(self.directory), "cluster": "c", "kafka": {"url": self.bus_url},
            "policy": {"mode": over.pop("mode", "auto")},
            "actions": {"listen": "127.0.0.1:0", "verify_s": over.pop("verify_s", 5), **over.pop("actions", {})},
            "backends": {"warden": {
                "nodes": self.urls, "secret_file": str(self.directory / "secret"), "connect_timeout_ms": self.timeouts_ms[0],
                "status_timeout_ms": self.timeouts_ms[1], "answer_timeout_ms": self.timeouts_ms[2],
            }},
            "rails": {"cool_down": {"job_s": 0, "node_s": 0}, **over.pop("rails", {})},
        }  # fmt: skip
        return from_table({**table, **over})

    def start(self, name: str = "one", wait: bool = True, **over: Any) -> ActionService:
        service = ActionService(make_parts(self.config(**over), SystemClock()), None, name, LEASE_S, catch_up_s=0.05)
        self.services.append(service)
        service.start()
        if wait:
            wait_for("the service to lead", lambda: service.leading and service.caught_up)
        return service

    def report(self, **over: Any) -> Incident:
        """Publish an incident about the wardens' present state."""
        known = {
            "attempt": self.wardens["n0"].generation,
            "last_step": self.wardens["n0"].now_step(),
            "observed_at_ns": time.time_ns(),
        }
        made = incident(**{**known, **over})
        self.publisher.publish(INCIDENTS.name, made.incident_id.encode(), encode(made))
        return made

    def read(self) -> list[ActionResult]:
        for message in self.reader.poll(0.0):
            record = decode(message.value)
            if isinstance(record, Plan):
                self.plans.append(record)
            else:
                self.results.append(record)
        return self.results

    def read_dead(self) -> list[DeadLetter]:
        self.dead.extend(decode(message.value) for message in self.dead_reader.poll(0.0))
        return self.dead

    def ends(self, incident_id: str = "i1") -> list[ActionResult]:
        self.read()
        return [r for r in self.results if not r.verb and r.status in TERMINAL and r.incident_id == incident_id]

    def end(self, incident_id: str = "i1", count: int = 1) -> ActionResult:
        wait_for(f"end {count} of a plan for {incident_id}", lambda: len(self.ends(incident_id)) >= count)
        return self.ends(incident_id)[count - 1]

    def effects(self, *, of: tuple[str, ...] = ("stop", "world", "admit", "kill")) -> list[tuple[str, str]]:
        return [(w.node, verb) for w in self.wardens.values() for verb, _, _ in w.effects if verb in of]

    def steps(self, status: str) -> list[str]:
        self.read()
        return [f"{r.verb} {r.target}" for r in self.results if r.verb and r.status.value == status]


@contextmanager
def rig(tmp_path: Path, bus_url: str = "", **gone: str) -> Iterator[Rig]:
    """Four fake wardens; those in `gone` have this address instead of their own. The bus is in memory unless one is named."""
    (tmp_path / "secret").write_bytes(SECRET)
    url = bus_url or f"memory://{uuid.uuid4()}"
    bus = connect(url)
    bus.ensure_topics(ALL)
    with ExitStack() as stack:
        wardens = {name: FakeWarden(name, members=list(NODES)) for name in NODES}
        urls = {name: stack.enter_context(serve(warden)) for name, warden in wardens.items()} | gone
        made = Rig(
            tmp_path,
            wardens,
            urls,
            bus,
            url,
            bus.publisher(),
            bus.subscriber([ACTIONS.name]),
            bus.subscriber([DEAD.name]),
        )
        yield made
        for service in made.services:
            service.stop()
