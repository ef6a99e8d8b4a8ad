"""Costly fits on a budget: so many units of work a tick, the one that waits longest first; none is lost and none stalls a tick."""

from __future__ import annotations

import msgspec


class Due(msgspec.Struct):
    """A fit that waits: what to fit and about what it costs (units, see `SeasonalModel.cost_units`)."""

    key: str
    cost: float


class RefitQueue(msgspec.Struct):
    """Fits that wait, oldest first, and the budget saved up.

    Examples
    --------
    >>> queue = RefitQueue()
    >>> queue.ask("a", 30.0), queue.ask("b", 30.0), queue.ask("a", 30.0)
    (None, None, None)
    >>> queue.take(40.0), queue.take(20.0), queue.take(20.0)
    (['a'], ['b'], [])
    """

    waiting: list[Due] = []
    saved: float = 0.0

    def ask(self, key: str, cost: float) -> None:
        """Ask for a fit; asking again while it waits changes nothing."""
        if all(due.key != key for due in self.waiting):
            self.waiting = [*self.waiting, Due(key, cost)]

    def take(self, budget: float) -> list[str]:
        """What to fit now: as much as this tick's budget and what earlier ticks saved pays for. A fit dearer than a budget waits until
        enough is saved; an idle queue saves nothing."""
        self.saved = self.saved + budget if self.waiting else 0.0
        taken = []
        while self.waiting and self.waiting[0].cost <= self.saved:
            due, self.waiting = self.waiting[0], self.waiting[1:]
            self.saved -= due.cost
            taken.append(due.key)
        if not self.waiting:
            self.saved = 0.0
        return taken
