"""Who is told, and why: the five reasons, as a function of what a receiver already knows."""

from __future__ import annotations

from actions.notify.base import Cause, DeliverySettings
from actions.notify.outbox import Told
from trainwarden.clock import NS_PER_S
from trainwarden.policy import reach_at_least
from trainwarden.records import ActionResult, ActionStatus, Incident, IncidentStatus, Reach

OVER = frozenset({IncidentStatus.RECOVERED, IncidentStatus.CLOSED, IncidentStatus.SUPERSEDED})
"""States in which nobody has to do anything any more."""

_WHOLE_PLAN = frozenset({
    ActionStatus.RECOMMENDED, ActionStatus.WAITING, ActionStatus.DENIED, ActionStatus.EXPIRED, ActionStatus.FAILED, ActionStatus.REVERTED,
    ActionStatus.VERIFIED, ActionStatus.SKIPPED,
})  # fmt: skip


def cause_of_revision(incident: Incident, told: Told | None, settings: DeliverySettings) -> Cause | None:
    """Why a receiver that knows `told` hears of this revision; None when it does not."""
    if incident.status in OVER:
        return Cause.RESOLVED if told is not None and told.firing and settings.send_resolved else None
    if not reach_at_least(incident.reach, Reach.NOTIFY):
        return None
    if told is None or not told.firing:
        return Cause.FIRST
    if told.culprits != culprits_of(incident) or told.severity != incident.severity:
        return Cause.CHANGED
    return None


def is_result(action: ActionResult) -> bool:
    """Whether an action's row is news for on-call: the end of a plan, a step that failed, or one that asks for a person."""
    if not action.verb:
        return action.status in _WHOLE_PLAN or action.detail.get("page") == "1"
    return action.status is ActionStatus.FAILED or action.detail.get("page") == "1"


def repeat_due_before_ns(settings: DeliverySettings, now_ns: int) -> int:
    """Alerts last told before this time are told again."""
    return now_ns - int(settings.repeat_s * NS_PER_S)


def culprits_of(incident: Incident) -> str:
    """The culprits as one comparable text."""
    return ", ".join(sorted(str(entity) for entity in incident.culprits))


def labels_of(incident: Incident) -> dict[str, str]:
    """Identity of the alert; taken once, at the first notice. No rank, attempt, time or value: each would make another alert of it."""
    return {
        "alertname": incident.kind, "cluster": incident.cluster, "job": incident.job, "severity": incident.severity,
        "dedup_key": incident.dedup_key,
    }  # fmt: skip
