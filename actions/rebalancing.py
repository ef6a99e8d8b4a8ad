"""A change of shares from the ledger's side: decided from measured costs, verified by the step rate, undone when the node is well again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from actions import shares
from actions.backends.base import Backend, Order, Outcome
from actions.journal import Journal
from actions.ledger import Row, step_row
from actions.verify import Verification
from actions.watch import Watch
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.records import ActionStatus, Plan, PlanStep, Verb

LOG = logging.getLogger("trainwarden.actions.rebalancing")

POLL_S = 0.2
HELPED_RATIO = 0.97
"""The new step must be no longer than this times the old one, else the change is taken back."""
WELL_LOOKS = 3
"""Looks in a row, `LOOK_S` apart, in which all ranks are alike, before even shares come back."""
LOOK_S = 2.0
MAX_REFINEMENTS = 3
REMEMBER_S = 7 * 24 * 3600.0
UNDO = "undo"


def wait_for_rate(
    watch: Watch,
    job: str,
    key: str,
    before_ms: float,
    deadline_s: float,
    clock: Clock,
    still_leading: Callable[[], None],
) -> Verification:
    """Wait until every rank has made enough steps with the change `key`, then compare the length of a step."""
    until_ns = clock.monotonic_ns() + int(deadline_s * NS_PER_S)
    while clock.monotonic_ns() < until_ns:
        still_leading()
        watch.refresh()
        ranks = watch.job(job).shares
        if late := [rank.late for rank in ranks.values() if rank.late]:
            return Verification(False, late[0])
        fresh = [rank for rank in ranks.values() if rank.applied == key and rank.recent_steps >= shares.SETTLED_STEPS]
        if ranks and len(fresh) == len(ranks):
            return _compare(before_ms, shares.pace_ms(ranks))
        clock.sleep(POLL_S)
    return Verification(
        False, f"not every rank has made {shares.SETTLED_STEPS} steps with the new shares in {deadline_s:g} s"
    )


def _compare(before_ms: float, now_ms: float) -> Verification:
    detail = {"before_ms": f"{before_ms:.1f}", "after_ms": f"{now_ms:.1f}", "speedup": f"{before_ms / now_ms:.3f}"}
    text = f"a step takes {now_ms:.1f} ms, {before_ms:.1f} before: {before_ms / now_ms:.2f} times the step rate"
    return Verification(now_ms <= HELPED_RATIO * before_ms, text, detail)


class Tender:
    """Looks after jobs whose shares were changed; what it knows is in the ledger, so a successor goes on.

    Parameters
    ----------
    stopped
        Why nothing may be done now (the kill switch), else empty.
    """

    def __init__(
        self, journal: Journal, backend: Backend, watch: Watch, clock: Clock, stopped: Callable[[Plan], str]
    ) -> None:
        self._journal = journal
        self._backend = backend
        self._watch = watch
        self._clock = clock
        self._stopped = stopped
        self._well: dict[str, int] = {}
        self._looked_ns = 0

    def tend(self) -> None:
        """Look once, unless the last look was a moment ago."""
        now_ns = self._clock.monotonic_ns()
        if self._looked_ns and now_ns - self._looked_ns < LOOK_S * NS_PER_S:
            return
        self._looked_ns = now_ns
        for plan, step in self._changed():
            if not self._stopped(plan):
                self._tend(plan, step)

    def _changed(self) -> list[tuple[Plan, PlanStep]]:
        """Plans whose change of shares is in force, as the ledger has it; newest of each job."""
        ledger = self._journal.ledger
        since_ns = self._clock.now_ns() - int(REMEMBER_S * NS_PER_S)
        rows = [row for row in ledger.rows_since(since_ns, Verb.REBALANCE) if row.status in _OUTCOMES]
        newest = {row.job: row for row in sorted(rows, key=lambda row: row.seq)}
        found = []
        for row in newest.values():
            stored = ledger.plan(row.plan_id)
            if row.status is ActionStatus.DONE and stored is not None and stored.ended is not None:
                found.append((stored.plan, next(s for s in stored.plan.steps if s.verb is Verb.REBALANCE)))
        return found

    def _tend(self, plan: Plan, step: PlanStep) -> None:
        job = self._watch.job(plan.job)
        ranks = job.shares
        if job.generation > plan.attempt:
            self._write(plan, step, ActionStatus.REVERTED, f"attempt {job.generation} has begun with even shares")
            return
        if not ranks:
            return
        self._well[plan.job] = self._well.get(plan.job, 0) + 1 if shares.alike(ranks) else 0
        if self._well[plan.job] >= WELL_LOOKS:
            self._give_back(plan, step)
        elif not shares.alike(ranks):
            self._refine(plan, step)

    def _give_back(self, plan: Plan, step: PlanStep) -> None:
        ranks = self._watch.job(plan.job).shares
        costs = shares.text_of([round(ranks[rank].micro_ms) for rank in sorted(ranks)])
        outcome = self._change(plan, step, f"{step.key}.{UNDO}", shares.even(ranks))
        if outcome.status == "done":
            self._well.pop(plan.job, None)
            reason = f"all ranks are alike again ({costs} ms a micro-batch): even shares from step {outcome.detail.get('step')}"
            self._write(plan, step, ActionStatus.REVERTED, reason)
        else:
            LOG.warning("even shares for job %s: %s", plan.job, outcome.reason)

    def _refine(self, plan: Plan, step: PlanStep) -> None:
        """What was right for the costs before the change need not be for those after it."""
        job = self._watch.job(plan.job)
        made = [row for row in self._journal.ledger.rows_of(plan.plan_id) if row.detail.get("refined")]
        proposal = shares.propose(job.shares, len(job.shares))
        if proposal.why_not or len(made) >= MAX_REFINEMENTS:
            return
        key = f"{step.key}.{len(made) + 2}"
        outcome = self._change(plan, step, key, proposal.shares)
        if outcome.status == "done":
            wanted = shares.text_of(proposal.shares)
            self._write(plan, step, ActionStatus.DONE, f"{outcome.reason} ({proposal})", refined=key, shares=wanted)

    def _change(self, plan: Plan, step: PlanStep, key: str, wanted: tuple[int, ...]) -> Outcome:
        ledger = self._journal.ledger
        ledger.check_lease()
        order = Order(key, plan.job, ledger.fence, f"incident {plan.incident_id}: {step.verb.value}")
        return self._backend.rebalance(order, wanted)

    def _write(self, plan: Plan, step: PlanStep, status: ActionStatus, reason: str, /, **detail: str) -> Row:
        LOG.info("plan %s, %s of %s is %s: %s", plan.plan_id, step.verb.value, step.target, status.value, reason)
        return self._journal.add(step_row(plan, step, status, reason, **detail))


_OUTCOMES = (ActionStatus.DONE, ActionStatus.REVERTED, ActionStatus.FAILED)
