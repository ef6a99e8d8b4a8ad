"""From intervals to the messages that a cluster's collectors would have published."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from collectors.simulated.engine import Simulator
from collectors.simulated.families import FAMILIES
from collectors.simulated.layout import GPU_DEVICES
from collectors.simulated.noise import F32, F64, Bools, Noise
from collectors.simulated.placement import Grid
from collectors.simulated.spec import GPUS
from collectors.simulated.state import Interval, Log, Steps, devices
from trainwarden import topics
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import (
    Block,
    Gap,
    Placement,
    Record,
    StepReport,
    StepRow,
    Tick,
    TopologyEvent,
    encode,
    stable_id,
)

CATALOG_IDS = {name: family.catalog_id for name, family in FAMILIES.items()}
TOPOLOGY_EVERY = 30
CATALOG_EVERY = 60
GAP_CHANCE = 2e-4
SAMPLES_PER_STEP = 64


@dataclass(frozen=True, order=True)
class Sent:
    """A message and its arrival at the broker, seconds since the beginning."""

    arrives_s: float
    number: int
    topic: str = field(compare=False)
    key: bytes = field(compare=False)
    value: bytes = field(compare=False)


class Encoder:
    """Stamps and packs. Messages of an interval leave in the order of their arrival; late ones wait here for their time."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._spec = simulator.spec
        self._layout = simulator.layout
        self._noise = Noise(self._spec.seed)
        self._seq: dict[tuple[int, type[Record]], int] = {}
        self._boots = [stable_id("boot", self._spec.seed, name)[:8] for name in self._layout.names]
        self._keys = [
            topics.node_block(name, self._layout.facts(i)["rack"]) for i, name in enumerate(self._layout.names)
        ]
        self._on = {
            n: grid for grid in simulator.placement.grids for n in range(grid.first_node, grid.first_node + grid.nodes)
        }
        self._fresh: list[Sent] = []
        self._waiting: list[Sent] = []
        self._count = 0

    def messages(self, interval: Interval) -> list[Sent]:
        """What arrives in this interval."""
        stream = self._noise.stream("arrival", interval.number)
        jitter_s = np.minimum(0.2, stream.exponential(0.02, self._layout.size))
        for topic, key, record, node in self._records(interval, jitter_s):
            self._put(interval, topic, key, record, node, float(jitter_s[node]))
        return self._due(interval.at_s + self._spec.interval_s)

    def rest(self) -> list[Sent]:
        """What still waits when the simulation is over."""
        return self._due(np.inf)

    def _due(self, horizon_s: float) -> list[Sent]:
        found, self._fresh = self._fresh, []
        while self._waiting and self._waiting[0].arrives_s < horizon_s:
            found.append(heapq.heappop(self._waiting))
        return sorted(found, key=lambda sent: (sent.arrives_s, sent.number))

    def _put(self, interval: Interval, topic: str, key: bytes, record: Record, node: int, jitter_s: float) -> None:
        self._count += 1
        late_s = float(interval.late_s[node])
        sent = Sent(interval.at_s + jitter_s + late_s, self._count, topic, key, encode(record))
        if late_s + jitter_s < self._spec.interval_s:
            self._fresh.append(sent)
        else:
            heapq.heappush(self._waiting, sent)

    # --- records -----------------------------------------------------------------------------------------------------------------

    def _records(self, interval: Interval, jitter_s: F64) -> Iterator[tuple[str, bytes, Record, int]]:
        yield from self._catalogs(interval)
        yield from self._topology(interval)
        yield from self._ticks(interval, jitter_s)
        for steps in interval.steps:
            yield from self._reports(interval, steps)
        yield from (self._event(interval, log) for log in interval.logs if not interval.silent[log.node])

    def _header(
        self, kind: type[Record], node: int, at_s: float, offset_ms: float
    ) -> tuple[int, str, str, int, int, str]:
        """The first six fields of every record: schema, cluster, node, seq, observed_at_ns, boot_id."""
        seq = self._seq[node, kind] = self._seq.get((node, kind), -1) + 1
        at_ns = self._spec.start_ns + round(at_s * NS_PER_S) + round(offset_ms * NS_PER_MS)
        return 1, self._spec.cluster, self._layout.names[node], seq, at_ns, self._boots[node]

    def _catalogs(self, interval: Interval) -> Iterator[tuple[str, bytes, Record, int]]:
        if interval.number % CATALOG_EVERY:
            return
        for family in FAMILIES.values():
            record = family.catalog()
            fields = (record.catalog_id, record.family, record.source, record.metrics)
            yield (
                topics.CATALOG.name,
                record.catalog_id.encode(),
                type(record)(*self._header(type(record), 0, interval.at_s, 0.0), *fields),
                0,
            )

    def _topology(self, interval: Interval) -> Iterator[tuple[str, bytes, Record, int]]:
        turn = interval.number % TOPOLOGY_EVERY
        for node, name in enumerate(self._layout.names):
            grid = self._on.get(node)
            news = interval.number == 0 or (grid is not None and grid.index in interval.restarted)
            if interval.silent[node] or not (news or node % TOPOLOGY_EVERY == turn):
                continue
            header = self._header(TopologyEvent, node, interval.at_s, float(interval.offset_ms[node]))
            event = TopologyEvent(*header, f"node:{name}", "operator", self._spec.start_ns, self._layout.facts(node))
            yield topics.TOPOLOGY.name, f"node:{name}".encode(), event, node
            if grid is not None:
                yield self._job_event(interval, grid, node)

    def _job_event(self, interval: Interval, grid: Grid, node: int) -> tuple[str, bytes, Record, int]:
        attempt = int(interval.attempts[grid.index])
        ranks = tuple((grid.rank_of(node, g), self._layout.names[node], GPU_DEVICES[g]) for g in range(GPUS))
        header = self._header(TopologyEvent, node, interval.at_s, float(interval.offset_ms[node]))
        event = TopologyEvent(*header, f"job:{grid.name}", "hook", self._spec.start_ns, grid.facts(), attempt, ranks)
        return topics.TOPOLOGY.name, f"job:{grid.name}|{self._layout.names[node]}".encode(), event, node

    def _ticks(self, interval: Interval, jitter_s: F64) -> Iterator[tuple[str, bytes, Record, int]]:
        there: dict[str, Bools] = {n: _present(v) for n, v in interval.values.items()}
        some = {name: np.asarray(present.any(axis=1)) for name, present in there.items()}
        whole = {name: np.asarray(present.all(axis=1)) for name, present in there.items()}
        missing = self._missing_blocks(interval.number)
        width_ms = round(1000 * self._spec.interval_s)
        for node in np.flatnonzero(interval.heard).tolist():
            header = self._header(
                Tick, node, interval.at_s + float(jitter_s[node]) / 2, float(interval.offset_ms[node])
            )
            lost = missing.get(node, "")
            blocks = tuple(
                self._block(name, values[node], None if whole[name][node] else there[name][node], node)
                for name, values in interval.values.items()
                if name != lost and some[name][node]
            )
            gaps = (Gap(lost, "deadline"),) if lost else ()
            yield (
                topics.TICKS.name,
                self._keys[node],
                Tick(*header, width_ms, blocks, self._placements(interval, node), gaps),
                node,
            )

    def _missing_blocks(self, number: int) -> dict[int, str]:
        """A source that did not answer in time leaves a gap."""
        stream = self._noise.stream("gap", number)
        struck = np.flatnonzero(stream.random(self._layout.size) < GAP_CHANCE * self._spec.disorder)
        names = [name for name in FAMILIES if name != "process"]
        return {int(node): names[int(stream.integers(len(names)))] for node in struck}

    def _block(
        self,
        family: str,
        values: F32,
        there: Bools | None,
        node: int,
    ) -> Block:
        names = self._devices(family, node)
        if there is not None:
            names, values = tuple(n for n, t in zip(names, there, strict=True) if t), values[there]
        return Block(family, CATALOG_IDS[family], names, values.tobytes())

    @cache  # noqa: B019 - one encoder lives as long as its process
    def _devices(self, family: str, node: int) -> tuple[str, ...]:
        if family == "mesh":
            return tuple(self._layout.names[peer] for peer in self._layout.peers[node])
        if family == "process":
            grid = self._on[node]
            return tuple(f"rank{grid.rank_of(node, g)}" for g in range(GPUS))
        return devices(self._layout, family)

    def _placements(self, interval: Interval, node: int) -> tuple[Placement, ...]:
        grid = self._on.get(node)
        return self._placed(grid, node, int(interval.attempts[grid.index])) if grid else ()

    @cache  # noqa: B019
    def _placed(self, grid: Grid, node: int, attempt: int) -> tuple[Placement, ...]:
        return tuple(Placement(grid.name, attempt, grid.rank_of(node, g), GPU_DEVICES[g]) for g in range(GPUS))

    def _reports(self, interval: Interval, steps: Steps) -> Iterator[tuple[str, bytes, Record, int]]:
        grid, key = steps.grid, steps.grid.name.encode()
        rows = _rows(steps, self._spec.start_ns, np.repeat(interval.offset_ms[grid.span], GPUS))
        for rank, row in enumerate(rows):
            node = grid.first_node + rank // GPUS
            if not interval.silent[node]:
                header = self._header(StepReport, node, interval.at_s, float(interval.offset_ms[node]))
                report = StepReport(*header, grid.name, steps.past.attempt, rank, grid.world, (row,))
                yield topics.STEPS.name, key, report, node

    def _event(self, interval: Interval, log: Log) -> tuple[str, bytes, Record, int]:
        header = self._header(type(log.event), log.node, log.at_s, float(interval.offset_ms[log.node]))
        event = log.event
        said = type(event)(*header, event.source, event.severity, event.code, event.line, event.template_id, event.attributes,
                           event.repeat, event.job, event.attempt, event.rank)  # fmt: skip
        return topics.of_code(said.code).name, self._keys[log.node], said, log.node


def _present(values: F32) -> Bools:
    """[node, device] whether there is any value: a device without one is not there."""
    return np.asarray(~np.isnan(values).all(axis=2))


def _rows(steps: Steps, start_ns: int, offset_ms: F64) -> Iterator[StepRow]:
    """One row per rank, as the hook reports it."""
    past, outcome = steps.past, steps.past.outcome
    begun = start_ns + np.rint(past.begin * NS_PER_S + offset_ms * NS_PER_MS).astype(np.int64)
    duration = 1000 * (past.end - past.begin)
    if past.phase == "eval":
        yield from (StepRow(past.number, "eval", at, duration) for at in begun.tolist())
        return
    parts = [
        (1000 * part).ravel().tolist()
        for part in (outcome.data, outcome.forward, outcome.backward, outcome.wait, outcome.optimizer)
    ]
    arrived = (begun + np.rint((past.arrived - past.begin) * NS_PER_S).astype(np.int64)).tolist()
    saving = 1000 * (past.end - past.finish) or float("nan")
    others = zip(begun.tolist(), *parts, arrived, steps.grad_norm_local.tolist(), steps.checksum.tolist(), strict=True)
    for at, data, forward, backward, wait, optimizer, handed, local, checksum in others:
        yield StepRow(past.number, past.phase, at, duration, data, forward, backward, wait, optimizer, saving, handed, 0.7 * duration,
                      steps.loss, local, steps.grad_norm, SAMPLES_PER_STEP, steps.finite, checksum)  # fmt: skip
