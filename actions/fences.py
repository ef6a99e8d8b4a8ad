"""Nodes that could not be told to stop: the order is repeated until they hear it, or the node is given back."""

from __future__ import annotations

import logging
import threading

from actions.backends.base import Backend, Order
from actions.journal import Journal
from actions.ledger import step_row
from trainwarden.records import ActionStatus, Plan, PlanStep, Verb

LOG = logging.getLogger("trainwarden.actions.fences")


class PendingFences:
    """In the ledger such a step is ``waiting`` between ``started`` and ``done``, so it outlives the service and its plan."""

    def __init__(self, journal: Journal, backend: Backend) -> None:
        self._journal = journal
        self._backend = backend
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._waiting: dict[str, tuple[Plan, PlanStep]] = {}

    def add(self, plan: Plan, step: PlanStep) -> None:
        """`step` isolates a node that is out of reach."""
        self._write(
            plan, step, ActionStatus.WAITING, f"{step.target} is out of reach: it is told to stop as soon as it answers"
        )
        with self._lock:
            self._waiting[step.target] = (plan, step)

    def cancel(self, node: str) -> None:
        """`node` is given back: it must not be stopped any more. An order on its way is waited for."""
        with self._sending, self._lock:
            waiting = self._waiting.pop(node, None)
        if waiting is not None:
            self._write(*waiting, ActionStatus.REVERTED, f"{node} was given back before it heard of its exclusion")

    def nodes(self) -> tuple[str, ...]:
        """Nodes whose fence is not set yet."""
        with self._lock:
            return tuple(self._waiting)

    def load(self) -> None:
        """After a start: what an earlier service left waiting."""
        ledger, found = self._journal.ledger, dict[str, tuple[Plan, PlanStep]]()
        newest = {row.key: row for row in ledger.rows_since(0, Verb.ISOLATE)}
        for row in newest.values():
            stored = ledger.plan(row.plan_id) if row.status is ActionStatus.WAITING else None
            step = next((s for s in stored.plan.steps if s.key == row.key), None) if stored else None
            if stored is not None and step is not None:
                found[row.target] = (stored.plan, step)
        with self._lock:
            self._waiting = found

    def retry(self) -> None:
        """Tell every waiting node once more."""
        with self._lock:
            waiting = list(self._waiting.items())
        for node, (plan, step) in waiting:
            with self._sending:
                self._tell(node, plan, step)

    def _tell(self, node: str, plan: Plan, step: PlanStep) -> None:
        with self._lock:
            if self._waiting.get(node) != (plan, step):
                return
        self._journal.ledger.check_lease()
        order = Order(step.key, plan.job, self._journal.ledger.fence, f"incident {plan.incident_id}: {plan.reason}")
        outcome = self._backend.isolate(order, node)
        if outcome.status == "pending":
            return
        with self._lock:
            self._waiting.pop(node, None)
        status = ActionStatus.DONE if outcome.status == "done" else ActionStatus.FAILED
        self._write(plan, step, status, outcome.reason, **({} if outcome.status == "done" else {"page": "1"}))

    def _write(self, plan: Plan, step: PlanStep, status: ActionStatus, reason: str, **detail: str) -> None:
        self._journal.add(step_row(plan, step, status, reason, **detail))
        LOG.info("%s: %s", step.target, reason)
