"""Ledger and topic together: a line is durable first, then published; what was not delivered is published again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from actions.ledger import Ledger, Row
from trainwarden.bus import Publisher
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.errors import BusError
from trainwarden.records import ActionResult, Plan, encode
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import ACTIONS

LOG = logging.getLogger("trainwarden.actions.journal")

REPEAT_S = 60
_PUBLISHED = "published"


class Journal:
    """Writes rows. Readers of `tw.actions` may see a row twice: `seq` is its number in the ledger."""

    def __init__(self, ledger: Ledger, publisher: Publisher, metrics: Metrics, cluster: str, clock: Clock) -> None:
        self.ledger = ledger
        self._publisher = publisher
        self._metrics = metrics
        self._cluster = cluster
        self._clock = clock
        self._lock = threading.Lock()
        self._newest_seq = 0
        self._told_until_ns: dict[tuple[str, str], int] = {}

    def add_plan(self, plan: Plan, signature: str, rows: Sequence[Row]) -> None:
        """A plan with its first rows."""
        written = self.ledger.add_plan(plan, signature, rows)
        self._send_plan(plan)
        for row in written:
            self._send(row)

    def add(self, row: Row) -> Row:
        """One more row of a plan."""
        written = self.ledger.add(row)
        self._send(written)
        return written

    def tell(self, row: Row) -> None:
        """Publish a row that the ledger refused: somebody must learn that nothing is done. Repeats wait a minute."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._told_until_ns.get((row.incident_id, row.reason), 0):
            return
        self._told_until_ns = {key: until for key, until in self._told_until_ns.items() if until > now_ns}
        self._told_until_ns[row.incident_id, row.reason] = now_ns + REPEAT_S * NS_PER_S
        self._publish(row)

    def resend(self) -> None:
        """Publish what was never known to be delivered, for instance after a crash."""
        plans: set[str] = set()
        position = self.ledger.marked(_PUBLISHED)
        while rows := self.ledger.rows_after(position):
            for row in rows:
                stored = self.ledger.plan(row.plan_id) if row.plan_id not in plans else None
                if stored is not None:
                    plans.add(row.plan_id)
                    self._send_plan(stored.plan)
                self._send(row)
            position = rows[-1].seq

    def settle(self, timeout_s: float) -> None:
        """Wait for delivery and remember how far it got; undelivered rows are sent again."""
        with self._lock:
            newest = self._newest_seq
        if newest <= self.ledger.marked(_PUBLISHED):
            return
        try:
            self._publisher.flush(timeout_s)
        except BusError as error:
            LOG.warning("rows of the ledger are not delivered yet: %s", error)
            self.resend()
            return
        self.ledger.mark(_PUBLISHED, newest)

    def _send_plan(self, plan: Plan) -> None:
        self._publisher.publish(ACTIONS.name, plan.incident_id.encode(), encode(plan))

    def _send(self, row: Row) -> None:
        self._metrics.count("tw_actions_total", verb=row.verb or "plan", status=row.status.value)
        self._publish(row)
        # in this order: another thread that settles in between must not take an unpublished row for delivered
        with self._lock:
            self._newest_seq = max(self._newest_seq, row.seq)

    def _publish(self, row: Row) -> None:
        record = result_of(row, self._cluster, row.at_ns or self._clock.now_ns(), str(self.ledger.path))
        self._publisher.publish(ACTIONS.name, row.incident_id.encode(), encode(record))


def result_of(row: Row, cluster: str, at_ns: int, boot_id: str) -> ActionResult:
    """The record that stands for a row."""
    return ActionResult(
        cluster=cluster, seq=row.seq, observed_at_ns=at_ns, boot_id=boot_id, plan_id=row.plan_id, incident_id=row.incident_id,
        job=row.job, key=row.key, verb=row.verb, target=row.target, status=row.status, mode=row.mode, rail=row.rail,
        reason=row.reason, fence=row.fence, started_at_ns=row.started_at_ns, finished_at_ns=at_ns, detail=dict(row.detail),
    )  # fmt: skip
