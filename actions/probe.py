"""Whether a node may come back. It returns by passing a check, or by an operator's word; never by silence.

The check workload itself (a paired matrix multiplication and all-reduce) belongs to the training side and is not part of this
version, so the strongest answer here is that the node does not answer at all; otherwise the probe says that it cannot judge, and
only an operator can decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from actions.world import NodeState


class Finding(StrEnum):
    """What a probe found."""

    PASSED = "passed"
    FAILED = "failed"
    CANNOT = "cannot"


@dataclass(frozen=True)
class ProbeResult:
    """`reason` is one sentence; it is kept with the plan that returns the node."""

    finding: Finding
    reason: str


def probe(node: str, cluster: Mapping[str, NodeState]) -> ProbeResult:
    """Judge `node` by what its warden says."""
    state = cluster.get(node)
    if state is None:
        return ProbeResult(
            Finding.FAILED, f"node {node} is not known: known are {', '.join(sorted(cluster)) or 'none'}"
        )
    if not state.reachable:
        return ProbeResult(Finding.FAILED, f"node {node} does not answer: {state.reason}")
    if not state.job:
        return ProbeResult(Finding.FAILED, f"node {node} belongs to no job")
    return ProbeResult(Finding.CANNOT, "no node check is installed: the node returns by the operator's word")


def may_return(result: ProbeResult, by_operator: bool) -> bool:
    """A passing check is enough for anybody; without one an operator must say so."""
    return result.finding is Finding.PASSED or (result.finding is Finding.CANNOT and by_operator)
