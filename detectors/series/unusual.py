"""Says `unusual` of a node whose metrics no longer fit together, all families taken at once, and which metrics do not fit.

The model is `detectors.series.pool`: components of the peers' banded metrics, refitted on a budget. It supports other verdicts, it never
stands alone: it says that something is odd, not what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.base import AlignedTick, Detector, Frame, series_evidence
from detectors.placement import Jobs
from detectors.series.pool import F32, ROWS_PER_TICK, Pool
from detectors.series.table import NodeTables, plain, unscaled
from detectors.state import decode_state, encode_state
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.records import Entity, EntityKind, Verdict
from trainwarden.settings import option
from trainwarden.topology import Topology

MOST_FEATURES = 80
MOST_POOLS = 64
LEAST_PEERS = 3
_FORGET_TICKS = 600
_SIZED_NEEDED = 120
"""Rows after the first fit before scores, and scores before their line, are trusted."""


@dataclass(frozen=True)
class UnusualSettings:
    """Settings of `series_residual`."""

    risk: float = option(1e-6, "probability that a healthy node passes its line at one look")
    warm_ticks: int = option(120, "ticks of a node, and of its pool, before it is judged")
    persist_looks: int = option(10, "looks in a row beyond the line before it is said")
    calm_looks: int = option(10, "looks in a row below half the way to the line before it is taken back")
    refit_ticks: int = option(300, "ticks between two fits of a pool; one pool at most is fitted in a tick")
    per_tick: int = option(5, "verdicts per tick and pool at most, the strangest first")


class State(msgspec.Struct):
    """State of the detector: a pool per job, the last for small jobs and idle nodes."""

    pools: dict[str, Pool] = {}


class SeriesResidual(Detector):
    """Finds nodes whose metrics no longer fit together."""

    name = "series_residual"
    kinds = ("unusual",)
    Settings = UnusualSettings
    settings: UnusualSettings
    false_alarms_per_node_day: ClassVar[float] = 2.0
    supporting_per_hour: ClassVar[float] = 6.0

    def __init__(self, settings: UnusualSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()
        self._tables = NodeTables()
        self._peers = Peers()

    @classmethod
    def example(cls) -> Example:
        """From second 300 on, node 2 thrashes: memory low, disk and its pressure up, the processor waits, packets are sent again."""
        odd = Scene(host={(2, "cpu_busy_ratio"): 0.4, (2, "load1"): 6.0, (2, "mem_available_ratio"): 0.3, (2, "disk_busy_ratio"): 0.4,
                          (2, "psi_io_some_ratio"): 0.3, (2, "tcp_retrans_per_s"): 30.0})  # fmt: skip
        frames = SyntheticCluster(seed=1).frames(360, lambda second: odd if second >= 300 else None)
        return Example(frames, "unusual", node_entity(2))

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for tick in frame.ticks:
            nodes, features, table = self._tables.of(tick)
            if not nodes or not features:
                continue
            for name, peers in self._peers.of(nodes, frame.topology).items():
                pool = self._pool(name, features)
                values = _values(table, peers.rows, features, pool)
                verdicts += self._look(tick, pool, peers.nodes, values, frame.topology)
            self._forget()
            self._refit()
        return verdicts

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Nodes that are judged: those of a fitted pool that were there long enough."""
        pools, warm = self._state.pools.values(), self.settings.warm_ticks
        ready = [pool for pool in pools if pool.sized >= _SIZED_NEEDED and pool.tick >= 2 * warm]
        return {
            "nodes": (sum(int((pool.seen >= warm).sum()) for pool in ready), sum(len(pool.nodes) for pool in pools))
        }

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _pool(self, name: str, features: list[str]) -> Pool:
        """The pool, begun anew when it lacks a metric that is there now (a source was added)."""
        pool = self._state.pools.get(name)
        known = pool.features if pool is not None else []
        wanted = sorted({*known, *features[:MOST_FEATURES]})[:MOST_FEATURES]
        if pool is None or wanted != known:
            pool = self._state.pools[name] = Pool.of(name, wanted)
        pool.unused = 0
        return pool

    def _look(self, tick: AlignedTick, pool: Pool, nodes: list[str], values: F32, topology: Topology) -> list[Verdict]:
        rows, banded = pool.follow(nodes, values)
        settled = pool.seen[rows] >= self.settings.warm_ticks
        if pool.fitted < 0 or pool.sized < _SIZED_NEEDED:
            pool.learn(banded[pool.seen[rows] >= 30])
            return []
        whole, left = pool.judge(rows, banded)
        trusted = pool.name != "" and len(pool.nodes) >= LEAST_PEERS and pool.judged >= _SIZED_NEEDED
        score = pool.apart(whole) if trusted else whole
        limit = pool.limit(self.settings.risk)
        known = settled & (pool.tick >= 2 * self.settings.warm_ticks)
        beyond = known & (score > limit)
        pool.streak[rows] = np.where(beyond, pool.streak[rows] + 1, 0)
        pool.calm[rows] = np.where(score > (limit + pool.log_mean) / 2, 0, pool.calm[rows] + 1)
        healthy = settled & (pool.since_ns[rows] == 0)
        pool.follow_tail(whole[healthy], score[healthy], self.settings.risk)
        teach = healthy & ~beyond
        pool.learn(banded, left) if teach.all() else pool.learn(banded[teach])
        return self._say(tick, pool, rows, banded, values, nodes, np.exp(score - limit), topology)

    def _say(self, tick: AlignedTick, pool: Pool, rows: NDArray[np.int64], banded: F32, values: F32, nodes: list[str], strength: F32,
             topology: Topology) -> list[Verdict]:  # fmt: skip
        is_open = pool.since_ns[rows] > 0
        starts = np.flatnonzero((pool.streak[rows] >= self.settings.persist_looks) & ~is_open)
        ends = np.flatnonzero(is_open & (pool.calm[rows] >= self.settings.calm_looks))
        order = starts[np.argsort(-strength[starts], kind="stable")][: self.settings.per_tick]
        said = []
        for number in order.tolist():
            looks = self.settings.persist_looks * -(-len(pool.nodes) // ROWS_PER_TICK)
            onset_ns = tick.at_ns - looks * tick.interval_ms * 1_000_000
            pool.since_ns[rows[number]] = onset_ns
            node = pool.nodes[int(rows[number])]
            row = values[nodes.index(node)]
            said.append(
                self._verdict(tick, pool, int(rows[number]), banded[number], row, float(strength[number]), topology)
            )
        for number in ends.tolist():
            pool.since_ns[rows[number]] = 0
            said.append(self._taken_back(tick, pool.nodes[int(rows[number])], topology))
        return said

    def _verdict(
        self, tick: AlignedTick, pool: Pool, row: int, banded: F32, values: F32, strength: float, topology: Topology
    ) -> Verdict:
        node, shares = pool.nodes[row], pool.shares(banded)
        leading = np.argsort(-shares, kind="stable")[:3].tolist()
        named = [f"{pool.features[i]} ({plain(pool.features[i], values[i])}, usually {plain(pool.features[i], pool.place[row, i])})"
                 for i in leading]  # fmt: skip
        text = f"the metrics of {node} no longer fit together, {shares[leading].sum():.0%} of it by {', '.join(named)}"
        evidence = tuple(
            series_evidence(f"{pool.features[i]} of {node}", pool.features[i].rpartition("_")[2], [tick.at_ns],
                            [unscaled(pool.features[i], float(values[i]))],
                            note=f"usual {plain(pool.features[i], pool.place[row, i])}; share {shares[i]:.2f}")
            for i in leading
        )  # fmt: skip
        since_ns = int(pool.since_ns[row])
        return self._of(node, topology, window=(since_ns, tick.at_ns), onset_at_ns=since_ns, score=strength, confidence=0.5, text=text,
                        evidence=evidence)  # fmt: skip

    def _taken_back(self, tick: AlignedTick, node: str, topology: Topology) -> Verdict:
        text = f"the metrics of {node} fit together again"
        return self._of(node, topology, window=(tick.at_ns, tick.at_ns), confidence=0.5, text=text, clears=True)

    def _of(self, node: str, topology: Topology, window: tuple[int, int], **facts: object) -> Verdict:
        layout = topology.job_of(node)
        return self.verdict(kind="unusual", entity=Entity(EntityKind.NODE, node, node), window=window, job=layout.job if layout else "",
                            attempt=layout.attempt if layout else 0, **facts)  # fmt: skip

    def _forget(self) -> None:
        for pool in self._state.pools.values():
            pool.unused += 1
        self._state.pools = {name: pool for name, pool in self._state.pools.items() if pool.unused <= _FORGET_TICKS}

    def _refit(self) -> None:
        """Fit the pool that waits longest, if one is due: a fit is the one costly step, so there is never more than one in a tick."""
        due = [(pool.fitted, name) for name, pool in self._state.pools.items() if self._is_due(pool)]
        if due:
            self._state.pools[min(due)[1]].fit()

    def _is_due(self, pool: Pool) -> bool:
        """A young pool is fitted often, an old one on its interval, one with too few rows not at all."""
        warm = self.settings.warm_ticks
        if pool.fitted < 0:
            return pool.tick >= warm and pool.weight >= warm
        age = pool.tick - pool.fitted
        return age >= (30 if pool.tick <= 2 * warm else self.settings.refit_ticks)


@dataclass(frozen=True)
class Peer:
    """Row numbers and names of the nodes of a pool."""

    rows: NDArray[np.int64]
    nodes: list[str]


class Peers:
    """Which nodes are whose peers, by pool: a job with at least three nodes is one, all others share the pool with the empty name. Kept
    while nodes and jobs are the same objects."""

    def __init__(self) -> None:
        self._jobs = Jobs()
        self._made: tuple[list[str], dict[str, str]] | None = None
        self._pools: dict[str, Peer] = {}

    def of(self, nodes: list[str], topology: Topology) -> dict[str, Peer]:
        """Pools of these nodes; neither the list nor what is returned may be changed."""
        jobs = self._jobs.of(topology)
        if self._made is None or self._made[0] is not nodes or self._made[1] is not jobs:
            pools = _pools_of(nodes, jobs)
            self._pools = {name: Peer(np.array(rows), [nodes[row] for row in rows]) for name, rows in pools.items()}
            self._made = nodes, jobs
        return self._pools


def _pools_of(nodes: list[str], jobs: dict[str, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row, node in enumerate(nodes):
        found.setdefault(jobs.get(node, ""), []).append(row)
    large = sorted(
        (name for name, rows in found.items() if name and len(rows) >= LEAST_PEERS),
        key=lambda name: (-len(found[name]), name),
    )
    made = {name: found[name] for name in sorted(large[:MOST_POOLS])}
    rest = sorted(row for name, rows in found.items() if name not in made for row in rows)
    return {**made, **({"": rest} if rest else {})}


def _values(table: F32, rows: NDArray[np.int64], features: list[str], pool: Pool) -> F32:
    """The pool's features of some nodes; NaN for a feature that nobody reports now."""
    place = {feature: number for number, feature in enumerate(features)}
    columns = np.array([place.get(feature, -1) for feature in pool.features], dtype=np.int64)
    values = table[np.ix_(rows, columns)]
    values[:, columns < 0] = np.nan
    return values
