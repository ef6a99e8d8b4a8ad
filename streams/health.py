"""Vital signs of the stream worker, read from its own self-metrics: is it in time, can it read what it gets, do its detectors live."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from streams.stage import Output
from trainwarden.bus import Message
from trainwarden.clock import NS_PER_S
from trainwarden.config import Config, HealthConfig
from trainwarden.errors import DecodeError
from trainwarden.records import Incident, Verdict, decode_as, encode
from trainwarden.selfmetrics import MetricName, Metrics
from trainwarden.topics import RAW, SUMMARIES, VERDICTS
from trainwarden.vitals import Vital, Vitals

WORKER = "worker"
AGES: tuple[MetricName, ...] = ("tw_tick_age_seconds", "tw_event_age_seconds", "tw_log_age_seconds")


class WorkerVitals:
    """Reads the vital signs of a leading worker, or of one unit of it; keeps a minute of the dead-letter count."""

    def __init__(self, settings: HealthConfig, metrics: Metrics, part: str = WORKER) -> None:
        self._settings = settings
        self._metrics = metrics
        self._part = part
        self._refused: deque[tuple[int, float]] = deque()

    def read(self, now_ns: int, disabled: Mapping[str, str]) -> Iterator[Vital]:
        """The signs now; `disabled` says which detectors are off, and why."""
        yield self._lateness()
        yield self._refusals(now_ns)
        for name, why in sorted(disabled.items()):
            text = f"detector {name} broke and is off until the worker restarts; what it looks for is not seen: {why}"
            yield Vital("detector_off", f"{WORKER}:{name}", 1.0, 0.0, "", text, persist_s=0.0)

    def _lateness(self) -> Vital:
        ticks_s, events_s, logs_s = (self._metrics.value(name) for name in AGES)
        unread = sum(self._metrics.value("tw_lag_records", topic=topic.name) for topic in (*RAW, SUMMARIES))
        if self._part != WORKER and not unread:
            ticks_s = 0.0  # a unit that has read all there is waits for others: that is said once, by the unit of the correlator
        behind = (
            f"it is behind by {unread:.0f} records"
            if unread
            else "nothing waits on the broker: no collector sends ticks (of two stages: or a unit before it is late)"
        )
        if (keep := self._metrics.value("tw_keep_every")) > 1:
            behind += f"; detectors of levels and trends are shown one second in {keep:.0f} until it has caught up"
        what, age_s = max(("tick", ticks_s), ("event", events_s), ("log line", logs_s), key=lambda told: told[1])
        limit_s = self._settings.late_s
        text = f"the newest {what} that was looked at is {age_s:.0f} s old (limit {limit_s:g} s): {behind}"
        return Vital("pipeline_late", self._part, age_s, limit_s, "s", text)

    def _refusals(self, now_ns: int) -> Vital:
        total = self._metrics.total("tw_dead_letters_total")
        self._refused.append((now_ns, total))
        while not now_ns - 60 * NS_PER_S <= self._refused[0][0] <= now_ns:
            self._refused.popleft()
        fresh = total - self._refused[0][1]
        return Vital("records_refused", self._part, fresh, self._settings.refused_per_minute, "1/min", persist_s=0.0, calm_s=90.0,
                     text=f"{fresh:.0f} records in a minute could not be read and lie on tw.dead with their reasons")  # fmt: skip


class WorkerHealth:
    """What a leading worker, or one that has a unit, has to say of itself, at most once a second; ask as often as you like.

    Parameters
    ----------
    unit
        Name of the unit; empty for a worker that does it all, and for the unit of the correlator, which speaks for the whole.
    runs
        Which detectors it has, by name.
    """

    def __init__(
        self, config: Config, metrics: Metrics, unit: str = "", runs: Callable[[str], bool] = lambda detector: True
    ) -> None:
        self._cluster = config.cluster
        self._part = f"{WORKER}:{unit}" if unit else WORKER
        self._runs = runs
        self._signs = WorkerVitals(config.health, metrics, self._part)
        self._vitals = Vitals(config.cluster, config.policy)
        self._next_ns = 0

    def take_over(self, messages: Iterable[Message]) -> None:
        """Read the incidents topic: what a leader before us said of itself is ours to take back."""
        self._vitals.adopt((incident for message in messages for incident in _incident(message)), self._is_ours)

    def _is_ours(self, part: str) -> bool:
        """Whether a part is this unit, or a detector of it."""
        worker, _, name = part.partition(":")
        return part == self._part or (worker == WORKER and bool(name) and "/" not in name and self._runs(name))

    def outputs(self, now_ns: int, disabled: Mapping[str, str]) -> list[Output]:
        """Verdicts to publish now."""
        if now_ns < self._next_ns <= now_ns + NS_PER_S:  # further away it is when the clock was set back
            return []
        self._next_ns = now_ns + NS_PER_S
        return [
            verdict_output(self._cluster, verdict)
            for verdict in self._vitals.look(now_ns, self._signs.read(now_ns, disabled))
        ]


def verdict_output(cluster: str, verdict: Verdict) -> Output:
    """A verdict as a message."""
    return Output(VERDICTS.name, cluster.encode(), encode(verdict))


def _incident(message: Message) -> Iterator[Incident]:
    """The incident in a message; one that cannot be read is the correlator's to refuse."""
    with contextlib.suppress(DecodeError):
        if message.value:
            yield decode_as(Incident, message.value)
