"""Peers learnt from announcements."""

from __future__ import annotations

import pytest

from collectors.peers import PeerLearner
from trainwarden import topics
from trainwarden.bus import Message
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


def test_addresses_for_rdma_are_passed_on_as_they_are_announced(clock: SimulatedClock) -> None:
    bus, heard = MemoryBus(clock), []
    learner = PeerLearner(lambda: bus, clock, Kept(), rdma=lambda node, text: heard.append((node, text)))
    for attributes in ({"rdma_address": "mlx5_0/1=x"}, {"probe_address": "10.0.0.1:9471"}):
        event = TopologyEvent(entity="node:n1", observed_at_ns=clock.now_ns(), attributes=attributes)
        bus.append(topics.TOPOLOGY.name, b"node:n1", encode(event))
        learner.read()
    announce(bus, clock, "n2", "10.0.0.2:9471", removed=True)
    learner.read()
    assert heard == [("n1", "mlx5_0/1=x"), ("n1", ""), ("n2", "")]


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


class Endless:
    """A topic on which something new lies whenever one looks: a thousand nodes announce themselves every half minute."""

    def __init__(self, payload: bytes, error: Exception | None = None) -> None:
        self.polls = 0
        self.closed = False
        self._payload = payload
        self._error = error

    def poll(self, timeout_s: float, max_messages: int = 5000) -> list[Message]:
        self.polls += 1
        assert self.polls < 1000, "reading never comes to an end"
        if self._error is not None:
            raise self._error
        return [Message("tw.topology", 0, self.polls, b"k", self._payload, 0)]

    def close(self) -> None:
        self.closed = True

    def subscriber(self, topics: object) -> Endless:
        return self


def test_peers_are_passed_on_while_announcements_keep_coming(clock: SimulatedClock) -> None:
    event = TopologyEvent(
        entity="node:n1", observed_at_ns=clock.now_ns(), attributes={"probe_address": "10.0.0.1:9471"}
    )
    kept, topic = Kept(), Endless(encode(event))
    PeerLearner(lambda: topic, clock, kept).read()  # type: ignore[arg-type, return-value]
    assert kept.peers == {"n1": "10.0.0.1:9471"}


def test_a_reader_that_fails_is_closed_before_another_is_opened(clock: SimulatedClock) -> None:
    topic = Endless(b"", RuntimeError("nobody thought of this"))
    learner = PeerLearner(lambda: topic, clock, Kept())  # type: ignore[arg-type, return-value]
    learner._worker.close()
    with pytest.raises(RuntimeError) as failure:
        learner.read()
    learner._failed(failure.value)
    assert topic.closed
