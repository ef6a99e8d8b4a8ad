"""Nodes that could not be told to stop: the order is repeated until they hear it, or the node is given back."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from actions.backends.base import Backend, Order
from actions.journal import Journal
from actions.ledger import Row
from trainwarden.records import ActionStatus, Plan, PlanStep, Verb

LOG = logging.getLogger("trainwarden.actions.fences")

SUFFIX = "fence"


class PendingFences:
    """Kept in the ledger as steps of their own (``<isolate key>.fence``), so that they outlive the service."""

    def __init__(self, journal: Journal, backend: Backend) -> None:
        self._journal = journal
        self._backend = backend
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[Plan, PlanStep]] = {}

    def add(self, plan: Plan, step: PlanStep) -> None:
        """`step` isolates a node that is out of reach."""
        if not self._rows(plan, step):
            self._write(
                plan, step, ActionStatus.STARTED, f"{step.target} is out of reach; told to stop when it is back"
            )
        with self._lock:
            self._waiting[step.target] = (plan, step)

    def cancel(self, node: str) -> None:
        """`node` is given back: it must not be stopped any more."""
        with self._lock:
            waiting = self._waiting.pop(node, None)
        if waiting is not None:
            self._write(*waiting, ActionStatus.REVERTED, f"{node} was given back before it heard of its exclusion")

    def nodes(self) -> tuple[str, ...]:
        """Nodes whose fence is not set yet."""
        with self._lock:
            return tuple(self._waiting)

    def load(self) -> None:
        """After a start: what an earlier service left waiting."""
        ledger = self._journal.ledger
        rows = [r for r in ledger.rows_since(0, Verb.ISOLATE) if r.key.endswith(f".{SUFFIX}")]
        ended = {row.key for row in rows if row.status is not ActionStatus.STARTED}
        for row in rows:
            stored = ledger.plan(row.plan_id) if row.key not in ended else None
            step = next((s for s in stored.plan.steps if f"{s.key}.{SUFFIX}" == row.key), None) if stored else None
            if stored is not None and step is not None:
                self.add(stored.plan, step)

    def retry(self) -> None:
        """Tell every waiting node once more."""
        with self._lock:
            waiting = list(self._waiting.items())
        for node, (plan, step) in waiting:
            self._journal.ledger.check_lease()
            order = Order(step.key, plan.job, self._journal.ledger.fence, f"incident {plan.incident_id}: {plan.reason}")
            outcome = self._backend.isolate(order, node)
            if outcome.status == "pending":
                continue
            with self._lock:
                self._waiting.pop(node, None)
            status = ActionStatus.DONE if outcome.status == "done" else ActionStatus.FAILED
            self._write(plan, step, status, outcome.reason, **({} if outcome.status == "done" else {"page": "1"}))

    def _rows(self, plan: Plan, step: PlanStep) -> list[Row]:
        return [row for row in self._journal.ledger.rows_of(plan.plan_id) if row.key == f"{step.key}.{SUFFIX}"]

    def _write(self, plan: Plan, step: PlanStep, status: ActionStatus, reason: str, **detail: str) -> None:
        row = Row.of(plan, status, reason, **detail)
        self._journal.add(replace(row, key=f"{step.key}.{SUFFIX}", verb=step.verb.value, target=step.target))
        LOG.info("%s: %s", step.target, reason)
