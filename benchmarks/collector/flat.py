"""Memory and descriptors over very many ticks: the agent, and what its GPU child does, in one process on a clock that is moved.

Messages go nowhere, at once. All else is real: the spool, the hook's socket, a log that grows, files of devices and of this host.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.collector.cost import stand_in
from benchmarks.collector.machine import build_tree
from benchmarks.collector.node import with_recorded_drivers
from benchmarks.collector.surroundings import RANKS, Surroundings
from benchmarks.collector_cost import step_datagram
from collectors import agent
from collectors.nvidia import child, sampler
from collectors.nvidia.library import Library
from collectors.sources.nvidia import NvidiaSource
from tests.collectors.nvml_stub import built
from trainwarden.bus import FailureHandler, Message
from trainwarden.bus.base import Start
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.config import load
from trainwarden.topics import Topic

GROWTH_BAR_BYTES = 2_000_000
FILES_BAR = 3
"""A look in the background may have a file open just when they are counted."""
FIRST_LOOK = 1000


class Nowhere:
    """A bus that counts what it is given, and never says anything."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def publisher(self, on_failure: FailureHandler | None = None) -> Nowhere:
        del on_failure
        return self

    def subscriber(self, topics: Sequence[str], group: str | None = None, start: Start = "earliest") -> Nowhere:
        del topics, group, start
        return self

    def publish(self, topic: str, key: bytes, value: bytes) -> None:
        del key, value
        self.counts[topic] += 1

    def flush(self, timeout_s: float) -> None: ...
    def commit(self) -> None: ...
    def close(self) -> None: ...
    def wait_ready(self, timeout_s: float) -> None: ...
    def ensure_topics(self, topics: Sequence[Topic]) -> None: ...
    def seek_to(self, positions: Mapping[str, int]) -> None: ...

    def poll(self, timeout_s: float, max_messages: int = 5000) -> list[Message]:
        del max_messages
        time.sleep(timeout_s)
        return []

    def positions(self) -> dict[str, int]:
        return {}

    def unread(self) -> int:
        return 0


class MovedTime:
    """The module `time` for the GPU child's code, with the moved clock's monotonic time."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.monotonic_ns = clock.monotonic_ns

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class LocalKeeper:
    """Stands where the keeper of the GPU child stands, and does the child's work itself."""

    silent, restarts, pid = False, 0, 0

    def __init__(self, options: Mapping[str, Any]) -> None:
        import json

        path, prefix, chosen = child.options_of(json.dumps(dict(options)))
        self._sampler = sampler.Sampler(Library(path, prefix), chosen)

    def poll(self) -> list[bytes]:
        """What the child would have sent."""
        return self._sampler.tick()

    def remember(self, names: Mapping[str, str]) -> None: ...
    def shift(self, by_ns: int) -> None: ...
    def close(self) -> None: ...


def measure(folder: Path, ticks: int) -> dict[str, Any]:
    """Figures at a thousand ticks, at each power of ten after it, and at the end."""
    agent.one_heap()
    os.environ["NVML_STUB_STATE"] = str(stand_in(folder, 0).path)
    around = Surroundings(folder, "memory://flat")
    more = f'root = "{build_tree(folder, live_proc=True)}"\n[collector.sources.nvidia]\nlibrary = "{built()}"\n'
    clock, bus = SimulatedClock(), Nowhere()
    agent.build_sources = with_recorded_drivers(agent.build_sources)
    measured = agent.build(load(around.configuration(more)), clock, bus)
    vars(sampler)["time"] = MovedTime(clock)
    for source in measured._parts.sources:
        if isinstance(source, NvidiaSource):
            source._keeper = LocalKeeper(source._options())  # type: ignore[assignment]
    measured.start()
    looks: dict[int, dict[str, Any]] = {}
    began_s = time.process_time()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as hook:
        for done in range(1, ticks + 1):
            tick(measured, clock, hook, folder, done)
            if done == ticks or (done >= FIRST_LOOK and done in (10**exponent for exponent in range(3, 9))):
                looks[done] = {
                    **look(),
                    "messages": sum(bus.counts.values()),
                    "cpu_s": round(time.process_time() - began_s, 1),
                }
                print(f"{done:>8} ticks: {looks[done]}", flush=True)
    measured.close()
    return verdict(looks, ticks)


def tick(measured: agent.Agent, clock: SimulatedClock, hook: socket.socket, folder: Path, step: int) -> None:
    """A second: every rank ends a step, the log grows, the agent ticks."""
    for rank in range(RANKS):
        try:
            hook.sendto(step_datagram(rank, step, RANKS), str(folder / "n0" / "hook.sock"))
        except BlockingIOError:
            time.sleep(0.001)  # as fast as it goes is faster than the socket's thread
    if step % 10 == 0:
        with (folder / "train.log").open("a", encoding="utf-8") as log:
            log.write(f"step {step} loss 2.31\n")
    clock.advance_ns(NS_PER_S)
    measured.tick()


def look() -> dict[str, Any]:
    """Memory, descriptors and threads of this process; of the descriptors the fewest of a few looks."""
    gc.collect()
    files = []
    for _ in range(5):
        time.sleep(0.2)
        files.append(len(os.listdir("/proc/self/fd")))
    return {"rss_bytes": agent.resident_bytes(), "files": min(files), "threads": threading.active_count()}


def verdict(looks: dict[int, dict[str, Any]], ticks: int) -> dict[str, Any]:
    """Whether anything grew after the first look."""
    first, last = looks[min(looks)], looks[max(looks)]
    growth = {name: last[name] - first[name] for name in ("rss_bytes", "files", "threads")}
    flat = growth["rss_bytes"] <= GROWTH_BAR_BYTES and growth["files"] <= FILES_BAR and growth["threads"] <= FILES_BAR
    return {
        "ticks": ticks,
        "looks": looks,
        "growth": growth,
        "growth_bar_bytes": GROWTH_BAR_BYTES,
        "files_bar": FILES_BAR,
        "cpu_us_per_tick": round(1e6 * last["cpu_s"] / ticks),
        "ok": flat,
    }
