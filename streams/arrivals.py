"""What arrived: duplicates by sequence number, and how far each node's clock is off."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trainwarden.clock import NS_PER_MS
from trainwarden.records import Record

KEPT_RANGES = 64
KEPT_BOOTS = 3
CLOCK_SAMPLES = 10
TRUSTED_SAMPLES = 3


class Seen:
    """Sequence numbers already taken, as ranges per (record kind, node, boot): a node that loses nothing costs one range.

    Examples
    --------
    >>> from trainwarden.records import LogEvent
    >>> seen = Seen()
    >>> event = LogEvent(node="n0", boot_id="b", seq=7)
    >>> seen.first_time("log", event), seen.first_time("log", event)
    (True, False)
    """

    def __init__(self) -> None:
        self._ranges: dict[str, dict[str, list[list[int]]]] = {}

    def first_time(self, kind: str, record: Record) -> bool:
        """Whether this record is new. Records without boot id and number cannot be told apart and always are."""
        if not record.boot_id and not record.seq:
            return True
        key = f"{kind}/{record.node}"
        boots = self._ranges.get(key)
        if boots is None:
            boots = self._ranges[key] = {}
        ranges = boots.get(record.boot_id)
        if ranges and record.seq == ranges[-1][1] + 1:  # as nearly always
            ranges[-1][1] = record.seq
            return True
        if record.boot_id not in boots and len(boots) >= KEPT_BOOTS:
            del boots[next(iter(boots))]
        return _take(boots.setdefault(record.boot_id, []), record.seq)

    def snapshot(self) -> dict[str, dict[str, list[list[int]]]]:
        """Plain containers."""
        return self._ranges

    def restore(self, state: dict[str, dict[str, list[list[int]]]]) -> None:
        """Take `snapshot`'s containers over."""
        self._ranges = state


def _take(ranges: list[list[int]], seq: int) -> bool:
    """Add `seq` to sorted disjoint `ranges`; False when it was there."""
    if ranges and seq == ranges[-1][1] + 1:
        ranges[-1][1] = seq
        return True
    at = len(ranges)
    while at and ranges[at - 1][0] > seq:
        at -= 1
    if at and ranges[at - 1][1] >= seq:
        return False
    ranges.insert(at, [seq, seq])
    _join(ranges, at)
    if len(ranges) > KEPT_RANGES:
        # a hole this old is loss: closing it keeps memory flat
        ranges[0:2] = [[ranges[0][0], ranges[1][1]]]
    return True


def _join(ranges: list[list[int]], at: int) -> None:
    for left in (at, at - 1):
        if 0 <= left < len(ranges) - 1 and ranges[left][1] + 1 == ranges[left + 1][0]:
            ranges[left : left + 2] = [[ranges[left][0], ranges[left + 1][1]]]


@dataclass
class Clocks:
    """Offset of each node's clock, estimated as the least of (arrival − observed) over its last ticks.

    Delay only ever adds, so the minimum is the offset plus the shortest delay; what all nodes share (a worker that lags) is
    taken off as the median. Corrections are whole intervals: they move a node on the grid and leave its phase alone.
    """

    limit_ms: int
    interval_ms: int
    _samples: dict[str, deque[int]] = field(default_factory=dict)
    _least: dict[str, int] = field(default_factory=dict)
    """Of the samples of each node that has enough of them to be trusted."""
    _boots: dict[str, str] = field(default_factory=dict)
    _settled: bool = True
    _shared_ns: int = 0

    def note(self, node: str, boot_id: str, observed_at_ns: int, arrived_at_ns: int) -> None:
        """One fresh tick. Ticks that waited (spool, backlog) say nothing about clocks and must not be given here."""
        if self._boots.get(node) != boot_id:
            self._boots[node] = boot_id
            self._samples[node] = deque(maxlen=CLOCK_SAMPLES)
            self._least.pop(node, None)
        samples = self._samples[node]
        samples.append(arrived_at_ns - observed_at_ns)
        if len(samples) >= TRUSTED_SAMPLES:
            self._least[node] = min(samples)
        self._settled = False

    def count(self, is_wild: Callable[[int], bool]) -> tuple[int, int]:
        """How many nodes, of how many that were heard, are off by what `is_wild` says of (arrival - observed) of their newest tick."""
        newest = [samples[-1] for samples in self._samples.values() if samples]
        return sum(map(is_wild, newest)), len(newest)

    def settle(self) -> None:
        """Work out what all nodes share; once per cut."""
        if not self._settled:
            self._shared_ns = int(median(self._least.values())) if len(self._least) > 1 else 0
            self._settled = True

    def correction_ns(self, node: str, observed_at_ns: int, arrived_at_ns: int) -> int:
        """What to add to the node's times, 0 while its clock is within the limit."""
        least_ns = self._least.get(node)
        # a record cannot arrive before it was made: a clock ahead of ours shows at once
        offset_ns = min(0, arrived_at_ns - observed_at_ns) if least_ns is None else least_ns - self._shared_ns
        if abs(offset_ns) <= self.limit_ms * NS_PER_MS:
            return 0
        interval_ns = self.interval_ms * NS_PER_MS
        return round(offset_ns / interval_ns) * interval_ns

    def snapshot(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            "boots": self._boots,
            "samples": {node: list(values) for node, values in self._samples.items()},
            "shared": self._shared_ns,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take `snapshot`'s containers over."""
        self._boots = dict(state["boots"])
        self._samples = {node: deque(values, maxlen=CLOCK_SAMPLES) for node, values in state["samples"].items()}
        self._shared_ns = state["shared"]
        self._least = {node: min(kept) for node, kept in self._samples.items() if len(kept) >= TRUSTED_SAMPLES}
