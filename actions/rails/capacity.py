"""Rail `capacity`: before a node is taken out there must be enough left to train on."""

from __future__ import annotations

from dataclasses import dataclass

from actions.capacity import Hold, choose_members
from actions.rails.base import Rail, Refusal
from actions.world import World, isolated_by, restarts, undoes
from trainwarden.records import Plan


@dataclass(frozen=True)
class CapacitySettings:
    """Nothing to set: the bounds are `actions.min_nodes` and `actions.node_unit`."""


class Capacity(Rail):
    """Spare node, else shrink to a whole number of units, else hold and page."""

    name = "capacity"
    order = 30
    Settings = CapacitySettings

    def check(self, plan: Plan, world: World) -> Refusal | None:
        if undoes(plan) or not restarts(plan):
            return None
        chosen = choose_members(world.job, isolated_by(plan), world.min_nodes, world.node_unit)
        return self.refuse(chosen.reason, page=True) if isinstance(chosen, Hold) else None
