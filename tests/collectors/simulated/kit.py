"""What simulator tests share: a small cluster that can show every kind of fault, and a healthy twin to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from collectors.simulated.engine import Simulator
from collectors.simulated.faults.base import FaultKind, Stop
from collectors.simulated.incidents import Incident, culprits
from collectors.simulated.noise import F64, Ints
from collectors.simulated.run import build
from collectors.simulated.spec import Spec
from collectors.simulated.state import Interval, Steps

SPEC = Spec(nodes=40, seed=6, jobs="8:ddp,8:pipeline,8:moe,12:ddp", light_share=0.05)
START_S, LASTS_S, LENGTH_S = 20, 64, 90
TARGETS = {
    "gpu": "n00003/gpu2", "node": "n00003", "nic": "n00003/mlx5_2/1", "pair": "n00003-n00004", "rack": "rack-000", "pdu": "pdu-000",
    "zone": "zone-00", "leaf": "leaf-000/rail2", "rail": "rail2", "spine": "spine-1", "job": "job-000", "stage": "job-001/stage7",
    "fabric": "fabric",
}  # fmt: skip
SPECIAL = {"stage_imbalance": "job-001", "expert_imbalance": "job-002", "length_imbalance": "job-000"}


@dataclass(frozen=True)
class Run:
    """A simulation that is over."""

    simulator: Simulator
    intervals: list[Interval]

    def column(self, family: str, column: int) -> F64:
        """[time, node, device]."""
        return np.stack([interval.family(family)[..., column] for interval in self.intervals]).astype(np.float64)

    def steps(
        self, job: int, begin_s: float, end_s: float, phases: Sequence[str] = ("train", "checkpoint")
    ) -> list[Steps]:
        """Steps of a job that began in a stretch of time."""
        return [
            s
            for interval in self.intervals
            for s in interval.steps
            if s.grid.index == job and begin_s <= s.past.begin < end_s and s.past.phase in phases
        ]

    def codes(self, nodes: Sequence[int]) -> set[str]:
        """Codes of log events of some nodes."""
        return {log.event.code for interval in self.intervals for log in interval.logs if log.node in nodes}


@cache
def healthy(spec: Spec = SPEC, length_s: int = LENGTH_S) -> Run:
    """The same cluster without faults."""
    return simulated(spec, "none", length_s)


def simulated(spec: Spec, faults: str, length_s: int = LENGTH_S) -> Run:
    """Run `spec` to its end."""
    simulator = build(spec, faults, length_s)
    return Run(simulator, list(simulator.intervals(length_s)))


def struck(kind: FaultKind) -> tuple[Run, Incident]:
    """A run with one fault of a kind, at its usual magnitude."""
    target = SPECIAL.get(kind.name, TARGETS[kind.scope])
    run = simulated(SPEC, f"{kind.name}@{target}:{START_S}+{LASTS_S}x{kind.magnitude[1]:g}")
    return run, run.simulator.incidents[0]


def stops(kind: FaultKind) -> bool:
    """Whether a kind ends processes or the whole job."""
    return kind.stop is not Stop.NONE


def struck_ranks(incident: Incident, run: Run, job: int) -> Ints:
    """Indices of the ranks of a job that a fault strikes."""
    return np.flatnonzero(culprits(incident, run.simulator.placement.grids[job]))
