"""From an incident to an ordered plan. Pure: what it may look at is passed in, what it decides is a record.

Order of the verbs, and why: save first, because isolating stops the job; isolate before restarting, so that the bad node is not
picked again; restart with the members that are left; verify at the end. Among remedies the cheaper comes first: reroute (under
1 s) < rebalance (2 steps) < restart in place or elastic shrink (about 10 s) < wait for a joiner (14-18 s). `trainwarden.policy`
names the verbs of a kind; this module never adds one, it leaves out what cannot help any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actions.shares import excess, propose, stage_advice, stages_of
from actions.world import JobState, nodes_of
from trainwarden.clock import NS_PER_S
from trainwarden.errors import UsageError
from trainwarden.policy import Family, FaultKind, Policy, reach_at_least, strictest
from trainwarden.records import Incident, Mode, Plan, PlanStep, Reach, Verb, stable_id

COST_ORDER = (Verb.NOTIFY, Verb.REROUTE, Verb.REBALANCE, Verb.SAVE, Verb.ISOLATE, Verb.RETURN_NODE, Verb.RESTART)
"""Cheapest first; also the order in which the verbs of one plan must run."""
_BY_SHARES = frozenset({"compute_slow"})
"""Kinds that less work helps although their remedy is to take the node out."""


@dataclass(frozen=True)
class PlannerSettings:
    """Bounds of plans.

    Attributes
    ----------
    ttl_s, approve_ttl_s
        A plan not begun by then expires; a person gets longer to approve.
    stalled_s
        Without a new step for so long the job is taken to be unable to save.
    rebalance_below_ratio
        A rank that computes slowly is given less to do instead of being taken out, while a micro-batch costs it less than
        so many times its peers' and its script divides its batch by shares; one that comes back is taken out.
    """

    ttl_s: float = 60.0
    approve_ttl_s: float = 1800.0
    stalled_s: float = 3.0
    rebalance_below_ratio: float = 3.0


def plan(
    incident: Incident,
    policy: Policy,
    job: JobState,
    now_ns: int,
    number: int,
    settings: PlannerSettings,
    recurred: bool = False,
) -> Plan | None:
    """What to do about `incident`; None when its kind has no remedy.

    Parameters
    ----------
    number
        Counts the plans of one incident from 1; part of every idempotency key.
    recurred
        The ledger knows a plan for the same kind and culprit within the kind's recurrence window.

    Raises
    ------
    UsageError
        When the incident asks for what no plan can be made of: an unknown verb, or isolation of no node.
    """
    kind = policy.kind(incident.kind)
    verbs = _verbs(incident, kind, recurred)
    mild = not recurred and incident.recurrence == 0 and _is_mild(incident, verbs, kind, job, settings)
    verbs = (Verb.REBALANCE,) if mild else verbs
    verbs = tuple(verb for verb in verbs if verb is not Verb.SAVE or _can_save(kind, job, now_ns, settings))
    steps = tuple(_steps(incident, verbs, number))
    if not steps:
        return None
    mode = _mode(incident, kind, policy, verbs, mild)
    ttl_s = settings.approve_ttl_s if mode is Mode.APPROVE else settings.ttl_s
    return Plan(
        cluster=incident.cluster, observed_at_ns=now_ns, plan_id=stable_id("plan", incident.incident_id, number),
        incident_id=incident.incident_id, incident_revision=incident.revision, number=number, job=incident.job,
        attempt=incident.attempt, kind=incident.kind, steps=steps, mode=mode, reason=_reason(incident, verbs, recurred, job),
        expires_at_ns=now_ns + int(ttl_s * NS_PER_S), policy_revision=policy.revision,
        precondition=f"job {incident.job} is at attempt {incident.attempt}, incident {incident.incident_id} is open with these culprits",
    )  # fmt: skip


def signature(plan: Plan) -> str:
    """What a plan does, without its number and times: two plans of one signature are the same decision.

    Saving is left out: whether the job can still save changes from moment to moment.
    """
    effects = [(step.verb.value, step.target) for step in plan.steps if step.verb is not Verb.SAVE]
    return stable_id(plan.incident_id, plan.attempt, plan.mode.value, effects)


def return_plan(
    cluster: str, job: JobState, node: str, reason: str, author: str, now_ns: int, settings: PlannerSettings
) -> Plan:
    """An operator's order to take `node` back and let the job grow again: save, admit, restart with it."""
    order = stable_id("return", job.job, node, now_ns)
    verbs = ((Verb.SAVE, job.job), (Verb.RETURN_NODE, node), (Verb.RESTART, job.job))
    return Plan(
        cluster=cluster, observed_at_ns=now_ns, plan_id=stable_id("plan", order, 1), incident_id=f"operator-{order}",
        job=job.job, attempt=job.generation, kind="operator_return", mode=Mode.AUTO, reason=f"{author}: {reason}",
        steps=tuple(PlanStep(verb, target, _key(f"operator-{order}", 1, verb, target)) for verb, target in verbs),
        expires_at_ns=now_ns + int(settings.ttl_s * NS_PER_S), precondition=f"job {job.job} is at attempt {job.generation}",
    )  # fmt: skip


def _verbs(incident: Incident, kind: FaultKind, recurred: bool) -> tuple[Verb, ...]:
    if recurred or incident.recurrence > 0:
        chosen: Sequence[Verb] = kind.remedy_on_recurrence
        if not nodes_of(incident.culprits):  # it came back, and nobody is known to be its cause: nobody to take out
            chosen = [verb for verb in chosen if verb is not Verb.ISOLATE]
    else:
        chosen = _parse(incident) or kind.remedy
    if kind.family is Family.CORRUPTION and not nodes_of(incident.culprits):
        # replicas that differ while nobody can say which is wrong: a restart makes them one again
        chosen = [verb for verb in chosen if verb is not Verb.ISOLATE]
    return tuple(sorted(dict.fromkeys(chosen), key=COST_ORDER.index))


def _parse(incident: Incident) -> list[Verb]:
    try:
        return [Verb(name) for name in incident.remedy]
    except ValueError:
        raise UsageError(
            f"incident {incident.incident_id}: remedy {list(incident.remedy)} has an unknown verb, known are {', '.join(Verb)}"
        ) from None


def _is_mild(
    incident: Incident, verbs: tuple[Verb, ...], kind: FaultKind, job: JobState, settings: PlannerSettings
) -> bool:
    """Whether less work would do for a slow rank: cheaper than a restart, and it costs no node."""
    slow = kind.family is Family.FAIL_SLOW and kind.name in _BY_SHARES and Verb.ISOLATE in verbs
    ranks = job.shares
    if not slow or not ranks or propose(ranks, len(ranks)).why_not:
        return False
    blamed = [rank for node in nodes_of(incident.culprits) if node in job.nodes for rank in job.nodes[node].shares]
    return bool(blamed) and max(excess(ranks, rank) for rank in blamed) < settings.rebalance_below_ratio


def _can_save(kind: FaultKind, job: JobState, now_ns: int, settings: PlannerSettings) -> bool:
    """A stopped or corrupt job must not save; one that only runs slowly, or on hardware that is about to go, should."""
    if kind.family is Family.CORRUPTION:
        return False
    return job.still_advances(now_ns, int(settings.stalled_s * NS_PER_S))


def _steps(incident: Incident, verbs: tuple[Verb, ...], number: int) -> list[PlanStep]:
    steps = []
    for verb in verbs:
        for target in _targets(incident, verb):
            steps.append(PlanStep(verb, target, _key(incident.incident_id, number, verb, target)))
    return steps


def _targets(incident: Incident, verb: Verb) -> tuple[str, ...]:
    if verb not in (Verb.ISOLATE, Verb.REROUTE):
        return (incident.job,)
    if nodes := nodes_of(incident.culprits):
        return nodes
    named = ", ".join(map(str, incident.culprits)) or "nobody"
    raise UsageError(f"incident {incident.incident_id}: {verb.value} needs a culprit with a node, found {named}")


def _key(incident_id: str, number: int, verb: Verb, target: str) -> str:
    return f"{incident_id}.{number}.{verb.value}.{target}"


def _mode(incident: Incident, kind: FaultKind, policy: Policy, verbs: tuple[Verb, ...], mild: bool) -> Mode:
    """The operator's mode. A recommendation at most for what an incident claims beyond the policy (anybody may have written
    it), and for a fault that came back while nobody is known to be its cause."""
    reaches = reach_at_least(incident.reach, Reach.ACT) and reach_at_least(kind.reach, Reach.ACT)
    allowed = mild or set(verbs) <= {*kind.remedy, *kind.remedy_on_recurrence}
    blind = Verb.ISOLATE in kind.remedy_on_recurrence and incident.recurrence > 0 and not nodes_of(incident.culprits)
    sure = reaches and allowed and not blind
    return strictest(policy.mode_of(incident.job, verbs), Mode.AUTO if sure else Mode.RECOMMEND)


def _reason(incident: Incident, verbs: tuple[Verb, ...], recurred: bool, job: JobState) -> str:
    who = ", ".join(map(str, incident.culprits)) or "no culprit"
    again = " again" if recurred or incident.recurrence > 0 else ""
    how = [_how_to_rebalance(incident, job)] if Verb.REBALANCE in verbs else []
    return ": ".join(
        [f"{incident.kind}{again} ({who})", ", then ".join(verb.value for verb in verbs), *filter(None, how)]
    )


def _how_to_rebalance(incident: Incident, job: JobState) -> str:
    """Which shares, or what a person would move between the stages of a pipeline; empty when neither is known."""
    if stages := stages_of(incident.evidence):
        return stage_advice(stages)
    return str(propose(job.shares, len(job.shares))) if job.shares else ""
