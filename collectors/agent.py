"""The node agent: samples all sources once a second on a grid common to all nodes, and says one message about it.

`run` is the service, `collect_once` one sample as plain data, for people.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import select
import signal
import socket
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from collectors.announce import Announcer, rank_device
from collectors.base import Context, Facts, Sample, Source, Worker, registry
from collectors.control import Control
from collectors.exposition import exposition
from collectors.files import Files
from collectors.outbox import Outbox, Sender
from collectors.peers import PeerLearner
from collectors.predecessor import Predecessor
from collectors.processor import OneProcessor, affinity
from collectors.ranks import RankBoard
from collectors.runner import Round, take
from collectors.sources.mesh import MeshSource
from collectors.sources.rdma_mesh import RdmaMeshSource
from collectors.spool import Spool, Value
from trainwarden import topics
from trainwarden.bus import Bus, connect
from trainwarden.clock import NS_PER_MS, NS_PER_S, Clock, SystemClock
from trainwarden.config import Config
from trainwarden.errors import ConfigError, UnavailableError
from trainwarden.records import Block, Gap, Placement, Tick
from trainwarden.selfmetrics import Metrics, serve
from trainwarden.settings import parse_settings, unknown_key

logger = logging.getLogger(__name__)

JITTER_MAX_MS = 200
DEADLINE_SHARE = 0.5
SELF_EVERY_TICKS = 10
PLACED_TICKS = 3
M_ARENA_MAX = -8
"""Of the C library's `mallopt`."""
THIN_ABOVE, THIN_UNTIL = 0.5, 0.05
"""Shares of the spool at which the agent begins to tick slower, and goes back to its usual pace."""
THIN_FACTOR = 5
LATE_SOURCES = 3
"""So many at once do not hang: nobody lets them work."""
SICK_AFTER_S = 15.0
"""A tick older than this, and than five intervals, is what the liveness probe calls sick."""


@dataclass(frozen=True)
class Parts:
    """What an agent is built of, so that a test can put in its own."""

    clock: Clock
    spool: Spool
    outbox: Outbox
    sender: Sender
    ranks: RankBoard
    sources: Sequence[Source]
    metrics: Metrics
    announcer: Announcer
    learner: PeerLearner | None = None
    control: Control | None = None
    spool_bytes: int = 0
    """Size of the spool that thinning goes by; 0: ticks are never thinned."""


class Agent:
    """One node's agent.

    Parameters
    ----------
    interval_ms
        Ticks lie at whole multiples of it plus this node's jitter (stable, under 200 ms and a fifth of the interval).
    """

    def __init__(self, node: str, block: bytes, interval_ms: int, parts: Parts) -> None:
        self._node = node
        self._block = block
        self._usual_ms = self._interval_ms = interval_ms
        self._thin = False
        self._begun_ns = parts.clock.monotonic_ns()
        self._last: tuple[int, tuple[Block, ...]] = (0, ())
        self._families = {family.name: family for source in parts.sources for family in source.families}
        self._jitter_ns = zlib.crc32(node.encode()) % min(JITTER_MAX_MS, max(1, interval_ms // 5)) * NS_PER_MS
        self._parts = parts
        self.processor: OneProcessor | None = None
        self._round = Round(parts.sources, parts.metrics, interval_ms * DEADLINE_SHARE / 1000)
        self._sending = Worker("tw-sender", self._send_turn, self._sender_failed)
        self._stop_read, self._stop_write = os.pipe()
        os.set_blocking(self._stop_write, False)
        self._stopping = select.poll()
        self._stopping.register(self._stop_read, select.POLLIN)
        self._last_tick_ns = 0
        self._ticks = 0
        self._placed: tuple[tuple[int, int, int], tuple[Placement, ...]] = ((-1, 0, 0), ())

    @property
    def metrics(self) -> Metrics:
        """Self-metrics of this agent."""
        return self._parts.metrics

    def start(self) -> None:
        """Start the sources and the sender; a source that cannot start stays off, with its reason in each tick."""
        for source in self._parts.sources:
            source.start()
        self._sending.start()
        if self._parts.learner is not None:
            self._parts.learner.start()

    def run(self) -> None:
        """Tick until `stop` is called."""
        self._parts.metrics.set("tw_up", 1)
        while not self._wait(self.next_tick_ns() - self._parts.clock.now_ns()):
            try:
                self.tick()
            except Exception:
                # one tick is lost and counted; an agent that ends would lose all that follow
                logger.exception("tick failed")
                self._parts.metrics.count("tw_source_gaps_total", source="agent", reason="error")

    def stop(self) -> None:
        """End `run`; may be called from a signal handler or another thread."""
        try:
            os.write(self._stop_write, b"x")
        except BlockingIOError:
            return  # it was asked to stop often enough

    def close(self) -> None:
        """Stop the sources, hand over what can be handed over within a moment; the rest stays in the spool."""
        if self._parts.learner is not None:
            self._parts.learner.close()
        for source in self._parts.sources:
            source.close()
        self._round.close()
        self._sending.close(timeout_s=5.0, wake=self._parts.outbox.waiting.set)
        self._parts.outbox.leave()
        self._parts.sender.deliver()
        self._parts.sender.close()
        self._parts.spool.close()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def next_tick_ns(self) -> int:
        """The next moment of the grid on the wall clock."""
        interval_ns = self._interval_ms * NS_PER_MS
        return ((self._parts.clock.now_ns() - self._jitter_ns) // interval_ns + 1) * interval_ns + self._jitter_ns

    def tick(self) -> None:
        """Sample everything once and publish it."""
        parts = self._parts
        now_ns = parts.clock.now_ns()
        missed = self._count_missed(now_ns)
        self._pace()
        samples = self._round.collect(now_ns)
        gaps = [gap for sample in samples for gap in sample.gaps]
        if parts.spool.disk_full:
            gaps.append(Gap("spool", "spool_full"))
        if self._thin:
            gaps.append(Gap("agent", "spool_pressure"))
        blocks = tuple(block for sample in samples for block in sample.blocks)
        here = self._placements()
        tick = Tick(
            observed_at_ns=now_ns, interval_ms=self._interval_ms, blocks=blocks, placements=here, gaps=tuple(gaps)
        )
        parts.announcer.announce(parts.outbox.take_layout_change())
        parts.outbox.put(topics.TICKS.name, self._block, tick, Value.TICK)
        self._last = (parts.clock.monotonic_ns(), blocks)
        self._observe_self(now_ns)
        if self.processor is not None:
            late = sum(gap.reason == "deadline" for gap in gaps) >= LATE_SOURCES
            self.processor.keep(self._last[0], late or missed)
        parts.outbox.leave()  # last of all: from here on the sender's thread works, and it needs the interpreter for itself

    def _placements(self) -> tuple[Placement, ...]:
        """The ranks that run here, looked up again when their layout changed and now and then: devices are found in the background."""
        ranks, facts = self._parts.ranks, self._parts.announcer.facts
        key = (ranks.changes, facts.gpus, self._ticks // PLACED_TICKS)
        if key != self._placed[0]:
            self._placed = (key, placements(ranks, facts))
        return self._placed[1]

    def sick(self) -> str:
        """For the liveness probe: a sentence when no tick has gone out for long. A source that hangs has no say in it."""
        age_s = (self._parts.clock.monotonic_ns() - (self._last[0] or self._begun_ns)) / NS_PER_S
        limit_s = max(SICK_AFTER_S, 5 * self._interval_ms / 1000)
        return f"no tick for {age_s:.0f} s, expected one every {self._interval_ms} ms" if age_s > limit_s else ""

    def page(self) -> str:
        """Samples of the newest tick in Prometheus form; empty when it is older than three intervals: stale values look alive."""
        at_ns, blocks = self._last
        fresh = self._parts.clock.monotonic_ns() - at_ns <= 3 * self._interval_ms * NS_PER_MS
        return exposition(self._node, blocks, self._families) if blocks and fresh else ""

    def _pace(self) -> None:
        """Settle the interval until the next tick: as configured or ordered, and slower while the spool is filling."""
        parts, wanted_ms = self._parts, self._usual_ms
        if parts.control is not None:
            parts.control.apply_log_level()
            wanted_ms = parts.control.interval_ms(wanted_ms)
        filled = parts.spool.size_bytes / parts.spool_bytes if parts.spool_bytes else 0.0
        thin = filled > (THIN_UNTIL if self._thin else THIN_ABOVE)
        if thin != self._thin:
            logger.warning(
                "spool is %.0f %% full: ticks are %s", filled * 100, "thinned" if thin else "no longer thinned"
            )
        self._thin = thin
        self._interval_ms = wanted_ms * THIN_FACTOR if thin else wanted_ms
        parts.metrics.set("tw_tick_interval_seconds", self._interval_ms / 1000)

    def _observe_self(self, now_ns: int) -> None:
        metrics = self._parts.metrics
        metrics.set("tw_tick_at_seconds", now_ns / NS_PER_S)
        self._ticks += 1
        if self._ticks % SELF_EVERY_TICKS == 1:
            metrics.set("tw_process_cpu_seconds", time.process_time())
            metrics.set("tw_process_resident_bytes", float(resident_bytes()))
            metrics.set("tw_process_open_files", float(len(os.listdir("/proc/self/fd"))))

    def _count_missed(self, now_ns: int) -> bool:
        """Count grid ticks that were slept through; whether there were any."""
        elapsed = (now_ns - self._last_tick_ns) / (self._interval_ms * NS_PER_MS)
        missed = self._last_tick_ns > 0 and elapsed > 1.5
        if missed:
            self._parts.metrics.count("tw_ticks_missed_total", math.floor(elapsed - 0.5))
        self._last_tick_ns = now_ns
        return missed

    def _wait(self, duration_ns: int) -> bool:
        """Sleep; true when the agent is to stop. The clock may be stepped meanwhile: no sleep is longer than an interval."""
        bounded_s = min(max(0, duration_ns), self._interval_ms * NS_PER_MS) / NS_PER_S
        readable = self._stopping.poll(bounded_s * 1000)
        return bool(readable)

    def _send_turn(self) -> None:
        outbox, sender = self._parts.outbox, self._parts.sender
        if not outbox.waiting.wait(1.0):
            return
        outbox.waiting.clear()
        if not sender.deliver():
            self._sending.wait(sender.backoff_s)
            outbox.waiting.set()

    def _sender_failed(self, error: Exception) -> None:
        logger.exception("sending failed: %s", error)
        self._parts.sender.failed(error)
        self._parts.outbox.waiting.set()


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def placements(ranks: RankBoard, facts: Facts) -> tuple[Placement, ...]:
    """The ranks that run here."""
    states = [state for layout in ranks.layouts().values() for state in layout]
    running = (state for state in states if not state.ended_monotonic_ns)
    return tuple(Placement(s.job, s.generation, s.rank, rank_device(s, facts)) for s in running)


def source_tables(config: Config, node: str, socket_path: Path) -> dict[str, dict[str, Any]]:
    """Settings of each source: those of ``[collector]`` that concern it, below its own table."""
    collector = config.collector
    tables: dict[str, dict[str, Any]] = {
        "steps": {"socket": str(socket_path)},
        "logfile": {"files": dict(collector.log_files)},
        "mesh": {
            "rail_address": collector.rail_address,
            "probe_port": collector.probe_port,
            "peers": {name: address for name, address in collector.peers.items() if name != node},
        },
    }
    known = registry().all()
    for name, table in collector.sources.items():
        if name not in known:
            raise ConfigError(unknown_key("collector.sources", name, list(known)))
        tables[name] = {**tables.get(name, {}), **table}
    return tables


def build_sources(tables: Mapping[str, Mapping[str, Any]], context: Context) -> list[Source]:
    """Every source that is not switched off, each with descriptors of its own."""
    sources = []
    for name, kind in registry().all().items():
        table = dict(tables.get(name, {}))
        if table.pop("enabled", True):
            own = replace(context, files=Files(Path(context.files.root or "/"), context.clock))
            sources.append(kind(own, parse_settings(kind.Settings, table, f"collector.sources.{name}")))
    return sources


def node_name(config: Config) -> str:
    """The configured node name, else the host's."""
    return config.collector.node or socket.gethostname()


def build(config: Config, clock: Clock, bus: Bus | None = None) -> Agent:
    """An agent from its configuration. Raises `UsageError` kinds for what a person must mend."""
    node, collector = node_name(config), config.collector
    if bus is None:
        connect(
            config.kafka
        )  # nothing is sent yet: an address that is none is told now, an absent broker is waited for
    spool_directory = config.path(collector.spool_directory, node, "spool")
    metrics = Metrics("collector")
    spool = Spool(spool_directory, collector.spool_bytes, metrics)
    boot_id = uuid.uuid4().hex[:16]
    block = topics.node_block(node, collector.rack)
    before = Predecessor(spool_directory, boot_id)
    outbox = Outbox(config.cluster, node, boot_id, block, clock, spool, metrics, before, alias=uuid.uuid4().hex[:16])
    ranks = RankBoard(spool_directory / "ranks.json", clock)
    context = Context(
        node, clock, Files(collector.root, clock), ranks, outbox, metrics, spool_directory, config.run_dir, Facts()
    )
    sources = build_sources(source_tables(config, node, config.path(collector.socket, node, "hook.sock")), context)

    def reach() -> Bus:
        return bus or connect(config.kafka, solo=True)

    sender = Sender(reach, spool, clock, metrics)
    announcer = Announcer(
        node, collector.rack, clock, outbox, ranks, context.facts, sources, spool_directory / "topology.json"
    )
    control = Control(node, clock, metrics, lambda: node_attributes(context.facts), outbox.dead)
    mesh = next((source for source in sources if isinstance(source, MeshSource) and source.learns), None)
    rdma = next((source.hear for source in sources if isinstance(source, RdmaMeshSource)), None)
    places = mesh.learn_places if mesh else None
    learner = PeerLearner(reach, clock, mesh, places, {topics.CONTROL.name: control.hear}, rdma)
    parts = Parts(
        clock, spool, outbox, sender, ranks, sources, metrics, announcer, learner, control, collector.spool_bytes
    )
    return Agent(node, block, collector.interval_ms, parts)


def node_attributes(facts: Facts) -> dict[str, str]:
    """What is known of this node."""
    return {key: claim.value for key, claim in facts.board.merged("node").items()}


def run(config: Config) -> None:
    """Run the agent until SIGTERM or SIGINT, then hand over what waits and clean up.

    Raises
    ------
    UsageError
        When the spool, the socket or the metrics port cannot be had, or a setting is wrong.
    """
    one_heap()
    agent = build(config, SystemClock())
    agent.processor = OneProcessor(affinity())
    page = None
    before = {number: signal.signal(number, _stopper(agent)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        page = _serve(agent, config.collector.metrics_listen)
        agent.start()
        logger.info("collector of node %s runs", node_name(config))
        gc.freeze()  # what is loaded by now stays: no later collection needs to look at it
        agent.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if page is not None:
            page.shutdown()
        agent.close()


def one_heap() -> None:
    """Let all threads share one heap: those that ask devices come and go, and each would leave a heap of its own behind."""
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except (AttributeError, OSError):
        return  # another C library: it has other habits


def _stopper(agent: Agent) -> Any:
    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        agent.stop()

    return stop


def _serve(agent: Agent, listen: str) -> Any:
    if not listen:
        return None
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or len(port) > 5:
        raise ConfigError(f"collector.metrics_listen: {listen!r} is no host:port such as 127.0.0.1:9470")
    try:
        return serve(agent.metrics, host or "0.0.0.0", int(port), agent.sick, agent.page)
    except OSError as error:
        raise UnavailableError(
            f"metrics page cannot listen on {listen} ({error.strerror}): set collector.metrics_listen"
        ) from None


@dataclass(frozen=True)
class Look:
    """Two samples of every source, one interval apart, for a person: nothing is published, no socket is opened."""

    node: str
    at_ns: int
    sources: Sequence[Source]
    samples: Mapping[str, Sample]
    cost_ms: Mapping[str, float]
    context: Context


def look(config: Config, clock: Clock | None = None) -> Look:
    """Take two samples of each source, because rates need two."""
    chosen = clock or SystemClock()
    node = node_name(config)
    context = Context(node, chosen, Files(config.collector.root, chosen), RankBoard(), _Nowhere(), Metrics("collector"),
                      config.run_dir, config.run_dir, Facts())  # fmt: skip
    tables = source_tables(config, node, config.path(config.collector.socket, node, "hook.sock"))
    sources = build_sources(tables, context)
    for source in sources:
        take(source, chosen.now_ns())
    chosen.sleep(config.collector.interval_ms / 1000)
    samples, cost_ms = {}, {}
    for source in sources:
        started = time.thread_time()
        samples[source.name] = take(source, chosen.now_ns())
        cost_ms[source.name] = (time.thread_time() - started) * 1000
    return Look(node, chosen.now_ns(), sources, samples, cost_ms, context)


def collect_once(config: Config, clock: Clock | None = None) -> dict[str, Any]:
    """What the sources read now, as plain data: values by family, device and metric (None where absent), and reasons."""
    seen = look(config, clock)
    return {
        "node": seen.node,
        "observed_at_ns": seen.at_ns,
        "families": families_of(seen),
        "topology": {key: claim.value for key, claim in seen.context.facts.board.merged("node").items()},
        "gaps": [{"source": gap.source, "reason": gap.reason} for gap in _gaps(seen.samples)],
    }


def families_of(seen: Look) -> dict[str, dict[str, dict[str, float | None]]]:
    """Values by family, device and metric; None where absent."""
    names = {
        family.name: [metric.name for metric in family.metrics] for source in seen.sources for family in source.families
    }
    return _families([block for sample in seen.samples.values() for block in sample.blocks], names)


def _families(blocks: Sequence[Block], names: Mapping[str, list[str]]) -> dict[str, dict[str, dict[str, float | None]]]:
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for block in blocks:
        rows = found.setdefault(block.family, {})
        for device, values in block.rows():
            rows[device] = {n: None if math.isnan(v) else v for n, v in zip(names[block.family], values, strict=True)}
    return found


def _gaps(samples: Mapping[str, Sample]) -> list[Gap]:
    return [gap for sample in samples.values() for gap in sample.gaps]


class _Nowhere:
    """An outlet for one-off samples: nothing is published."""

    def log(self, *_: Any, **__: Any) -> None: ...
    def step(self, *_: Any) -> None: ...
    def dead(self, *_: Any) -> None: ...
    def topology_changed(self) -> None: ...
