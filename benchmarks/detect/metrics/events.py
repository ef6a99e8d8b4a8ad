"""What an operator lives with: events found, how late, and how many alarms a day mean nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.detect.data import DAY_S, Spans, spans_of

QUIET_ROWS = 5
"""Alarms with fewer normal rows between them are one alarm."""


@dataclass(frozen=True)
class EventScore:
    """Events found of those labelled, delay of each found one in seconds, false alarms and days of data they came from."""

    found: int
    events: int
    delays_s: tuple[float, ...]
    false_alarms: int
    days: float

    @property
    def recall(self) -> float:
        return self.found / self.events if self.events else float("nan")

    @property
    def false_alarms_per_day(self) -> float:
        return self.false_alarms / self.days


def event_score(alarms: NDArray[np.bool_], spans: Spans, step_s: float) -> EventScore:
    """Found when an alarm is raised inside the labelled span; false when an alarm touches no span from its start to its end."""
    delays = tuple(
        float(np.argmax(alarms[start : end + 1]) * step_s) for start, end in spans if alarms[start : end + 1].any()
    )
    wrong = sum(not any(first <= end and last >= start for start, end in spans) for first, last in joined(alarms))
    return EventScore(len(delays), len(spans), delays, wrong, len(alarms) * step_s / DAY_S)


def joined(alarms: NDArray[np.bool_]) -> Spans:
    """Runs of alarms, those less than `QUIET_ROWS` apart joined."""
    out: list[tuple[int, int]] = []
    for start, end in spans_of(alarms):
        if out and start - out[-1][1] <= QUIET_ROWS:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return tuple(out)
