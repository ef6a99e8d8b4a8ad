"""Whether this process has been running all the while: a leader that stood still may have a successor and not know it."""

from __future__ import annotations

from trainwarden.clock import NS_PER_S, Clock


class StoodStill(Exception):
    """This process was stopped, swapped out or frozen for so long that another one may lead by now."""


class Pulse:
    """Beats while the process runs; a gap between two beats stays known until `forget`.

    Parameters
    ----------
    limit_s
        The longest gap after which nobody else can have been made leader: less than the group's session time-out.

    Examples
    --------
    >>> from trainwarden.clock import SimulatedClock
    >>> clock = SimulatedClock(0)
    >>> pulse = Pulse(clock, limit_s=5.0)
    >>> clock.sleep(1.0); pulse.beat(); pulse.stood_still
    False
    >>> clock.sleep(20.0); pulse.stood_still
    True
    >>> pulse.beat(); pulse.stood_still
    True
    """

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self._clock = clock
        self._limit_ns = int(limit_s * NS_PER_S)
        self._last_ns = clock.monotonic_ns()
        self._longest_ns = 0

    def beat(self) -> None:
        """To be called often, from the loop that speaks for this process."""
        now_ns = self._clock.monotonic_ns()
        self._longest_ns = max(self._longest_ns, now_ns - self._last_ns)
        self._last_ns = now_ns

    @property
    def stood_still(self) -> bool:
        """Whether there was a gap, or one is just ending: right also before the first beat after it."""
        return max(self._longest_ns, self._clock.monotonic_ns() - self._last_ns) > self._limit_ns

    def check(self) -> None:
        """Raise `StoodStill` after a gap: to be called before anything is said as leader."""
        if self.stood_still:
            raise StoodStill

    def forget(self) -> None:
        """It has been asked who leads: begin anew."""
        self._last_ns, self._longest_ns = self._clock.monotonic_ns(), 0
