"""Frames for the examples of step detectors: the synthetic cluster's, with other rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from detectors.base import Frame
from detectors.synthetic import JOB, Scene, SyntheticCluster
from trainwarden.records import StepRow, TopologyEvent
from trainwarden.topology import Topology

RowChange = Callable[[int, int, StepRow], StepRow]
"""(second, rank, row) → row."""


def changed_rows(frames: list[Frame], change: RowChange) -> list[Frame]:
    """The same frames with every row passed through `change`; the first frame is second 0, two frames a second."""
    made = []
    for number, frame in enumerate(frames):
        steps = tuple(
            structs.replace(r, rows=tuple(change(number // 2, r.rank, row) for row in r.rows)) for r in frame.steps
        )
        made.append(replace(frame, steps=steps))
    return made


def parallel_frames(
    seconds: int, layout: dict[str, str], compute_ms: dict[int, float], nodes: int = 8, seed: int = 1
) -> list[Frame]:
    """A job whose topology event says how it is parallel, one rank per node; `compute_ms` is what ranks need beyond the others."""
    frames = SyntheticCluster(nodes, seed).frames(seconds, lambda second: Scene(compute_ms=compute_ms))
    placed = frames[0].topology.job(JOB)
    assert placed is not None  # the cluster has placed it in its first frame
    topology = Topology()
    ranks = tuple((rank, node, device) for rank, (node, device) in placed.ranks.items())
    topology.apply(
        TopologyEvent(entity=f"job:{JOB}", origin="scheduler", valid_from_ns=1, ranks=ranks, attributes=layout)
    )
    return [replace(frame, topology=topology) for frame in frames]
