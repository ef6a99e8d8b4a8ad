"""A small cluster that speaks in records, for tests."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import (
    Block,
    Catalog,
    Entity,
    EntityKind,
    Metric,
    Placement,
    Reach,
    Record,
    StepReport,
    StepRow,
    Tick,
    TopologyEvent,
    Verdict,
    catalog_id_of,
    pack_floats,
    stable_id,
)

START_NS = 1_700_000_000 * NS_PER_S
HOST = (Metric("cpu_busy_ratio", "1"), Metric("load1", "tasks"))
HOST_MORE = (Metric("load1", "tasks"), Metric("psi_cpu_some_ratio", "1"))
HOST_ID = catalog_id_of("host", HOST)
PARTITIONS = 4
Placed = tuple[str, int, Record]
"""(topic, partition, record)"""


def host_catalog(metrics: tuple[Metric, ...] = HOST) -> Catalog:
    return Catalog(catalog_id=catalog_id_of("host", metrics), family="host", source="test", metrics=metrics)


def tick(
    node: str, second: int, *, boot: str = "b1", seq: int | None = None, shift_ns: int = 0, value: float = 0.5
) -> Tick:
    """A tick of `node` at START + `second`."""
    return Tick(
        node=node,
        seq=second if seq is None else seq,
        observed_at_ns=START_NS + second * NS_PER_S + shift_ns,
        boot_id=boot,
        blocks=(Block("host", HOST_ID, ("host",), pack_floats([value, float(second)])),),
    )


def partition_of(node: str) -> int:
    return zlib.crc32(node.encode()) % PARTITIONS


@dataclass
class Cluster:
    """Four nodes, one job of four ranks, 10 steps a second, one record of each kind per node and second."""

    nodes: tuple[str, ...] = ("n0", "n1", "n2", "n3")
    job: str = "j"
    attempt: int = 1
    step: int = 0
    silent: set[str] = field(default_factory=set)
    slow: dict[str, float] = field(default_factory=dict)

    def announcements(self) -> Iterator[Placed]:
        """Catalogue and topology."""
        yield "tw.catalog", 0, host_catalog()
        ranks = tuple((rank, node, "cpu") for rank, node in enumerate(self.nodes))
        yield (
            "tw.topology",
            0,
            TopologyEvent(
                entity=f"job:{self.job}", origin="hook", valid_from_ns=START_NS, attempt=self.attempt, ranks=ranks
            ),
        )

    def second(self, second: int) -> Iterator[Placed]:
        """Everything that the cluster says in one second."""
        for rank, node in enumerate(self.nodes):
            if node in self.silent:
                continue
            yield "tw.ticks", partition_of(node), self._tick(node, rank, second)
            yield "tw.steps", partition_of(self.job), self._steps(node, rank, second)
        self.step += 10

    def _tick(self, node: str, rank: int, second: int) -> Tick:
        return Tick(
            node=node,
            seq=second,
            observed_at_ns=START_NS + second * NS_PER_S + rank * 7 * NS_PER_MS,
            boot_id="b1",
            blocks=(Block("host", HOST_ID, ("host",), pack_floats([0.5, float(second % 7)])),),
            placements=(Placement(self.job, self.attempt, rank, "cpu"),),
        )

    def _steps(self, node: str, rank: int, second: int) -> StepReport:
        at_ns = START_NS + second * NS_PER_S
        extra_ms = self.slow.get(node, 0.0)
        slowest_ms = max(self.slow.values(), default=0.0)
        rows = tuple(
            StepRow(
                step=self.step + i,
                phase="train",
                started_at_ns=at_ns - (10 - i) * 100 * NS_PER_MS,
                duration_ms=60.0 + slowest_ms,
                data_ms=2.0,
                forward_ms=20.0 + extra_ms,
                backward_ms=30.0,
                wait_ms=3.0 + slowest_ms - extra_ms,
                optimizer_ms=4.0,
                arrived_at_ns=at_ns - (10 - i) * 100 * NS_PER_MS + 55 * NS_PER_MS,
                cpu_ms=50.0,
                loss=1.0,
                grad_norm=1.0,
                grad_norm_local=1.0,
                samples=64,
            )
            for i in range(10)
        )
        return StepReport(
            node=node,
            seq=second,
            observed_at_ns=at_ns + rank * NS_PER_MS,
            boot_id="b1",
            job=self.job,
            attempt=self.attempt,
            rank=rank,
            world=len(self.nodes),
            rows=rows,
        )


def verdict(
    kind: str,
    node: str = "",
    *,
    at_s: float = 0.0,
    onset_s: float | None = None,
    job: str = "j",
    attempt: int = 1,
    rank: int = -1,
    confidence: float = 0.9,
    reach: Reach = Reach.ACT,
    clears: bool = False,
    entity: Entity | None = None,
    detector: str = "d",
    victims: tuple[str, ...] = (),
) -> Verdict:
    """A verdict `at_s` seconds after START."""
    at_ns = START_NS + int(at_s * NS_PER_S)
    onset_ns = START_NS + int((at_s if onset_s is None else onset_s) * NS_PER_S)
    accused = entity or (Entity(EntityKind.NODE, node, node) if node else Entity(EntityKind.JOB, job))
    return Verdict(
        cluster="c",
        observed_at_ns=at_ns,
        verdict_id=stable_id(kind, accused, at_ns, onset_ns, job, attempt, clears, detector, rank),
        detector=detector,
        job=job,
        attempt=attempt,
        entity=accused,
        rank=rank,
        kind=kind,
        confidence=confidence,
        onset_at_ns=onset_ns,
        window_start_ns=onset_ns,
        window_end_ns=at_ns,
        reach=reach,
        clears=clears,
        victims=victims,
        text=f"{kind} {node}",
    )
