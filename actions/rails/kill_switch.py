"""Rail `kill_switch`: an operator has stopped everything, by a file that needs no part of ours to be read or removed."""

from __future__ import annotations

from dataclasses import dataclass

from actions.rails.base import Rail, Refusal
from actions.world import World
from trainwarden.records import Plan


@dataclass(frozen=True)
class KillSwitchSettings:
    """Nothing to set: the file is `actions.kill_switch`."""


class KillSwitch(Rail):
    """Refuses everything, undo included, while the switch is on."""

    name = "kill_switch"
    order = 0
    Settings = KillSwitchSettings

    def check(self, plan: Plan, world: World) -> Refusal | None:
        return self.refuse(f"the kill switch is on: {world.kill_switch}", page=True) if world.kill_switch else None
