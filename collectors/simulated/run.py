"""A simulation from beginning to end: plan, pace, deliver, write the ground truth."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectors.simulated import faultplan
from collectors.simulated.encode import Encoder, Sent
from collectors.simulated.engine import Simulator
from collectors.simulated.layout import Layout
from collectors.simulated.noise import Noise
from collectors.simulated.placement import place
from collectors.simulated.spec import Spec
from collectors.simulated.state import Interval
from collectors.simulated.target import Targets
from collectors.simulated.truth import truth
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.errors import UsageError

Deliver = Callable[[Sequence[Sent]], None]


def build(spec: Spec, faults: str = "none", length_s: float = 1800.0, without: Sequence[str] = ()) -> Simulator:
    """A simulator of `spec` with the faults that `faults` asks for (see `collectors.simulated.faultplan`).

    Examples
    --------
    >>> simulator = build(Spec(nodes=4, seed=1), "gpu_thermal:30+60", length_s=120)
    >>> simulator.advance().family("gpu").shape
    (4, 8, 29)
    """
    noise, layout = Noise(spec.seed), Layout(spec)
    placement = place(spec, noise)
    if not placement.grids and faults != "none":
        raise UsageError("--faults: there is no job to strike: ask for one with --jobs")
    planned = faultplan.plan(faults, length_s, Targets(layout, placement), placement, noise, without)
    return Simulator(spec, planned)


@dataclass
class Told:
    """What a run came to."""

    intervals: int = 0
    messages: int = 0
    bytes: int = 0
    behind_s: float = 0.0


class Pace:
    """Keeps to `speed` simulated seconds per second; 0 is as fast as possible.

    The simulation began `begun_ns_ago`: what getting ready took is made up for, so that ticks leave at their own time and not after it.
    """

    def __init__(self, clock: Clock, speed: float, begun_ns_ago: int = 0) -> None:
        self._clock = clock
        self._speed = speed
        self._begun_ns = clock.monotonic_ns() - begun_ns_ago

    def wait(self, simulated_s: float) -> float:
        """Sleep until a moment's turn; seconds by which it is already late."""
        if self._speed <= 0:
            return 0.0
        due_ns = self._begun_ns + round(simulated_s / self._speed * NS_PER_S)
        left_s = (due_ns - self._clock.monotonic_ns()) / NS_PER_S
        if left_s > 0:
            self._clock.sleep(left_s)
        return max(0.0, -left_s)


def run(
    simulator: Simulator, count: int, deliver: Deliver, pace: Pace, stop: Callable[[], bool] = lambda: False
) -> Told:
    """`count` intervals through `deliver`, or fewer when `stop` says so; what is late on its way comes last."""
    encoder, told = Encoder(simulator), Told()
    for interval in simulator.intervals(count):
        if stop():
            break
        sent = encoder.messages(interval)
        told.behind_s = max(told.behind_s, pace.wait(interval.at_s))
        _hand_over(sent, deliver, told)
        told.intervals += 1
    _hand_over(encoder.rest(), deliver, told)
    return told


def _hand_over(sent: Sequence[Sent], deliver: Deliver, told: Told) -> None:
    deliver(sent)
    told.messages += len(sent)
    told.bytes += sum(len(message.value) for message in sent)


def chunks(simulator: Simulator, count: int, size: int) -> Iterator[list[Interval]]:
    """Intervals in lists of `size`, for those who train on arrays; the cut changes nothing."""
    left = count
    while left > 0:
        yield list(simulator.intervals(min(size, left)))
        left -= size


def write_truth(path: Path, simulator: Simulator, asked: str, length_s: float) -> dict[str, Any]:
    """The answer sheet as JSON; also returned.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    sheet = truth(simulator, asked, length_s)
    try:
        path.write_text(json.dumps(sheet, indent=1, allow_nan=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: choose another file with --truth") from None
    return sheet
