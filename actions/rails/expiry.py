"""Rail `expiry`: an old decision about an old event is not carried out."""

from __future__ import annotations

from dataclasses import dataclass

from actions.rails.base import Rail, Refusal
from actions.world import World
from trainwarden.clock import NS_PER_S
from trainwarden.records import Mode, Plan
from trainwarden.settings import option


@dataclass(frozen=True)
class ExpirySettings:
    """How old is too old."""

    event_age_s: float = option(300.0, "an incident last revised longer ago is history: it is told, not acted on")


class Expiry(Rail):
    """Bounds the age of the plan and, unless a person approves it, of the incident's newest revision."""

    name = "expiry"
    order = 1
    Settings = ExpirySettings

    def check(self, plan: Plan, world: World) -> Refusal | None:
        if world.now_ns >= plan.expires_at_ns:
            return self.refuse(f"the plan expired {_ago(world.now_ns - plan.expires_at_ns)} ago")
        if world.incident is None or plan.mode is Mode.APPROVE:
            return None
        age_ns = world.now_ns - world.incident.observed_at_ns
        if age_ns <= self.settings.event_age_s * NS_PER_S:
            return None
        return self.refuse(
            f"the incident's last news is {_ago(age_ns)} old, at most {self.settings.event_age_s:g} s may have passed"
        )


def _ago(age_ns: int) -> str:
    return f"{age_ns / NS_PER_S:.1f} s"
