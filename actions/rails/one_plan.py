"""Rail `one_plan`: two plans never touch the same job or node at once."""

from __future__ import annotations

from dataclasses import dataclass

from actions.rails.base import Rail, Refusal
from actions.world import World, isolated_by
from trainwarden.clock import NS_PER_S
from trainwarden.records import ActionStatus, Plan
from trainwarden.settings import option


@dataclass(frozen=True)
class OnePlanSettings:
    """When to ask again."""

    retry_s: float = option(1.0, "a plan held up by another is looked at again after this time")


class OnePlan(Rail):
    """A plan waits while another one that has begun holds its job or one of its nodes; plans that only wait for approval hold nothing."""

    name = "one_plan"
    order = 10
    Settings = OnePlanSettings

    def check(self, plan: Plan, world: World) -> Refusal | None:
        for other in (stored.plan for stored in world.ledger.open_plans()):
            if other.plan_id == plan.plan_id or not self._has_begun(other, world):
                continue
            shared = {*isolated_by(plan)} & {*isolated_by(other)}
            if other.job == plan.job or shared:
                what = f"job {plan.job}" if other.job == plan.job else f"node {min(shared)}"
                return self.refuse(
                    f"plan {other.plan_id} is at work on {what}", world.now_ns + int(self.settings.retry_s * NS_PER_S)
                )
        return None

    def _has_begun(self, other: Plan, world: World) -> bool:
        return any(row.status is ActionStatus.STARTED for row in world.ledger.rows_of(other.plan_id))
