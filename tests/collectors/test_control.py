"""Orders from afar and the agent's own pace: bounds, selectors, end, dead letters; thinning, liveness, the metrics page."""

from __future__ import annotations

import itertools
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.agent import Agent, Parts, build
from collectors.control import Control, OrderError, check, selects
from collectors.peers import PeerLearner
from tests.collectors.test_agent import Node, config_of, published
from trainwarden import topics
from trainwarden.bus.base import Start
from trainwarden.bus.memory import MemoryBus, MemorySubscriber
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.errors import UnavailableError
from trainwarden.records import CollectorOrder, DeadLetter, Gap, Tick, TopologyEvent, encode
from trainwarden.selfmetrics import Metrics, serve

MINUTE_NS = 60 * NS_PER_S


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def level() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = root.level
    yield root
    root.setLevel(before)


class Desk:
    """A control with a clock, and what it buries."""

    def __init__(self, clock: SimulatedClock, node: str = "gpu07") -> None:
        self.clock, self.letters = clock, list[tuple[str, str, bytes]]()
        self.metrics = Metrics("test")
        self.control = Control(
            node, clock, self.metrics, lambda: {"rack": "r1"}, lambda *letter: self.letters.append(letter)
        )

    def order(
        self, key: str = "interval_ms", value: str = "5s", nodes: str = "*", for_s: float = 60, at_s: float = 0
    ) -> bytes:
        now_ns = self.clock.now_ns() + int(at_s * NS_PER_S)
        return encode(
            CollectorOrder(
                nodes=nodes, key=key, value=value, observed_at_ns=now_ns, expires_at_ns=now_ns + int(for_s * NS_PER_S)
            )
        )

    @property
    def interval_ms(self) -> int:
        return self.control.interval_ms(1000)


def test_an_order_holds_for_its_time_and_is_undone(clock: SimulatedClock) -> None:
    desk = Desk(clock)
    desk.control.hear(desk.order())
    assert desk.interval_ms == 5000
    clock.advance_ns(59 * NS_PER_S)
    assert desk.interval_ms == 5000
    clock.advance_ns(2 * NS_PER_S)
    assert desk.interval_ms == 1000
    assert 'outcome="ended"} 1' in desk.metrics.page()


def test_the_later_order_replaces_the_earlier_one_in_whatever_order_they_come(clock: SimulatedClock) -> None:
    desk = Desk(clock)
    late, early = desk.order(value="2s", at_s=5), desk.order(value="10s")
    for payload in (late, early, late):
        desk.control.hear(payload)
    assert desk.interval_ms == 2000
    clock.advance_ns(-30 * 3600 * NS_PER_S)
    assert desk.interval_ms == 1000, "a clock that was set back by more than a day does not prolong an order"


@pytest.mark.parametrize("nodes", ["gpu08", "gpu[08-12]", "login*", "rack=r2", "rack"])
def test_an_order_to_others_is_none_to_this_node(clock: SimulatedClock, nodes: str) -> None:
    desk = Desk(clock)
    desk.control.hear(desk.order(nodes=nodes))
    assert (desk.interval_ms, desk.letters) == (1000, [])


def test_an_order_that_is_over_is_not_taken(clock: SimulatedClock) -> None:
    desk = Desk(clock)
    desk.control.hear(desk.order(at_s=-120))
    assert desk.interval_ms == 1000


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        ({"key": "reboot"}, "key 'reboot', expected one of interval_ms, log_level"),
        ({"value": "50"}, "interval_ms '50', expected whole milliseconds between 200 and 60000"),
        ({"value": "2h"}, "interval_ms '2h', expected whole milliseconds"),
        ({"value": "0.5"}, "expected whole milliseconds"),
        ({"value": "soon"}, "'soon' is no value for it"),
        ({"key": "log_level", "value": "TRACE"}, "log_level 'TRACE', expected one of DEBUG"),
        ({"nodes": ""}, "nodes is empty"),
        ({"nodes": "gpu[1-"}, "bracket without its partner"),
        ({"for_s": 0}, "every order ends"),
        ({"for_s": 25 * 3600}, "every order ends"),
    ],
)
def test_what_is_no_order_is_a_dead_letter_and_changes_nothing(
    clock: SimulatedClock, order: dict[str, str], sentence: str
) -> None:
    desk = Desk(clock)
    desk.control.hear(desk.order(**order))  # type: ignore[arg-type]
    [(topic, reason, _)] = desk.letters
    assert topic == "tw.control"
    assert sentence in reason
    assert desk.interval_ms == 1000


@pytest.mark.parametrize(
    "payload", [b"", b"\xff" * 40, b'{"key": "interval_ms"}', encode(Tick()), encode(CollectorOrder())]
)
def test_other_bytes_are_a_dead_letter(clock: SimulatedClock, payload: bytes) -> None:
    desk = Desk(clock)
    desk.control.hear(payload)
    assert len(desk.letters) == 1


@settings(max_examples=100, deadline=None)
@given(
    st.text(max_size=40),
    st.sampled_from(["interval_ms", "log_level", "x"]),
    st.text(max_size=12),
    st.integers(-(2**62), 2**62),
)
def test_any_order_is_checked_without_harm(nodes: str, key: str, value: str, expires_ns: int) -> None:
    desk = Desk(SimulatedClock())
    desk.control.hear(
        encode(CollectorOrder(nodes=nodes, key=key, value=value, observed_at_ns=1, expires_at_ns=expires_ns))
    )
    assert desk.interval_ms == 1000 or not desk.letters


def test_a_good_order_passes_and_selectors_combine() -> None:
    check(CollectorOrder(nodes="a,b[1-2]", key="log_level", value="DEBUG", observed_at_ns=5, expires_at_ns=6))
    assert selects("x, rack=r1", "n", {"rack": "r1"})
    with pytest.raises(OrderError):
        selects("gpu07,gpu[", "gpu07", {})


def test_the_log_level_goes_back_to_what_it_was(clock: SimulatedClock, level: logging.Logger) -> None:
    level.setLevel(logging.ERROR)
    desk = Desk(clock)
    desk.control.hear(desk.order("log_level", "DEBUG"))
    desk.control.apply_log_level()
    assert level.level == logging.DEBUG
    desk.control.hear(desk.order("log_level", "WARNING", at_s=1))
    desk.control.apply_log_level()
    assert level.level == logging.WARNING
    clock.advance_ns(2 * MINUTE_NS)
    desk.control.apply_log_level()
    assert level.level == logging.ERROR


# --- in the agent -------------------------------------------------------------------------------------------------------------


def controlled(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock, spool_bytes: int = 0) -> tuple[Node, Control]:
    """A node whose agent takes orders, and thins its ticks by a spool of `spool_bytes`."""
    node = Node(tmp_path, bus, clock)
    control = Control("n0", clock, node.metrics, dict, node.outbox.dead)
    old = node.agent._parts
    parts = Parts(
        clock,
        old.spool,
        old.outbox,
        old.sender,
        old.ranks,
        old.sources,
        old.metrics,
        old.announcer,
        None,
        control,
        spool_bytes,
    )
    node.agent = Agent("n0", topics.node_block("n0"), 1000, parts)
    return node, control


def test_the_agent_ticks_as_ordered_on_the_grid_and_as_before_afterwards(tmp_path: Path, clock: SimulatedClock) -> None:
    bus = MemoryBus(clock)
    node, control = controlled(tmp_path, bus, clock)
    node.ticks(2)
    control.hear(Desk(clock).order(value="5s", for_s=17))
    node.ticks(8)
    ticks = published(bus, Tick, topics.TICKS)
    gaps_s = [round((b.observed_at_ns - a.observed_at_ns) / NS_PER_S) for a, b in itertools.pairwise(ticks)]
    assert gaps_s[1] == 1
    assert gaps_s[3:5] == [5, 5]
    assert gaps_s[-2:] == [1, 1]
    assert sorted({tick.interval_ms for tick in ticks}) == [1000, 5000]
    assert node.metrics.value("tw_ticks_missed_total") == 0


def test_a_spool_that_is_filling_thins_the_ticks_until_it_is_empty_again(tmp_path: Path, clock: SimulatedClock) -> None:
    bus = MemoryBus(clock)
    node, _ = controlled(tmp_path, bus, clock, spool_bytes=20_000)
    node.ticks(1)
    bus.available = False
    for _ in range(2000):
        node.ticks(1)
        if node.agent._interval_ms == 5000:
            break
    assert node.spool.size_bytes > 10_000
    node.ticks(1)
    bus.available = True
    node.sender.deliver()
    node.ticks(2)
    ticks = published(bus, Tick, topics.TICKS)
    thinned = [tick for tick in ticks if Gap("agent", "spool_pressure") in tick.gaps]
    assert [tick.interval_ms for tick in thinned] == [5000] * len(thinned)
    assert thinned
    assert ticks[-1].gaps == ()
    assert ticks[-1].interval_ms == 1000
    assert 'tw_tick_interval_seconds{component="collector"} 1' in node.metrics.page()


def test_liveness_asks_for_ticks_and_for_nothing_else(tmp_path: Path, clock: SimulatedClock) -> None:
    node = Node(tmp_path, MemoryBus(clock), clock)
    assert node.agent.sick() == ""
    node.toys[0].problem = OSError("the driver is gone")
    for _ in range(3):
        node.ticks(10)
        assert node.agent.sick() == ""
    clock.advance_ns(16 * NS_PER_S)
    assert node.agent.sick() == "no tick for 16 s, expected one every 1000 ms"


def test_the_page_has_the_newest_samples_and_no_old_ones(tmp_path: Path, clock: SimulatedClock) -> None:
    node = Node(tmp_path, MemoryBus(clock), clock)
    assert node.agent.page() == ""
    node.ticks(2)
    assert node.agent.page() == 'trainwarden_toy_count{node="n0",device="toy"} 2\n'
    clock.advance_ns(4 * NS_PER_S)
    assert node.agent.page() == ""


def test_the_pages_of_the_server(tmp_path: Path, clock: SimulatedClock) -> None:
    node = Node(tmp_path, MemoryBus(clock), clock)
    node.ticks(1)
    server = serve(node.metrics, "127.0.0.1", 0, node.agent.sick, node.agent.page)
    base = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with urllib.request.urlopen(f"{base}/metrics", timeout=60) as answer:
            assert b"trainwarden_toy_count" in answer.read()
        with urllib.request.urlopen(f"{base}/healthz", timeout=60) as answer:
            assert answer.read() == b"ok\n"
        clock.advance_ns(MINUTE_NS)
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(f"{base}/healthz", timeout=60)
        assert refusal.value.code == 503
        assert b"no tick for 60 s" in refusal.value.read()
    finally:
        server.shutdown()
        server.server_close()


def test_an_order_on_the_bus_reaches_the_agent_and_a_wrong_one_the_dead_letters(
    tmp_path: Path, clock: SimulatedClock
) -> None:
    bus = MemoryBus(clock)
    agent = build(config_of(tmp_path, "n0", rack="r1", sources={"steps": {"enabled": False}}), clock, bus)
    learner = agent._parts.learner
    assert learner is not None
    bus.append(topics.CONTROL.name, b"interval_ms", Desk(clock).order(nodes="rack=r1"))
    bus.append(topics.CONTROL.name, b"x", b"no order")
    learner.read()
    agent.tick()
    assert agent._interval_ms == 5000
    agent.close()
    assert [letter.topic for letter in published(bus, DeadLetter, topics.DEAD)] == ["tw.control"]


def test_where_the_topic_of_orders_does_not_exist_peers_are_still_learnt(clock: SimulatedClock) -> None:
    class Older(MemoryBus):
        def subscriber(
            self, topics: Sequence[str], group: str | None = None, start: Start = "earliest"
        ) -> MemorySubscriber:
            if "tw.control" in topics:
                raise UnavailableError("topic tw.control does not exist")
            return super().subscriber(topics, group, start)

    class Kept:
        peers: dict[str, str] = {}  # noqa: RUF012

        def learn(self, peers: dict[str, str]) -> None:
            self.peers = peers

    bus, kept = Older(clock), Kept()
    event = TopologyEvent(
        entity="node:n1", observed_at_ns=clock.now_ns(), attributes={"probe_address": "10.0.0.1:9471", "leaf": "L1"}
    )
    bus.append(topics.TOPOLOGY.name, b"node:n1", encode(event))
    places: dict[str, object] = {}
    PeerLearner(lambda: bus, clock, kept, places.update, {topics.CONTROL.name: lambda _: None}).read()
    assert kept.peers == {"n1": "10.0.0.1:9471"}
    assert str(places["n1"]) == "Place(leaf='L1', rail='')"
