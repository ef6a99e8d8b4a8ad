"""One simulated interval: the raw arrays from which metrics are made, and the arrays of metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from collectors.simulated.families import FAMILIES
from collectors.simulated.layout import Layout
from collectors.simulated.noise import F32, F64, Bools, Ints
from collectors.simulated.past import Past
from collectors.simulated.placement import Grid
from collectors.simulated.spec import GPUS
from trainwarden.records import LogEvent

MANAGEMENT, STORAGE = "bond0", "bond1"


@dataclass
class Load:
    """What every GPU and node did in an interval, shares of it; processes of nodes without a job are NaN.

    Attributes
    ----------
    compute, spin, data
        [node, 8] own computing, waiting inside kernels, waiting for input.
    traffic
        [node, 8] in units of the job's mean rate.
    usual
        [node] share of computing that the levels of a job belong to.
    alive, proc_state, phase, last_step, step_age_s
        [node, 8] as the process family shows them.
    """

    compute: F64
    spin: F64
    data: F64
    traffic: F64
    checkpoint: F64
    usual: F64
    alive: F64
    proc_state: F64
    phase: F64
    last_step: F64
    step_age_s: F64

    @classmethod
    def empty(cls, size: int) -> Load:
        """Nothing runs."""
        compute, spin, data, traffic = np.zeros((4, size, GPUS))
        alive, state, phase, last_step, step_age_s = np.full((5, size, GPUS), np.nan)
        return cls(
            compute, spin, data, traffic, np.zeros(size), np.ones(size), alive, state, phase, last_step, step_age_s
        )


@dataclass(frozen=True)
class Steps:
    """A step of one job that ended in this interval."""

    grid: Grid
    past: Past
    loss: float
    grad_norm: float
    grad_norm_local: F64
    checksum: F64
    finite: bool


@dataclass(frozen=True)
class Log:
    """A log event of a node at a moment (seconds since the beginning)."""

    at_s: float
    node: int
    event: LogEvent


@dataclass
class Interval:
    """Everything that one interval brought. Arrays are [node, device, column]; NaN where there is no value.

    Attributes
    ----------
    number, at_s
        Count from 0, and its end in seconds since the beginning.
    heard, silent
        [node] whether this interval's tick leaves at all; whether the collector says nothing whatever.
    late_s, offset_ms
        [node] delay on the way, and error of its clock.
    attempts
        Attempt of each job.
    restarted
        Jobs whose layout must be announced anew.
    """

    number: int
    at_s: float
    values: dict[str, F32]
    steps: list[Steps]
    logs: list[Log]
    heard: Bools
    silent: Bools
    late_s: F64
    offset_ms: F64
    attempts: Ints
    restarted: list[int] = field(default_factory=list)

    def family(self, name: str) -> F32:
        """Values of a family: [node, device, column]."""
        return self.values[name]


def devices(layout: Layout, family: str) -> tuple[str, ...]:
    """Device names of a family that are the same on every node (peers and ranks differ: `mesh` and `process` give none)."""
    return {
        "gpu": tuple(f"gpu{i}" for i in range(GPUS)), "nic": (*layout.rail_devices, MANAGEMENT, STORAGE), "port": layout.rail_devices,
        "host": ("host",), "board": ("board",), "mesh": (), "process": (),
    }[family]  # fmt: skip


def blank(layout: Layout, family: str) -> F32:
    """An array of NaN with a family's shape."""
    count = {"mesh": layout.peers.shape[1], "process": GPUS}.get(family) or len(devices(layout, family))
    return np.full((layout.size, count, len(FAMILIES[family].metrics)), np.nan, dtype=np.float32)
