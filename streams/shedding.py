"""What a worker leaves out when it cannot keep up, and when.

Of all that comes, one more second of slow series is worth least: the next second says nearly the same. So a worker that is behind shows
the detectors that follow levels and trends (`PATIENT`) every second, fourth or eighth grid point only, until it has caught up. They are
also the dear ones. Who counts single ticks (hangs, probes, codes, telemetry) sees all of them; steps, logs, topology, verdicts and actions
are never left out, and the store writes every sample all the same. With one point in eight the recordings of real faults still come out
right, all 20 faults at the same delay; thinning everything would lose half of them (`tests/streams/test_shedding.py`; all in
`make test-long`).

What was left out is counted, stands on the status page while it lasts, and is written into each cut (`FrameCut.keep_every`), so that a
successor or a replay leaves out the same and says the same.

The collectors do the like when their spool fills (`collectors.spool`): low-value samples first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from detectors.base import Detector, Frame
from trainwarden.clock import NS_PER_MS

LEVELS = ((20.0, 8), (10.0, 4), (4.0, 2))
"""From a backlog of so many seconds of work on, one grid point of so many is looked at. Detectors are three quarters of a worker's cost
(docs/scale.md): beyond one in eight nothing more is won."""
LEARN = 0.2
PATIENT = frozenset({"threshold", "series", "relation"})
"""Packages of detectors that follow levels and trends."""


@dataclass
class Shedding:
    """The level in use: it rises at once, and falls when the backlog is below half of what it began at.

    A backlog is told in seconds that it takes to work it off, by what a whole grid point took lately: that a stream is read faster than
    it was sent, as in a replay, is no overload while the worker copes.
    """

    keep_every: int = 1
    point_ms: float = 0.0

    def look(self, points: float) -> int:
        """The level for a backlog of so many grid points.

        Examples
        --------
        >>> shedding = Shedding(point_ms=500.0)
        >>> [shedding.look(points) for points in (3, 10, 60, 30, 18, 5, 3)]
        [1, 2, 8, 8, 4, 2, 1]
        """
        backlog_s = points * self.point_ms / 1000
        rising = next((keep for limit_s, keep in LEVELS if backlog_s >= limit_s), 1)
        holding = next((keep for limit_s, keep in LEVELS if backlog_s >= limit_s / 2), 1)
        self.keep_every = max(rising, min(self.keep_every, holding))
        return self.keep_every

    def took(self, points: int, duration_ms: float) -> None:
        """So many whole grid points took so long; what was thinned says nothing of that."""
        if points and self.keep_every == 1:
            learn = LEARN if self.point_ms else 1.0
            self.point_ms += learn * (duration_ms / points - self.point_ms)


def patient(detector: Detector) -> bool:
    """Whether a detector may be shown less. One from outside the package counts its ticks, for all we know."""
    package, _, rest = type(detector).__module__.partition(".")
    return package == "detectors" and rest.partition(".")[0] in PATIENT


def thinned(frame: Frame, keep_every: int) -> Frame:
    """The frame with one of `keep_every` grid points, the same ones however the stream was cut into frames."""
    if keep_every <= 1:
        return frame
    kept = (tick for tick in frame.ticks if tick.at_ns // (tick.interval_ms * NS_PER_MS) % keep_every == 0)
    return replace(frame, ticks=tuple(kept))
