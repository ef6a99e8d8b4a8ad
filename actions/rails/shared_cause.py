"""Rail `shared_cause`: the same symptom on many nodes is not the nodes' fault: look at the switch, the storage, the driver, at us."""

from __future__ import annotations

from dataclasses import dataclass

from actions.rails.base import Rail, Refusal
from actions.world import World, is_open, nodes_of, restarts, undoes
from trainwarden.clock import NS_PER_S
from trainwarden.records import Plan
from trainwarden.settings import option


@dataclass(frozen=True)
class SharedCauseSettings:
    """When a symptom is everybody's."""

    share_ratio: float = option(0.3, "share of all nodes with the same kind of incident above which nothing is done")
    at_least: int = option(3, "and at least so many nodes")
    window_s: float = option(300.0, "incidents revised within this time count")


class SharedCause(Rail):
    """Counts the nodes blamed by open incidents of the plan's kind."""

    name = "shared_cause"
    order = 21
    Settings = SharedCauseSettings

    def check(self, plan: Plan, world: World) -> Refusal | None:
        if undoes(plan) or not restarts(plan):
            return None
        since_ns = world.now_ns - int(self.settings.window_s * NS_PER_S)
        alike = [i for i in world.incidents if i.kind == plan.kind and is_open(i) and i.observed_at_ns >= since_ns]
        blamed = {node for incident in alike for node in nodes_of(incident.culprits)}
        total = len(world.cluster)
        if len(blamed) < self.settings.at_least or len(blamed) <= self.settings.share_ratio * total:
            return None
        return self.refuse(
            f"{plan.kind} on {len(blamed)} of {total} nodes at once: look for a shared cause (switch, storage, driver, collectors)",
            page=True,
        )
