"""Rail `cool_down`: a node or a job that was just acted on is left in peace for a while."""

from __future__ import annotations

from dataclasses import dataclass

from actions.rails.base import Rail, Refusal
from actions.world import World, isolated_by, restarts, undoes
from trainwarden.clock import NS_PER_S
from trainwarden.records import ActionStatus, Plan, Verb
from trainwarden.settings import option


@dataclass(frozen=True)
class CoolDownSettings:
    """Quiet times."""

    job_s: float = option(10.0, "quiet time of a job after a restart began")
    node_s: float = option(3600.0, "a node is isolated at most once in this time; more is for a person to decide")


class CoolDown(Rail):
    """Reads the ledger, so that the quiet time survives a restart of the service."""

    name = "cool_down"
    order = 11
    Settings = CoolDownSettings

    def check(self, plan: Plan, world: World) -> Refusal | None:
        if undoes(plan):
            return None
        for node in isolated_by(plan):
            at_ns = self._last(plan, world, Verb.ISOLATE, node, self.settings.node_s)
            if at_ns:
                ago_s = (world.now_ns - at_ns) / NS_PER_S
                return self.refuse(
                    f"node {node} was isolated {ago_s:.0f} s ago, at most once in {self.settings.node_s:g} s", page=True
                )
        if restarts(plan) and (at_ns := self._last(plan, world, Verb.RESTART, plan.job, self.settings.job_s)):
            again_ns = at_ns + int(self.settings.job_s * NS_PER_S)
            return self.refuse(f"job {plan.job} was restarted {(world.now_ns - at_ns) / NS_PER_S:.1f} s ago", again_ns)
        return None

    def _last(self, plan: Plan, world: World, verb: Verb, target: str, window_s: float) -> int:
        since_ns = world.now_ns - int(window_s * NS_PER_S)
        rows = world.ledger.rows_since(since_ns, verb, ActionStatus.STARTED)
        return max((row.at_ns for row in rows if row.target == target and row.plan_id != plan.plan_id), default=0)
