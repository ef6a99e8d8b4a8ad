"""Frames of a job from a matrix of local times, for situations that the synthetic cluster does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from detectors.base import Detector, Frame
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import StepReport, StepRow, TopologyEvent, Verdict
from trainwarden.topology import Topology

START_NS = 1_700_000_000 * NS_PER_S
JOB = "job"
NETWORK_MS = 20.0

Floats = NDArray[np.float64]
Extra = Callable[[int, int], Mapping[str, float | int | str]]
"""(step, rank) → other fields of the row."""


def local_times(steps: int, ranks: int, step_ms: float = 500.0, noise: float = 0.02, seed: int = 0) -> Floats:
    """Equal ranks with a little noise; steps × ranks, milliseconds."""
    return step_ms * (1.0 + noise * np.random.default_rng(seed).normal(size=(steps, ranks)))


def topology_of(ranks: int, attributes: dict[str, str] | None = None, per_node: int = 1) -> Topology:
    """Ranks on nodes n0, n1, ... in order."""
    topology = Topology()
    placed = tuple((rank, f"n{rank // per_node}", f"gpu{rank % per_node}") for rank in range(ranks))
    topology.apply(
        TopologyEvent(
            entity=f"job:{JOB}", origin="scheduler", valid_from_ns=1, ranks=placed, attributes=attributes or {}
        )
    )
    return topology


def frames(local: Floats, topology: Topology, extra: Extra = lambda step, rank: {}, world: int = 0) -> Iterator[Frame]:
    """One frame a second with the steps that ended in it. NaN: the rank did not report that step."""
    ranks = local.shape[1]
    layout = topology.job(JOB)
    assert layout is not None
    ends_ns = START_NS + np.cumsum((np.nanmax(local, axis=1) + NETWORK_MS) * NS_PER_MS).astype(np.int64)
    starts_ns = np.concatenate([[START_NS], ends_ns[:-1]])
    now_ns = START_NS
    while now_ns < ends_ns[-1]:
        now_ns += NS_PER_S
        done = np.flatnonzero((ends_ns <= now_ns) & (ends_ns > now_ns - NS_PER_S))
        reports = []
        for rank in range(ranks):
            rows = tuple(
                _row(int(step), float(local[step, rank]), int(starts_ns[step]), int(ends_ns[step]), extra(int(step), rank))
                for step in done if np.isfinite(local[step, rank])
            )  # fmt: skip
            if rows:
                reports.append(StepReport(node=layout.ranks[rank][0], seq=now_ns // NS_PER_S, observed_at_ns=now_ns, boot_id="b", job=JOB,
                                          rank=rank, world=world or ranks, rows=rows))  # fmt: skip
        yield Frame(now_ns + 300 * NS_PER_MS, (), tuple(reports), (), topology)


def _row(step: int, local_ms: float, start_ns: int, end_ns: int, extra: Mapping[str, float | int | str]) -> StepRow:
    duration_ms = (end_ns - start_ns) / NS_PER_MS
    fields = {"phase": "train", "duration_ms": duration_ms, "wait_ms": duration_ms - local_ms, "data_ms": 1.0, **extra}
    return StepRow(step=step, started_at_ns=start_ns, **fields)  # type: ignore[arg-type]


def run(detector: Detector, given: Iterator[Frame]) -> list[Verdict]:
    """All verdicts."""
    return [verdict for frame in given for verdict in detector.update(frame)]


def spoken(verdicts: list[Verdict]) -> list[tuple[str, str]]:
    """(kind, name) of what was said."""
    return sorted({(v.kind, v.entity.name) for v in verdicts if not v.clears})
