"""Two nodes as network namespaces joined by a rail: the agent's sources see their own namespace, and probes see the rail's faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

NODES = ("twtest0", "twtest1")

AGENT = """
import json, sys, time
from pathlib import Path
from collectors.agent import build
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import SystemClock
from trainwarden.config import from_table
from trainwarden.records import decode

directory, own, other = sys.argv[1:]
bus = MemoryBus()
agent = build(from_table({"run_dir": directory, "collector": {"node": own, "rail_address": own, "peers": {"peer": f"{other}:9471"},
              "sources": {"mesh": {"probes_per_s": 20.0}}}}), SystemClock(), bus)
agent.start()
tables = {family.name: family for source in agent._parts.sources for family in source.families}
reader = bus.subscriber(["tw.ticks"])
while True:
    time.sleep(0.3)
    agent.tick()
    for message in reader.poll(5.0):
        print(json.dumps({block.family: {device: dict(zip([m.name for m in tables[block.family].metrics], row))
              for device, row in block.rows()} for block in decode(message.value).blocks}), flush=True)
"""


def can_make_namespaces() -> bool:
    if os.geteuid() != 0:
        return False
    made = subprocess.run(["ip", "netns", "add", "twtestx"], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", "twtestx"], capture_output=True, check=False)
    return made


pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root and network namespaces"),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def rail() -> Iterator[None]:
    """Two namespaces, each with rail0 at 10.97.0.1 and .2."""
    for node in NODES:
        subprocess.run(["ip", "netns", "del", node], capture_output=True, check=False)
        ip("netns", "add", node)
    ip("link", "add", "rail0", "netns", NODES[0], "type", "veth", "peer", "name", "rail0", "netns", NODES[1])
    for number, node in enumerate(NODES):
        ip("-n", node, "addr", "add", f"10.97.0.{number + 1}/24", "dev", "rail0")
        ip("-n", node, "link", "set", "rail0", "up")
        ip("-n", node, "link", "set", "lo", "up")
    yield
    for node in NODES:
        ip("netns", "del", node)


def until(agent: subprocess.Popen[str], wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first tick of an agent that satisfies `wanted` (the test's time-out ends the wait)."""
    assert agent.stdout is not None
    for line in agent.stdout:
        tick: dict[str, Any] = json.loads(line)
        if wanted(tick):
            return tick
    raise AssertionError(f"the agent ended with code {agent.wait()}")


def mesh(tick: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = tick.get("mesh", {}).get("peer", {"sent_count": 0, "lost_count": 0})
    return found


def is_healthy(tick: dict[str, Any]) -> bool:
    return mesh(tick)["sent_count"] >= 3 and mesh(tick)["lost_count"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("rail")
def test_probes_and_interfaces_of_two_namespaces(tmp_path: Path) -> None:
    with ExitStack() as stack:
        agents = []
        for number, node in enumerate(NODES):
            addresses = f"10.97.0.{number + 1}", f"10.97.0.{2 - number}"
            command = ["ip", "netns", "exec", node, sys.executable, "-c", AGENT, str(tmp_path), *addresses]
            agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(agents[-1].wait)
            stack.callback(agents[-1].kill)
        for agent in agents:
            healthy = until(agent, lambda tick: is_healthy(tick) and 0 <= mesh(tick)["rtt_ms"] < 50)
            assert list(healthy["nic"]) == ["rail0"]
            assert (healthy["nic"]["rail0"]["carrier"], healthy["nic"]["rail0"]["role"]) == (1, 1)
        if subprocess.run(["tc", "-n", NODES[1], "qdisc", "add", "dev", "rail0", "root", "netem", "delay", "80ms"],
                          capture_output=True, check=False).returncode == 0:  # fmt: skip
            until(agents[0], lambda tick: 80 <= mesh(tick)["rtt_ms"] < 200)
            ip("netns", "exec", NODES[1], "tc", "qdisc", "del", "dev", "rail0", "root")
            until(agents[0], lambda tick: mesh(tick)["rtt_ms"] < 50)
        ip("-n", NODES[1], "link", "set", "rail0", "down")
        down = until(agents[0], lambda tick: mesh(tick)["lost_count"] >= 3 and tick["nic"]["rail0"]["carrier"] == 0)
        assert down["nic"]["rail0"]["up"] == 1
        until(agents[1], lambda tick: mesh(tick)["lost_count"] >= 3 and tick["nic"]["rail0"]["up"] == 0)
        ip("-n", NODES[1], "link", "set", "rail0", "up")
        until(agents[0], is_healthy)
