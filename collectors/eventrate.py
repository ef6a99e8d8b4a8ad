"""Which log events are as good as urgent: those with a code, as long as the node does not say the same code in floods."""

from __future__ import annotations

from trainwarden.clock import NS_PER_S

BURST = 200.0
"""So many events of one code at once; a job's ranks all end at once, and a node has a few dozen of them."""
PER_S = 20.0
CODES = 256
"""Codes of one node that are counted apart; beyond that the others are counted together."""
OTHERS = ""


class EventRate:
    """A token bucket for each code. Not thread-safe.

    Examples
    --------
    >>> rate = EventRate()
    >>> sum(rate.admits("xid:31", 0) for _ in range(10_000)), rate.admits("worker_exit:-9", 0)
    (200, True)
    """

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, int]] = {}
        self._pruned_ns = 0

    def admits(self, code: str, now_ns: int) -> bool:
        """Whether an event with this code may go with the urgent ones; one without a code may not."""
        if not code:
            return False
        bucket = code if code in self._buckets or self._has_room(now_ns) else OTHERS
        tokens = self._tokens(bucket, now_ns)
        admitted = tokens >= 1
        self._buckets[bucket] = (tokens - admitted, now_ns)
        return admitted

    def _tokens(self, bucket: str, now_ns: int) -> float:
        tokens, at_ns = self._buckets.get(bucket, (BURST, now_ns))
        return min(BURST, tokens + (now_ns - at_ns) / NS_PER_S * PER_S)

    def _has_room(self, now_ns: int) -> bool:
        """Forgets, at most once a second, the codes that have long been silent."""
        if len(self._buckets) >= CODES and now_ns - self._pruned_ns >= NS_PER_S:
            self._pruned_ns = now_ns
            self._buckets = {code: left for code, left in self._buckets.items() if self._tokens(code, now_ns) < BURST}
        return len(self._buckets) < CODES
