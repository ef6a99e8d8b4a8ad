"""Rail `budget`: restarts of one job in an hour are counted; when they do not help, more of them will not."""

from __future__ import annotations

from dataclasses import dataclass

from actions.rails.base import Rail, Refusal
from actions.world import World, restarts, undoes
from trainwarden.clock import NS_PER_S
from trainwarden.records import ActionStatus, Plan, Verb
from trainwarden.settings import option


@dataclass(frozen=True)
class BudgetSettings:
    """How many restarts."""

    restarts: int = option(3, "restarts of one job within the window; then the job is held and somebody is paged")
    window_s: float = option(3600.0, "the window")


class Budget(Rail):
    """Counts restarts that were begun, whatever became of them."""

    name = "budget"
    order = 12
    Settings = BudgetSettings

    def check(self, plan: Plan, world: World) -> Refusal | None:
        if undoes(plan) or not restarts(plan):
            return None
        since_ns = world.now_ns - int(self.settings.window_s * NS_PER_S)
        rows = world.ledger.rows_since(since_ns, Verb.RESTART, ActionStatus.STARTED, plan.job)
        spent = len({row.plan_id for row in rows if row.plan_id != plan.plan_id})
        if spent < self.settings.restarts:
            return None
        return self.refuse(
            f"job {plan.job} was restarted {spent} times within {self.settings.window_s:g} s: held for a person to look at",
            page=True,
        )
