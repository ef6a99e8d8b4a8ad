"""Peers learnt from announcements."""

from __future__ import annotations

import pytest

from collectors.peers import PeerLearner
from trainwarden import topics
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import SimulatedClock
from trainwarden.errors import UnavailableError
from trainwarden.records import TopologyEvent, encode


class Kept:
    def __init__(self) -> None:
        self.peers: dict[str, str] = {}

    def learn(self, peers: dict[str, str]) -> None:
        self.peers = peers


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


def announce(bus: MemoryBus, clock: SimulatedClock, node: str, address: str, removed: bool = False) -> None:
    event = TopologyEvent(
        entity=f"node:{node}", observed_at_ns=clock.now_ns(), attributes={"probe_address": address}, removed=removed
    )
    bus.append(topics.TOPOLOGY.name, f"node:{node}".encode(), encode(event))


def test_announced_nodes_are_peers_until_they_fall_silent(clock: SimulatedClock) -> None:
    bus, kept = MemoryBus(clock), Kept()
    learner = PeerLearner(lambda: bus, clock, kept)
    announce(bus, clock, "n1", "10.0.0.1:9471")
    announce(bus, clock, "n2", "10.0.0.2:9471")
    announce(bus, clock, "n3", "not an address")
    bus.append(topics.TOPOLOGY.name, b"x", b"junk")
    bus.append(topics.TOPOLOGY.name, b"j", encode(TopologyEvent(entity="job:j")))
    learner.read()
    assert kept.peers == {"n1": "10.0.0.1:9471", "n2": "10.0.0.2:9471"}
    announce(bus, clock, "n2", "", removed=True)
    announce(bus, clock, "n1", "10.0.0.9:9471")
    learner.read()
    assert kept.peers == {"n1": "10.0.0.9:9471"}
    clock.sleep(601)
    learner.read()
    assert kept.peers == {}


def test_without_a_broker_the_last_picture_stays(clock: SimulatedClock) -> None:
    bus, kept = MemoryBus(clock), Kept()
    reachable = True

    def connect() -> MemoryBus:
        if not reachable:
            raise UnavailableError("no broker")
        return bus

    learner = PeerLearner(connect, clock, kept)
    announce(bus, clock, "n1", "10.0.0.1:9471")
    learner.read()
    learner.close()
    reachable = False
    learner.read()
    assert kept.peers == {"n1": "10.0.0.1:9471"}
    reachable = True
    announce(bus, clock, "n2", "10.0.0.2:9471")
    learner.read()
    assert set(kept.peers) == {"n1", "n2"}
