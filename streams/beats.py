"""Which grid point the ticks of a node belong to, told by when they come.

A node whose clock is half a second behind dates each tick into the second before, and everybody would wait for it a second longer. Its
clock need not be known for that: where no tick of half a minute came before the next grid point was nearer, they belong to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trainwarden.clock import NS_PER_MS, NS_PER_S

EPOCH_NS = 30 * NS_PER_S
"""It is looked at anew so often, for all nodes at the same cut."""
LEAST_TICKS = 20
"""A node that said less in an epoch is left where it was."""
LATE = 0.6
"""Intervals from the grid point that a node's ticks belong to: it is moved on when none came sooner after it, and back when one came as
much before it. A healthy one comes within a quarter, the wait for the next cut included."""
FAR = 3.5
"""A clock further off than this is the aligner's to correct (`streams.arrivals.Clocks`)."""
MOST = 10
"""Clocks that are off are rare: where more than one node in so many is late, it is the way to us, and nothing changes."""


@dataclass
class _Heard:
    """What came in this epoch: from which boot, how many, and how soon after its grid point at the soonest."""

    boot: str
    ticks: int
    least_ns: int


@dataclass
class Beats:
    """Nodes whose ticks belong to a grid point after the one that they name.

    Delay only ever adds, so the soonest of many ticks is the clock's doing and not the network's; what is common to all nodes (a worker
    that lags, the cut that a tick waits for) is taken off as the median. A function of records and times of cuts alone. Who lies about
    his time moves his own ticks and nobody else's.
    """

    interval_ms: int
    _heard: dict[str, _Heard] = field(default_factory=dict)
    _began_ns: int = 0
    _late: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Boot of each node that is moved on, and by how many grid points."""

    def note(self, node: str, boot_id: str, late_ns: int) -> None:
        """One fresh tick, and how long after the grid point that it names it came. Ticks that waited (spool, backlog) say nothing."""
        heard = self._heard.get(node)
        if heard is None or heard.boot != boot_id:
            self._heard[node] = _Heard(boot_id, 1, late_ns)
            return
        heard.ticks += 1
        heard.least_ns = min(heard.least_ns, late_ns)

    def settle(self, now_ns: int) -> None:
        """End the epoch when it is over; once per cut. One in which the clock of this machine went back is thrown away."""
        if self._began_ns <= now_ns < self._began_ns + EPOCH_NS:
            return
        if now_ns >= self._began_ns:
            self._decide()
        self._began_ns, self._heard = now_ns, {}

    def later(self, node: str, boot_id: str) -> int:
        """By how many grid points the ticks of this boot of a node belong later than they say; 0 for nearly all."""
        boot, points = self._late.get(node, ("", 0))
        return points if boot == boot_id else 0

    def _decide(self) -> None:
        """Anew for whoever was heard enough; who was not heard at all is forgotten."""
        known = {node: heard for node, heard in self._heard.items() if heard.ticks >= LEAST_TICKS}
        if not known:
            return
        shared_ns = median(heard.least_ns for heard in known.values())
        interval_ns = self.interval_ms * NS_PER_MS
        late = {node: moved for node, moved in self._late.items() if node in self._heard and node not in known}
        for node, heard in known.items():
            points, share = self.later(node, heard.boot), (heard.least_ns - shared_ns) / interval_ns
            if abs(share - points) >= LATE:
                points = round(share) if LATE <= share <= FAR else 0
            if points:
                late[node] = heard.boot, points
        if len(late) <= max(1, len(known) // MOST):
            self._late = late

    def snapshot(self) -> dict[str, Any]:
        """Plain containers."""
        heard = {node: [h.boot, h.ticks, h.least_ns] for node, h in self._heard.items()}
        return {"began": self._began_ns, "heard": heard, "late": self._late}

    def restore(self, state: dict[str, Any]) -> None:
        """Take `snapshot`'s containers over; of an older worker there are none."""
        self._began_ns = state.get("began", 0)
        self._late = {node: (boot, points) for node, (boot, points) in state.get("late", {}).items()}
        self._heard = {node: _Heard(*values) for node, values in state.get("heard", {}).items()}
