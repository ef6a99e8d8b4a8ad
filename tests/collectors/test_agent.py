"""The agent on a simulated clock and an in-memory bus: ticks, gaps, outages, urgency, announcements."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from collectors import agent as agent_module
from collectors import eventrate, outbox
from collectors.agent import Agent, Parts, build, collect_once
from collectors.announce import Announcer
from collectors.base import Context, Facts, Family, Sample, Source, SourceError, family
from collectors.files import Files
from collectors.outbox import Outbox, Sender
from collectors.ranks import RankBoard
from collectors.runner import Standing
from collectors.spool import Spool
from trainwarden import topics
from trainwarden.bus import FailureHandler
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_MS, NS_PER_S, SimulatedClock, SystemClock
from trainwarden.config import Config, from_table
from trainwarden.embedded.ports import free_port
from trainwarden.errors import BusError, ConfigError, NoTopicError, UsageError
from trainwarden.records import Catalog, DeadLetter, LogEvent, Record, StepReport, StepRow, Tick, TopologyEvent, decode
from trainwarden.selfmetrics import Metrics

R = TypeVar("R", bound=Record)

TOY = family("toy", "toy", ("count", "1", "gauge", "how often it was asked"))


class Toy(Source):
    """A source whose behaviour a test sets."""

    name = ""  # not a plugin
    families: ClassVar[tuple[Family, ...]] = (TOY,)
    Settings = object

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self.name = str(settings)  # type: ignore[misc]
        self.asked = 0
        self.problem: Exception | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.returned = threading.Event()

    def sample(self, now_ns: int) -> Sample:
        self.asked += 1
        self.hold.wait()
        self.returned.set()
        if self.problem is not None:
            raise self.problem
        return Sample(TOY.block({self.name: {"count": float(self.asked)}}))


class Node:
    """One agent with toys for sources."""

    def __init__(
        self, directory: Path, bus: MemoryBus, clock: SimulatedClock, name: str = "n0", toys: Sequence[str] = ("toy",)
    ) -> None:
        self.bus, self.clock, self.name = bus, clock, name
        self.metrics = Metrics("collector")
        self.spool = Spool(directory / name, 1024 * 1024, self.metrics)
        block = topics.node_block(name)
        self.outbox = Outbox("c", name, f"boot-{name}", block, clock, self.spool, self.metrics)
        self.sender = Sender(lambda: bus, self.spool, clock, self.metrics)
        self.ranks = RankBoard()
        self.facts = Facts("10.0.0.1", "10.0.0.1:9471")
        context = Context(
            name,
            clock,
            Files(directory, clock),
            self.ranks,
            self.outbox,
            self.metrics,
            directory,
            directory,
            self.facts,
        )
        self.toys = [Toy(context, toy) for toy in toys]
        announcer = Announcer(name, "rack7", clock, self.outbox, self.ranks, self.facts, self.toys)
        parts = Parts(clock, self.spool, self.outbox, self.sender, self.ranks, self.toys, self.metrics, announcer)
        self.agent = Agent(name, block, 1000, parts)

    def ticks(self, count: int) -> None:
        """Tick at the next `count` moments of the grid, and send."""
        for _ in range(count):
            self.clock.advance_ns(self.agent.next_tick_ns() - self.clock.now_ns())
            self.agent.tick()
            self.sender.deliver()


def published(bus: MemoryBus, kind: type[R], topic: topics.Topic) -> list[R]:
    """Records of one topic, in order per partition."""
    records = [decode(message.value) for log in bus.partitions(topic.name) for message in log]
    assert all(isinstance(record, kind) for record in records)
    return records


def row(step: int) -> StepRow:
    return StepRow(step=step, phase="train", started_at_ns=step, duration_ms=60.0)


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def bus(clock: SimulatedClock) -> MemoryBus:
    return MemoryBus(clock)


def test_one_tick_per_second_on_the_grid_with_a_stable_jitter(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock
) -> None:
    node = Node(tmp_path, bus, clock)
    node.ticks(3)
    ticks = published(bus, Tick, topics.TICKS)
    offsets = {tick.observed_at_ns % NS_PER_S for tick in ticks}
    assert len(offsets) == 1
    assert 0 <= offsets.pop() < 200 * NS_PER_MS
    assert [b.observed_at_ns - a.observed_at_ns for a, b in itertools.pairwise(ticks)] == [NS_PER_S, NS_PER_S]
    assert [(t.cluster, t.node, t.seq, t.boot_id, t.interval_ms) for t in ticks] == [
        ("c", "n0", n, "boot-n0", 1000) for n in range(3)
    ]
    assert [t.blocks[0].rows() for t in ticks] == [[("toy", (n,))] for n in (1.0, 2.0, 3.0)]
    assert not any(t.spooled or t.gaps for t in ticks)


def test_jitter_differs_between_nodes_but_not_between_runs(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock
) -> None:
    first = [Node(tmp_path / "a", bus, clock, f"n{i}").agent.next_tick_ns() for i in range(8)]
    again = [Node(tmp_path / "b", bus, clock, f"n{i}").agent.next_tick_ns() for i in range(8)]
    assert first == again
    assert len(set(first)) > 4


def test_messages_are_keyed_by_the_nodes_block(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    node = Node(tmp_path, bus, clock)
    node.ticks(1)
    [message] = [m for log in bus.partitions(topics.TICKS.name) for m in log]
    assert message.key == topics.node_block("n0")


def test_a_hanging_source_costs_its_own_columns_only(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    node = Node(tmp_path, bus, clock, toys=("well", "stuck"))
    node.agent._round._deadline_s = 1.0  # of real time: enough for the one that is well, also on a starved machine
    stuck = node.toys[1]
    stuck.hold.clear()
    node.ticks(3)
    ticks = published(bus, Tick, topics.TICKS)
    assert [[(g.source, g.reason) for g in t.gaps] for t in ticks] == [
        [("stuck", "deadline")],
        [("stuck", "hung")],
        [("stuck", "hung")],
    ]
    assert all(t.blocks[0].devices == ("well",) for t in ticks)
    assert stuck.asked == 1


def test_a_source_that_came_back_rests_longer_each_time(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    node = Node(tmp_path, bus, clock, toys=("slow",))
    node.agent._round._deadline_s = 1.0  # long enough for the thread to begin: what was not begun is no miss
    slow = node.toys[0]
    for asked in (1, 2, 3):
        slow.hold.clear()
        slow.returned.clear()
        while slow.asked < asked:
            node.ticks(1)
        slow.hold.set()
        assert slow.returned.wait(60)
        finished(node.agent._round._standings[0])
    node.agent._round._deadline_s = 10.0
    node.ticks(12)
    reasons = [t.gaps[0].reason if t.gaps else "ok" for t in published(bus, Tick, topics.TICKS)]
    expected = ["deadline", "backoff", "deadline", "backoff", "backoff", "deadline", *["backoff"] * 4]
    assert reasons == [*expected, *["ok"] * (len(reasons) - len(expected))]


def finished(standing: Standing) -> None:
    """Return once the late answer was thrown away."""
    while standing.busy:
        threading.Event().wait(0.001)


def test_all_but_one_may_hang_and_that_one_is_still_asked(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock
) -> None:
    node = Node(tmp_path, bus, clock, toys=("a", "b", "c", "well"))
    node.agent._round._deadline_s = 0.5
    for toy in node.toys[:3]:
        toy.hold.clear()
    node.ticks(1)
    node.agent._round._deadline_s = 10.0
    node.ticks(1)
    for tick, reason in zip(published(bus, Tick, topics.TICKS), ("deadline", "hung"), strict=True):
        assert [(g.source, g.reason) for g in tick.gaps] == [(name, reason) for name in "abc"]
        assert tick.blocks[0].devices == ("well",)


def test_sources_that_are_slow_together_do_not_wait_for_one_another(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock
) -> None:
    """Each waits until all have been asked: one after the other, none would ever answer."""
    node = Node(tmp_path, bus, clock, toys=("a", "b", "c"))
    node.agent._round._deadline_s = 10.0
    together = threading.Barrier(3)
    for toy in node.toys:
        toy.hold.wait = lambda timeout=None: together.wait() >= 0  # type: ignore[method-assign, misc]
    node.ticks(1)
    [tick] = published(bus, Tick, topics.TICKS)
    assert ([device for block in tick.blocks for device in block.devices], tick.gaps) == (["a", "b", "c"], ())


def test_threads_that_hung_end_when_they_come_back(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    before = source_threads()
    node = Node(tmp_path, bus, clock, toys=("a", "b"))
    node.agent._round._deadline_s = 0.05
    for toy in node.toys:
        toy.hold.clear()
    node.ticks(3)
    assert len(source_threads() - before) >= 2
    for toy in node.toys:
        toy.hold.set()
    node.agent.close()
    for thread in source_threads() - before:
        thread.join(60)
        assert not thread.is_alive()


def source_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "tw-sources"}


@pytest.mark.parametrize(
    ("problem", "reason"),
    [(PermissionError(13, "x"), "permission"), (FileNotFoundError(2, "x"), "missing"), (OSError(5, "x"), "eio"),
     (SourceError("odd", "x"), "odd"), (ZeroDivisionError(), "error")],
)  # fmt: skip
def test_every_failure_has_a_reason(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock, problem: Exception, reason: str
) -> None:
    node = Node(tmp_path, bus, clock)
    node.toys[0].problem = problem
    node.ticks(1)
    [tick] = published(bus, Tick, topics.TICKS)
    assert [(g.source, g.reason) for g in tick.gaps] == [("toy", reason)]
    assert tick.blocks == ()
    node.toys[0].problem = None
    node.ticks(1)
    assert published(bus, Tick, topics.TICKS)[-1].gaps == ()


def test_broker_away_and_back(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    node = Node(tmp_path, bus, clock)
    node.ticks(2)
    bus.available = False
    for n in range(10):
        node.outbox.step("j", 1, 0, 4, row(n))
        node.outbox.log(LogEvent(source="kernel", code=f"xid:{n}"), urgent=True)
        node.ticks(1)
    assert len(published(bus, Tick, topics.TICKS)) == 2
    assert node.sender.backoff_s > 0
    bus.available = True
    node.ticks(2)
    ticks = published(bus, Tick, topics.TICKS)
    assert [t.seq for t in ticks] == list(range(14))
    assert [t.spooled for t in ticks] == [False] * 2 + [True] * 8 + [False] * 4  # three seconds count as waiting
    assert [r.step for report in published(bus, StepReport, topics.STEPS) for r in report.rows] == list(range(10))
    assert [e.code for e in published(bus, LogEvent, topics.EVENTS)] == [f"xid:{n}" for n in range(10)]
    assert node.sender.backoff_s == 0
    assert node.spool.size_bytes == 0
    assert node.metrics.value("tw_spooled_records_total") == 8


def test_what_waited_survives_the_death_of_the_agent(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    first = Node(tmp_path, bus, clock)
    bus.available = False
    first.outbox.log(LogEvent(code="xid:79"), urgent=True)
    first.ticks(2)
    os.close(first.spool._owner)  # kill -9: nothing was closed, the lock is freed by the kernel
    bus.available = True
    Node(tmp_path, bus, clock).sender.deliver()
    assert [e.code for e in published(bus, LogEvent, topics.EVENTS)] == ["xid:79"]
    assert [t.seq for t in published(bus, Tick, topics.TICKS)] == [0, 1]


def test_a_batch_that_failed_in_its_middle_is_sent_again_whole(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock
) -> None:
    node = Node(tmp_path, bus, clock)
    for n in range(4):
        node.outbox.log(LogEvent(code=f"c:{n}"), urgent=False)
    real, calls = bus.append, 0

    def append(topic: str, key: bytes, value: bytes) -> None:
        nonlocal calls
        calls += 1
        real(topic, key, value)
        if calls == 2:
            bus.available = False

    bus.append = append  # type: ignore[method-assign]
    assert not node.sender.deliver()
    bus.available = True
    assert node.sender.deliver()
    seqs = [e.seq for e in published(bus, LogEvent, topics.EVENTS)]
    assert seqs == [0, 1, 0, 1, 2, 3]  # at least once, in order; receivers drop repeats by seq


def test_a_line_without_a_code_goes_with_the_lines_and_one_row_of_numbers_goes_over_both(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock
) -> None:
    node = Node(tmp_path, bus, clock)
    for code in ("", "xid:79", "", "worker_exit:0"):
        node.outbox.log(LogEvent(code=code), urgent=False)
    assert node.sender.deliver()
    found = {topic: published(bus, LogEvent, topic) for topic in (topics.EVENTS, topics.LOGS)}
    assert [(e.code, e.seq) for e in found[topics.EVENTS]] == [("xid:79", 1), ("worker_exit:0", 3)]
    assert [(e.code, e.seq) for e in found[topics.LOGS]] == [("", 0), ("", 2)]


def test_a_code_that_is_said_in_floods_keeps_no_other_waiting_and_nothing_is_left_out(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock
) -> None:
    node = Node(tmp_path, bus, clock)
    for _ in range(2000):
        node.outbox.log(LogEvent(code="xid:31"), urgent=False)
    node.outbox.log(LogEvent(code="worker_exit:-9"), urgent=True)
    assert node.sender.deliver()
    prompt, rest = (published(bus, LogEvent, topic) for topic in (topics.EVENTS, topics.LOGS))
    assert [e.code for e in prompt] == ["xid:31"] * int(eventrate.BURST) + ["worker_exit:-9"]
    assert sorted(e.seq for e in (*prompt, *rest)) == list(range(2001))
    assert node.metrics.value("tw_events_demoted_total") == len(rest)
    clock.sleep(1.0)
    for _ in range(100):
        node.outbox.log(LogEvent(code="xid:31"), urgent=False)
    assert node.sender.deliver()
    assert len(published(bus, LogEvent, topics.EVENTS)) == len(prompt) + eventrate.PER_S


class Narrow:
    """A publisher to a broker without the topic for events; `missing` as long as it has none. Nothing of a refused flush is sent."""

    missing: ClassVar[set[str]] = set()

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self._waiting: list[tuple[str, bytes, bytes]] = []

    def publish(self, topic: str, key: bytes, value: bytes) -> None:
        self._waiting.append((topic, key, value))

    def flush(self, timeout_s: float) -> None:
        waiting, self._waiting = self._waiting, []
        for topic, _, _ in waiting:
            if topic in self.missing:
                raise NoTopicError(topic)
        for message in waiting:
            self._bus.append(*message)

    def close(self) -> None: ...


def test_a_broker_without_the_topic_for_events_gets_them_with_the_lines_until_it_has_it(
    tmp_path: Path,
    bus: MemoryBus,
    clock: SimulatedClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A collector that was upgraded before the topics were made must not keep its ticks on disk."""
    monkeypatch.setattr(bus, "publisher", lambda on_failure: Narrow(bus))
    monkeypatch.setattr(Narrow, "missing", {"tw.events"})
    node = Node(tmp_path, bus, clock)
    node.outbox.log(LogEvent(code="xid:79"), urgent=True)
    node.ticks(3)
    node.outbox.log(LogEvent(code="xid:94"), urgent=True)
    node.ticks(1)
    assert [e.code for e in published(bus, LogEvent, topics.LOGS)] == ["xid:79", "xid:94"]
    assert len(published(bus, Tick, topics.TICKS)) == 4
    assert node.spool.size_bytes == 0
    assert caplog.text.count("no topic tw.events") == 1
    monkeypatch.setattr(Narrow, "missing", set())
    clock.sleep(outbox.DETOUR_NS / NS_PER_S)
    node.outbox.log(LogEvent(code="xid:95"), urgent=True)
    assert node.sender.deliver()
    assert [e.code for e in published(bus, LogEvent, topics.EVENTS)] == ["xid:95"]


def test_a_broker_without_another_topic_is_waited_for(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus, "publisher", lambda on_failure: Narrow(bus))
    monkeypatch.setattr(Narrow, "missing", {"tw.logs"})
    node = Node(tmp_path, bus, clock)
    node.outbox.log(LogEvent(line="plain"), urgent=False)
    assert not node.sender.deliver()
    assert node.spool.size_bytes > 0
    monkeypatch.setattr(Narrow, "missing", set())
    assert node.sender.deliver()
    assert [e.line for e in published(bus, LogEvent, topics.LOGS)] == ["plain"]


def test_codes_without_end_are_counted_together_and_old_ones_forgotten() -> None:
    rate = eventrate.EventRate()
    admitted = sum(rate.admits(f"xid:{number}", 0) for number in range(10_000))
    assert admitted == eventrate.CODES + eventrate.BURST
    assert not rate.admits("xid:one more", 0)
    assert not rate.admits("", 0)
    assert rate.admits("xid:one more", 2 * NS_PER_S), "the first have been silent since"


def test_urgent_events_do_not_wait_for_the_tick(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    node = Node(tmp_path, bus, clock)
    node.outbox.step("j", 1, 0, 4, row(7))
    assert not node.outbox.waiting.is_set()
    clock.sleep(0.3)
    node.outbox.log(LogEvent(code="worker_exit:-9"), urgent=True)
    assert node.outbox.waiting.is_set()
    node.sender.deliver()
    assert [e.code for e in published(bus, LogEvent, topics.EVENTS)] == ["worker_exit:-9"]
    assert [r.step for report in published(bus, StepReport, topics.STEPS) for r in report.rows] == [7]


def test_a_storm_of_urgent_events_does_not_split_step_reports(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock
) -> None:
    node = Node(tmp_path, bus, clock)
    clock.sleep(1)
    for n in range(40):
        node.outbox.step("j", 1, 0, 4, row(n))
        node.outbox.log(LogEvent(code="x"), urgent=True)
        clock.sleep(0.01)
    node.ticks(1)
    reports = published(bus, StepReport, topics.STEPS)
    assert [r.step for report in reports for r in report.rows] == list(range(40))
    assert len(reports) <= 3


def test_steps_of_each_rank_and_attempt_are_one_report_per_tick(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock
) -> None:
    node = Node(tmp_path, bus, clock)
    for step in range(3):
        for rank in (0, 1):
            node.outbox.step("j", 1, rank, 2, row(step))
    node.outbox.step("j", 2, 0, 2, row(0))
    node.ticks(1)
    reports = published(bus, StepReport, topics.STEPS)
    assert [(r.job, r.attempt, r.rank, r.world, len(r.rows), r.seq) for r in reports] == [
        ("j", 1, 0, 2, 3, 0), ("j", 1, 1, 2, 3, 1), ("j", 2, 0, 2, 1, 2),
    ]  # fmt: skip


def test_announcements(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    node = Node(tmp_path, bus, clock)
    node.ticks(1)
    [catalog] = published(bus, Catalog, topics.CATALOG)
    assert (catalog.catalog_id, catalog.family, [m.name for m in catalog.metrics]) == (TOY.catalog_id, "toy", ["count"])
    [event] = published(bus, TopologyEvent, topics.TOPOLOGY)
    assert (event.entity, event.origin) == ("node:n0", "inferred")
    assert event.attributes == {"rack": "rack7", "rail_address": "10.0.0.1", "probe_address": "10.0.0.1:9471"}
    for address in ("mlx5_0/1=x", ""):
        node.facts.rdma_address = address
        node.outbox.topology_changed()
        node.ticks(1)
        [event] = published(bus, TopologyEvent, topics.TOPOLOGY)[-1:]
        assert event.attributes.get("rdma_address", "") == address
    node.ranks.seen("j", 3, 1, pid=5, world=4)
    node.ranks.seen("j", 3, 2, pid=6, world=4)
    node.outbox.topology_changed()
    node.ticks(1)
    job = published(bus, TopologyEvent, topics.TOPOLOGY)[-1]
    assert (job.entity, job.origin, job.attempt, job.ranks) == (
        "job:j",
        "hook",
        3,
        ((1, "n0", "cpu"), (2, "n0", "cpu")),
    )
    node.ticks(60)
    assert len(published(bus, Catalog, topics.CATALOG)) == 2
    assert len([e for e in published(bus, TopologyEvent, topics.TOPOLOGY) if e.entity == "job:j"]) in (2, 3)
    assert [(p.job, p.attempt, p.rank) for p in published(bus, Tick, topics.TICKS)[-1].placements] == [
        ("j", 3, 1),
        ("j", 3, 2),
    ]


def test_nodes_of_one_job_do_not_compact_each_other_away(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    for name in ("n0", "n1"):
        node = Node(tmp_path, bus, clock, name)
        node.ranks.seen("j", 1, int(name[1]), pid=5)
        node.ticks(1)
    keys = {m.key for log in bus.partitions(topics.TOPOLOGY.name) for m in log if decode(m.value).entity == "job:j"}
    assert keys == {b"job:j|n0", b"job:j|n1"}


def test_dead_letters_are_rate_limited_and_counted(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    node = Node(tmp_path, bus, clock)
    for _ in range(100):
        node.outbox.dead("hook", "junk", b"x" * 10_000)
    node.ticks(1)
    letters = published(bus, DeadLetter, topics.DEAD)
    assert len(letters) == 10
    assert len(letters[0].payload) == 4096
    assert node.metrics.value("tw_dead_letters_total", topic="hook") == 100


def test_a_clock_that_jumps_neither_bursts_nor_stalls(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    node = Node(tmp_path, bus, clock)
    node.ticks(2)
    clock.step_ns(3600 * NS_PER_S)
    assert 0 < node.agent.next_tick_ns() - clock.now_ns() <= NS_PER_S
    node.ticks(1)
    clock.step_ns(-7200 * NS_PER_S)
    assert 0 < node.agent.next_tick_ns() - clock.now_ns() <= NS_PER_S
    node.ticks(1)
    assert len(published(bus, Tick, topics.TICKS)) == 4


def test_ticks_slept_through_are_counted_not_made_up(tmp_path: Path, bus: MemoryBus, clock: SimulatedClock) -> None:
    node = Node(tmp_path, bus, clock)
    node.ticks(1)
    clock.sleep(5)
    node.ticks(1)
    assert node.metrics.value("tw_ticks_missed_total") == 5
    assert len(published(bus, Tick, topics.TICKS)) == 2


# --- the real thing ---------------------------------------------------------------------------------------------------------


def config_of(directory: Path, node: str, url: str = "memory://agents", **collector: Any) -> Config:
    return from_table(
        {"run_dir": str(directory), "kafka": {"url": url}, "collector": {"node": node, "probe_port": 0, **collector}}
    )


def test_two_agents_on_one_host(tmp_path: Path, bus: MemoryBus) -> None:
    agents = [build(config_of(tmp_path, name), SystemClock(), bus) for name in ("n0", "n1")]
    try:
        for number, one in enumerate(agents):
            one.start()
            ended = {"v": 1, "t": "exit", "job": "j", "generation": 1, "rank": number, "pid": 1, "exit_code": -9}
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hook:
                hook.sendto(json.dumps(ended).encode(), str(tmp_path / f"n{number}" / "hook.sock"))
        reader = bus.subscriber([topics.EVENTS.name])
        found: dict[str, str] = {}
        while len(found) < 2:
            found |= {decode(m.value).node: decode(m.value).code for m in reader.poll(10.0)}
        assert found == {"n0": "worker_exit:-9", "n1": "worker_exit:-9"}
        for one in agents:
            one.tick()
    finally:
        for one in agents:
            one.close()
    assert {t.node for t in published(bus, Tick, topics.TICKS)} == {"n0", "n1"}


def test_what_collectors_read_does_not_hold_the_boot_id_of_any(tmp_path: Path, bus: MemoryBus) -> None:
    """Who took a collector over reads these topics; with the boot id of a neighbour it could speak in that one's name."""
    agent = build(config_of(tmp_path, "n0", rail_address="127.0.0.1", probe_port=free_port()), SystemClock(), bus)
    read = (agent._parts.learner or pytest.fail("it learns from nobody"))._topics
    agent.start()
    agent.tick()
    agent.close()
    (boot,) = {tick.boot_id for tick in published(bus, Tick, topics.TICKS)}
    told = [message.value for topic in read for log in bus.partitions(topic) for message in log]
    assert set(read) == topics.READ_BY_COLLECTORS
    assert told
    assert all(boot.encode() not in value for value in told)
    (alias,) = {event.boot_id for event in published(bus, TopologyEvent, topics.TOPOLOGY)}
    assert len(alias) == len(boot), "two runs of a collector are told apart by it"


def test_two_agents_with_one_name_are_refused(tmp_path: Path, bus: MemoryBus) -> None:
    first = build(config_of(tmp_path, "n0"), SystemClock(), bus)
    with pytest.raises(UsageError, match="belongs to a running collector"):
        build(config_of(tmp_path, "n0"), SystemClock(), bus)
    first.start()
    first.close()


def test_ranks_are_known_after_a_restart(tmp_path: Path, bus: MemoryBus) -> None:
    first = build(config_of(tmp_path, "n0"), SystemClock(), bus)
    first._parts.ranks.seen("j", 2, 3, pid=os.getpid(), world=4)
    first.start()
    first.close()
    again = build(config_of(tmp_path, "n0"), SystemClock(), bus)
    assert [(s.job, s.generation, s.rank, s.pid, s.world) for s in again._parts.ranks.all()] == [
        ("j", 2, 3, os.getpid(), 4)
    ]
    again.start()
    again.close()


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"sources": {"hots": {}}}, r"collector\.sources\.hots: unknown key, did you mean 'host'\?"),
        (
            {"sources": {"mesh": {"timeout": 3}}},
            r"collector\.sources\.mesh\.timeout: unknown key, did you mean 'timeout_ms'",
        ),
        ({"sources": {"nic": {"drop_after_s": "fast"}}}, r"collector\.sources\.nic\.drop_after_s"),
        ({"peers": {"n1": "nowhere"}}, r"collector\.peers\.n1"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        collect_once(config_of(tmp_path, "n0", **table), SimulatedClock())


def test_a_source_can_be_switched_off(tmp_path: Path) -> None:
    found = collect_once(
        config_of(tmp_path, "n0", sources={"nic": {"enabled": False}, "steps": {"enabled": False}}), SimulatedClock()
    )
    assert "nic" not in found["families"]
    assert found["families"]["host"]["host"]["load1"] >= 0


def test_collect_once_on_a_captured_tree_gives_values_and_reasons(tmp_path: Path) -> None:
    fixtures = Path(__file__).parent.parent / "fixtures" / "node"
    found = collect_once(config_of(tmp_path, "n0", root=str(fixtures)), SimulatedClock())
    host = found["families"]["host"]["host"]
    assert host["load1"] == pytest.approx(0.02)
    assert host["psi_cpu_some_ratio"] == 0.0
    assert host["mem_available_ratio"] is None
    assert {"source": "steps", "reason": "not_started"} in found["gaps"]
    json.dumps(found, allow_nan=False)
    assert list(tmp_path.iterdir()) == []


def test_the_metrics_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="metrics page cannot listen on"),
    ):
        agent_module.run(config_of(tmp_path, "n0", metrics_listen=f"127.0.0.1:{taken.getsockname()[1]}"))


def test_sigterm_ends_the_process_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'run_dir = "{tmp_path}"\n[kafka]\nurl = "memory://x"\n[collector]\nnode = "n0"\nprobe_port = 0\n')
    code = (
        "import sys, pathlib; from collectors.agent import run; from trainwarden.config import load; run(load(pathlib.Path(sys.argv[1])));"
        "assert not {'numpy', 'torch', 'pandas', 'kafka'} & set(sys.modules), 'too heavy'; print('clean')"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "n0" / "hook.sock").exists():
            assert process.poll() is None
            threading.Event().wait(0.02)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
    assert (process.returncode, said.strip()) == (0, "clean")
    assert not (tmp_path / "n0" / "hook.sock").exists()


def test_an_old_board_of_ranks_is_not_believed(tmp_path: Path) -> None:
    clock = SimulatedClock()
    RankBoard(tmp_path / "ranks.json", clock).seen("j", 2, 3, pid=7)
    clock.sleep(60)
    assert len(RankBoard(tmp_path / "ranks.json", clock).all()) == 1
    clock.sleep(600)
    assert RankBoard(tmp_path / "ranks.json", clock).all() == []


def test_a_hopeless_record_does_not_block_those_behind_it(
    tmp_path: Path, bus: MemoryBus, clock: SimulatedClock
) -> None:
    node = Node(tmp_path, bus, clock)
    for n in range(3):
        node.outbox.log(LogEvent(code=f"c:{n}"), urgent=False)

    class Picky:
        """A publisher that finds the second record too large."""

        def __init__(self, on_failure: FailureHandler) -> None:
            self._on_failure, self._failures = on_failure, 0

        def publish(self, topic: str, key: bytes, value: bytes) -> None:
            if decode(value).code == "c:1":
                self._failures += 1
                self._on_failure(topic, key, value, "MessageSizeTooLargeError: 2 MB")
            else:
                bus.append(topic, key, value)

        def flush(self, timeout_s: float) -> None:
            failures, self._failures = self._failures, 0
            if failures:
                raise BusError(f"{failures} were not delivered")

        def close(self) -> None: ...

    bus.publisher = Picky  # type: ignore[method-assign, assignment]
    assert not node.sender.deliver()
    assert node.sender.deliver()
    assert [e.code for e in published(bus, LogEvent, topics.EVENTS)][-2:] == ["c:0", "c:2"]
    assert node.spool.size_bytes == 0
    assert node.metrics.value("tw_spool_dropped_total", topic=topics.EVENTS.name) == 1
