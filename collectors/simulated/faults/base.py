"""What a kind of fault is made of: drivers it moves, columns it shows, lines it logs, processes it stops, and the right answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from collectors.simulated.target import Scope


class FaultClass(StrEnum):
    """How a fault hurts."""

    FAIL_STOP = "fail_stop"
    FAIL_SLOW = "fail_slow"
    WORKLOAD = "workload"
    CORRUPTION = "corruption"
    WARNING = "warning"
    TELEMETRY = "telemetry"


class Stop(StrEnum):
    """What becomes of the struck ranks' processes while their job stands."""

    NONE = ""
    DIE = "die"
    BLOCKED = "blocked"
    STOPPED = "stopped"
    ABSENT = "absent"
    NETWORK = "network"
    VANISH = "vanish"


@dataclass(frozen=True)
class Course:
    """How a fault's strength (0 to 1) goes with time: a step, a rise with a time constant, a ramp over the whole duration, an
    exponential climb over it, or pulses of `on_s` every `period_s`."""

    shape: str = "step"
    tau_s: float = 0.0
    period_s: float = 0.0
    on_s: float = 0.0

    def at(self, age_s: float, duration_s: float) -> float:
        """Strength `age_s` after the onset."""
        if self.shape == "rise":
            return 1.0 - math.exp(-age_s / self.tau_s)
        if self.shape == "ramp":
            return min(1.0, age_s / duration_s)
        if self.shape == "climb":
            return (math.exp(4.0 * min(1.0, age_s / duration_s)) - 1.0) / (math.exp(4.0) - 1.0)
        if self.shape == "pulses":
            return 1.0 if age_s % self.period_s < self.on_s else 0.0
        return 1.0

    def __str__(self) -> str:
        if self.shape == "rise":
            return f"rise ({self.tau_s:g} s)"
        return f"{self.on_s:g} s every {self.period_s:g} s" if self.shape == "pulses" else self.shape


STEP = Course()
RAMP = Course("ramp")
CLIMB = Course("climb")


def rise(tau_s: float) -> Course:
    return Course("rise", tau_s=tau_s)


def pulses(period_s: float, on_s: float) -> Course:
    return Course("pulses", period_s=period_s, on_s=on_s)


Amount = Callable[[float], float] | float
"""A number, or a function of the magnitude."""


@dataclass(frozen=True)
class Drive:
    """A driver's value at full strength."""

    driver: str
    amount: Amount


@dataclass(frozen=True)
class Show:
    """A column that changes by itself: ``add``, ``mul``, ``set``, ``bits`` (or-ed in), ``count`` (events at a rate per second)."""

    column: str
    how: str
    amount: Amount


@dataclass(frozen=True)
class Say:
    """A log line on the struck nodes: once, `after_s` the onset (-1: when it fails), or again every `every_s`.

    `{gpu}`, `{port}`, `{rank}`, `{node}`, `{pid}`, `{bus}` and `{step}` are filled in.
    """

    code: str
    line: str
    source: str = "kernel"
    severity: str = "error"
    every_s: float = 0.0
    after_s: float = 0.0


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault.

    Attributes
    ----------
    number
        Row of the fault taxonomy that it realises.
    magnitude
        Least, usual and greatest; what it measures is in `unit`.
    signals
        What must move: ``family.column+`` or ``-``, ``steps.local+``, ``steps.duration+``, ``log:<code>``, ``ticks-``...
    action
        The right answer; the first word is what must be done first.
    stop_at
        Share of the duration after which processes stop, or a trend ends in a failure; lines with `after_s` = -1 come then too.
    bad_node
        Whether a node is to blame; false for shared parts, software and workload.
    """

    name: str
    number: int
    cls: FaultClass
    scope: Scope
    help: str
    signals: tuple[str, ...]
    action: str
    effects: tuple[Drive | Show, ...] = ()
    says: tuple[Say, ...] = ()
    magnitude: tuple[float, float, float] = (1.0, 1.0, 1.0)
    unit: str = ""
    duration_s: float = 300.0
    course: Course = STEP
    stop: Stop = Stop.NONE
    stop_at: float = 0.0
    exit_code: int = -6
    bad_node: bool = False

    @property
    def slows(self) -> bool:
        """Whether jobs run slower, but run."""
        return self.cls in (FaultClass.FAIL_SLOW, FaultClass.WORKLOAD)


def amount_of(amount: Amount, magnitude: float) -> float:
    """The number that `amount` is at `magnitude`."""
    return float(amount(magnitude)) if callable(amount) else amount
