"""One step (or evaluation) as it lies in time, and what each rank was doing in any second of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collectors.simulated.faults.base import Stop
from collectors.simulated.noise import F64, Bools
from collectors.simulated.steps import Outcome

REDUCE_SHARE = 0.25
"""Of a step's traffic, what flows at the barrier; the rest overlaps with computing."""


@dataclass(frozen=True)
class Halt:
    """A job stands from `at_s` to `until_s`. `culprits` marks the ranks whose process is struck; none for network and code."""

    at_s: float
    until_s: float
    stop: Stop
    exit_code: int
    culprits: Bools

    @property
    def leaves_s(self) -> float:
        """When the processes end: the watchdog of the collectives does not wait for ever."""
        return min(self.until_s, self.at_s + 600.0)


@dataclass(frozen=True)
class Past:
    """Boundaries in seconds since the simulation began; arrays over the ranks of a job.

    Attributes
    ----------
    density
        Share of the time from data to arrival in which the rank itself computes; the rest it waits inside.
    stops
        When a rank's process stops doing anything; infinite for healthy ones.
    shown_s
        When the step is reported; infinite when it never ends.
    """

    number: int
    phase: str
    attempt: int
    begin: float
    data_end: F64
    arrived: F64
    reducing: F64
    reduced: F64
    finish: float
    end: float
    density: F64
    stops: F64
    shown_s: float
    outcome: Outcome
    halt: Halt | None = None


@dataclass(frozen=True)
class Activity:
    """Shares of an interval, per rank: own computing, waiting in kernels, input, checkpoint; traffic in units of the mean rate."""

    compute: F64
    spin: F64
    data: F64
    traffic: F64
    checkpoint: float


def lay(outcome: Outcome, number: int, phase: str, attempt: int, begin: float, checkpoint_s: float) -> Past:
    """Put a step at its place in time."""
    flat = outcome.arrived.shape
    data_end = begin + outcome.data.ravel()
    arrived = begin + outcome.arrived.ravel()
    finish = begin + outcome.finish
    return Past(
        number, phase, attempt, begin, data_end, arrived, begin + _spread(outcome.reducing, flat), begin + _spread(outcome.reduced, flat),
        finish, finish + checkpoint_s, np.minimum(1.0, outcome.own.ravel() / np.maximum(arrived - data_end, 1e-9)),
        np.full(arrived.shape, np.inf), finish + checkpoint_s, outcome,
    )  # fmt: skip


def halted(past: Past, halt: Halt, coupled: Bools) -> Past:
    """The same step when it never ends: `coupled` ranks wait from the halt on, the others once they have arrived."""
    arrived = np.where(coupled, np.minimum(past.arrived, halt.at_s), past.arrived)
    stops = np.where(halt.culprits & (halt.stop is not Stop.NETWORK), halt.at_s, np.inf)
    never = np.full(arrived.shape, np.inf)
    return Past(
        past.number, past.phase, past.attempt, past.begin, np.minimum(past.data_end, arrived), arrived, never,
        np.full(arrived.shape, halt.leaves_s), halt.leaves_s, halt.leaves_s, past.density, stops, np.inf, past.outcome, halt,
    )  # fmt: skip


def activity(past: Past, start_s: float, stop_s: float, nominal_s: float) -> Activity:
    """What the ranks did from `start_s` to `stop_s`."""
    width = stop_s - start_s

    def share(begin: F64 | float, end: F64 | float) -> F64:
        low, high = np.maximum(begin, start_s), np.minimum(np.minimum(end, past.stops), stop_s)
        return np.asarray(np.maximum(high - low, 0.0) / width)

    inside, closing = share(past.data_end, past.arrived), share(past.reduced, past.finish)
    flowing = np.zeros_like(inside) if past.halt else share(past.reducing, past.reduced)
    traffic = (1 - REDUCE_SHARE) * inside / np.maximum(past.arrived - past.data_end, 1e-9)
    traffic += REDUCE_SHARE * flowing / np.maximum(past.reduced - past.reducing, 1e-9) if past.halt is None else 0.0
    saving = max(0.0, min(past.end, stop_s) - max(past.finish, start_s)) / width
    return Activity(
        past.density * inside + 0.6 * closing,
        (1 - past.density) * inside + share(past.arrived, past.reduced) + 0.4 * closing,
        share(past.begin, past.data_end), nominal_s * traffic, saving,
    )  # fmt: skip


def _spread(of_group: F64, shape: tuple[int, ...]) -> F64:
    return np.broadcast_to(of_group[:, None, :], shape).ravel()
