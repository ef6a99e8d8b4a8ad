"""Folding of repeats and a limit of rate; what is held back is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from trainwarden.clock import NS_PER_S
from trainwarden.records import LogEvent


@dataclass
class _Fold:
    """Repeats of a line that was already published."""

    event: LogEvent
    until_ns: int
    repeats: int = 0


class Folder:
    """Folds identical lines and limits the rate per code; what is held back is counted and said with the next event.

    Parameters
    ----------
    fold_s
        Repeats within this time after the first one are published as one event with their number.
    burst, per_s
        Token bucket per file and code.
    refused
        Called with the file's name for each line over the rate.
    """

    def __init__(self, fold_s: float, burst: float, per_s: float, refused: Callable[[str], None]) -> None:
        self._fold_ns = int(fold_s * NS_PER_S)
        self._burst = burst
        self._per_s = per_s
        self._refused = refused
        self._folds: dict[str, _Fold] = {}
        self._buckets: dict[str, tuple[float, int]] = {}
        self.dropped: dict[str, int] = {}

    def holds(self, key: str, source: str, code: str, now_ns: int) -> bool:
        """Whether a line is folded into one before it, or is over the rate; it is counted then, and no event need be made of it."""
        fold = self._folds.get(key)
        if fold is not None and now_ns < fold.until_ns:
            fold.repeats += 1
            return True
        bucket = f"{source}\x1f{code}"
        if self._take(bucket, now_ns):
            return False
        self.dropped[bucket] = self.dropped.get(bucket, 0) + 1
        self._refused(source)
        return True

    def admit(self, key: str, event: LogEvent, now_ns: int) -> LogEvent:
        """The event to publish, for a line that is not held: it says how many were dropped before."""
        self._folds[key] = _Fold(event, now_ns + self._fold_ns)
        missed = self.dropped.pop(f"{event.source}\x1f{event.code}", 0)
        if not missed:
            return event
        return msgspec.structs.replace(event, attributes={**event.attributes, "dropped_before": str(missed)})

    def settle(self, now_ns: int) -> list[LogEvent]:
        """Events for the repeats of folds that are over."""
        over = [key for key, fold in self._folds.items() if now_ns >= fold.until_ns]
        settled = []
        for key in over:
            fold = self._folds.pop(key)
            if fold.repeats:
                settled.append(msgspec.structs.replace(fold.event, repeat=fold.repeats))
        if self._buckets:
            self._buckets = {
                k: v for k, v in self._buckets.items() if now_ns - v[1] < 60 * NS_PER_S or k in self.dropped
            }
        return settled

    def _take(self, bucket: str, now_ns: int) -> bool:
        tokens, at_ns = self._buckets.get(bucket, (self._burst, now_ns))
        tokens = min(self._burst, tokens + (now_ns - at_ns) / NS_PER_S * self._per_s)
        self._buckets[bucket] = (tokens - 1 if tokens >= 1 else tokens, now_ns)
        return tokens >= 1
