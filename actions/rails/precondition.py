"""Rail `precondition`: what was true when the plan was made must still be true when it runs."""

from __future__ import annotations

from dataclasses import dataclass

from actions.rails.base import Rail, Refusal
from actions.world import World, is_open, isolated_by, nodes_of, restarts, undoes
from trainwarden.clock import NS_PER_S
from trainwarden.records import Incident, Plan

HEALED_IN_PROCESS = frozenset({"rank_killed"})
"""Kinds that launchers can mend by themselves while the other processes live on, quicker than any order."""
LOOK_AGAIN_NS = NS_PER_S // 2
"""The picture of the wardens may be older than the incident: it is worth another look soon."""


@dataclass(frozen=True)
class PreconditionSettings:
    """Nothing to set."""


class Precondition(Rail):
    """Refuses when the job has been restarted meanwhile, the incident was closed or now blames somebody else, or the job heals itself."""

    name = "precondition"
    order = 2
    Settings = PreconditionSettings

    def check(self, plan: Plan, world: World) -> Refusal | None:
        if not world.job.nodes:
            return self.refuse(f"no node of job {plan.job} is known: nothing can be told to act", page=True)
        if not any(state.reachable for state in world.job.nodes.values()):
            return self.refuse(
                f"no warden of job {plan.job} answers: this side of the network may be the one cut off", page=True
            )
        if (generation := world.job.generation) < plan.attempt:
            again_ns = world.now_ns + LOOK_AGAIN_NS
            return self.refuse(
                f"the wardens are at attempt {generation}, the plan is about attempt {plan.attempt}", again_ns
            )
        if generation > plan.attempt:
            return self.refuse(
                f"the plan is about attempt {plan.attempt} of job {plan.job}, which is at attempt {generation} now"
            )
        return None if undoes(plan) else self._incident(plan, world.incident) or self._healing(plan, world)

    def _healing(self, plan: Plan, world: World) -> Refusal | None:
        """An order now would end the processes that are being kept; when it has worked, the attempt is a later one."""
        incident, limit_s = world.incident, world.job.heals_s
        if incident is None or limit_s <= 0 or plan.kind not in HEALED_IN_PROCESS or not restarts(plan):
            return None
        since_ns = incident.timeline.fault_at_ns or incident.observed_at_ns
        if world.now_ns - since_ns >= limit_s * NS_PER_S:
            return None
        text = f"the launchers of job {plan.job} put the world together in the process, and have {limit_s:g} s for it"
        return self.refuse(text, world.now_ns + LOOK_AGAIN_NS)

    def _incident(self, plan: Plan, incident: Incident | None) -> Refusal | None:
        if incident is None:
            return self.refuse(f"incident {plan.incident_id} is not known any more")
        if incident.superseded_by:
            return self.refuse(f"incident {plan.incident_id} has become part of {incident.superseded_by}")
        if not is_open(incident):
            return self.refuse(f"incident {plan.incident_id} is {incident.status} since revision {incident.revision}")
        blamed = set(nodes_of(incident.culprits))
        if cleared := [node for node in isolated_by(plan) if node not in blamed]:
            return self.refuse(
                f"revision {incident.revision} of incident {plan.incident_id} does not blame {cleared[0]} any more"
            )
        return None
