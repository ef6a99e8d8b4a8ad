"""The store writer's own health: said on the verdicts topic, where the worker makes an incident of it."""

from __future__ import annotations

import contextlib
from typing import Any

from streams.store.errors import StoreError, store_errors
from streams.store.writer import StoreWriter
from trainwarden.bus import Bus
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.config import Config
from trainwarden.errors import BusError
from trainwarden.records import encode
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import VERDICTS
from trainwarden.vitals import Vital, Vitals

FLUSH_S = 1.0
QUESTION_S = 60
PART = "store"
OPEN = f"""SELECT count() FROM incidents
WHERE kind = 'pipeline_late' AND culprit = 'telemetry:{PART}' AND status IN ('open', 'acting')"""


class StoreHealth:
    """Looks once a second at how long the writer has not kept up.

    What cannot be published, because the broker is away, is dropped: nobody could hear it, and it is said again while it lasts.
    """

    def __init__(self, config: Config, bus: Bus, client: Any, clock: Clock, metrics: Metrics) -> None:
        self._cluster = config.cluster
        self._late_s = config.health.late_s
        self._clock = clock
        self._metrics = metrics
        self._publisher = bus.publisher()
        self._vitals = Vitals(config.cluster, config.policy)
        self._client = client
        self._next_ns = self._next_question_ns = 0

    def look(self, writer: StoreWriter) -> None:
        """Say what there is to say of `writer`."""
        now_ns, behind_s = self._clock.now_ns(), writer.behind_s
        self._metrics.set("tw_store_behind_seconds", behind_s)
        if now_ns < self._next_ns <= now_ns + NS_PER_S:  # further away it is when the clock was set back
            return
        self._next_ns = now_ns + NS_PER_S
        why = writer.trouble or "records come faster than they are written"
        text = f"the store is {behind_s:.0f} s behind (limit {self._late_s:g} s): {why}; nothing is lost, queries show an old picture"
        if not writer.trouble and not now_ns < self._next_question_ns <= now_ns + QUESTION_S * NS_PER_S:
            self._next_question_ns = now_ns + QUESTION_S * NS_PER_S
            self._remember(now_ns)
        vital = Vital("pipeline_late", PART, behind_s, self._late_s, "s", text)
        for verdict in self._vitals.look(now_ns, [vital]):
            self._publisher.publish(VERDICTS.name, self._cluster.encode(), encode(verdict))
            self._flush()

    def _remember(self, now_ns: int) -> None:
        """A writer before us may have said it was late, and ended before it could take that back."""
        with contextlib.suppress(StoreError), store_errors("asking for incidents of the store's own"):
            if self._client.query(OPEN).result_rows[0][0]:
                self._vitals.suspect("pipeline_late", PART, now_ns)

    def close(self) -> None:
        """Let the publisher go."""
        self._publisher.close()

    def _flush(self) -> None:
        try:
            self._publisher.flush(FLUSH_S)
        except BusError:
            return
