"""The Alertmanager-shaped webhook: version "4" of its payload, which most home-made receivers parse, and our own object beside it."""

from __future__ import annotations

import email.utils
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from actions.notify.base import Call, DeliverySettings, Judgement, Notice, Notifier, Reply
from actions.notify.signing import read_secrets, sign
from trainwarden.errors import ConfigError
from trainwarden.records import ActionResult, Entity, Evidence, Incident, Plan, Timeline, stable_id
from trainwarden.settings import option

ZERO_TIME = "0001-01-01T00:00:00Z"
"""How Alertmanager writes "has not ended"."""
KEPT_REPORT_CHARACTERS = 8000
LONGEST_RETRY_AFTER_S = 600.0
_RETRIED = frozenset({408, 425, 429})


@dataclass(frozen=True)
class WebhookSettings(DeliverySettings):
    """Settings of one webhook receiver."""

    url: str = option("", "where to POST; keep urls that are secret in url_file")
    url_file: Path | None = option(None, "file whose first line is the url")
    secret_file: Path | None = option(
        None, "set: notices are signed (Standard Webhooks); one secret a line, the newest first"
    )


class Webhook(Notifier):
    """POSTs Alertmanager's payload. Success is any 2xx; 408, 425, 429 and 5xx are tried again; the rest is final."""

    name = "webhook"
    Settings = WebhookSettings

    def render(self, notice: Notice) -> bytes:
        return json.dumps(
            payload(notice, self.site.page_url, self.site.kill_switch), ensure_ascii=False, separators=(",", ":")
        ).encode()

    def call(self, notice_id: str, body: bytes, now_s: int) -> Call:
        headers = {"Content-Type": "application/json", "User-Agent": "trainwarden"}
        if self.settings.secret_file is not None:
            headers |= sign(read_secrets(self.settings.secret_file), notice_id, now_s, body)
        else:
            headers["webhook-id"] = notice_id
        return Call(self._url(), body, headers)

    def judge(self, reply: Reply) -> Judgement:
        if 200 <= reply.status < 300:
            return Judgement(delivered=True)
        reason = f"HTTP {reply.status}"
        if 300 <= reply.status < 400:
            return Judgement(delivered=False, reason=f"{reason}: redirects are not followed, give the final url")
        if reply.status in _RETRIED or reply.status >= 500:
            return Judgement(delivered=False, retry=True, reason=reason, after_s=retry_after_s(reply.headers))
        return Judgement(delivered=False, reason=reason)

    def _url(self) -> str:
        if self.settings.url_file is None:
            if not self.settings.url:
                raise ConfigError(f"notify.{self.receiver}: neither url nor url_file is set")
            return str(self.settings.url)
        try:
            return str(self.settings.url_file.read_text(encoding="utf-8").strip().splitlines()[0])
        except (OSError, UnicodeDecodeError, IndexError) as error:
            raise ConfigError(f"notify.{self.receiver}.url_file: cannot be read ({type(error).__name__})") from None


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds of a Retry-After header (number or date), bounded; 0 without one."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return min(float(text), LONGEST_RETRY_AFTER_S)
    try:
        until = email.utils.parsedate_to_datetime(text)
        sent = email.utils.parsedate_to_datetime(headers.get("date", ""))
    except (TypeError, ValueError):
        return 0.0
    # against the receiver's own clock: ours may differ
    return min(max((until - sent).total_seconds(), 0.0), LONGEST_RETRY_AFTER_S)


def payload(notice: Notice, page_url: str, kill_switch: str) -> dict[str, Any]:
    """Alertmanager's webhook payload, version 4, plus the object `trainwarden`."""
    incident = notice.incident
    status = "firing" if notice.firing else "resolved"
    annotations = _annotations(notice, kill_switch)
    alert = {
        "status": status,
        "labels": dict(notice.labels),
        "annotations": annotations,
        "startsAt": timestamp(notice.started_at_ns),
        "endsAt": timestamp(notice.ended_at_ns) if notice.ended_at_ns else ZERO_TIME,
        "generatorURL": f"{page_url}/?incident={incident.incident_id}" if page_url else "",
        "fingerprint": stable_id("alert", incident.dedup_key),
    }
    return {
        "version": "4",
        "groupKey": f'{{}}:{{dedup_key="{incident.dedup_key}"}}',
        "truncatedAlerts": 0,
        "status": status,
        "receiver": notice.receiver,
        "groupLabels": {"dedup_key": incident.dedup_key},
        "commonLabels": dict(notice.labels),
        "commonAnnotations": annotations,
        "externalURL": page_url,
        "notification_reason": notice.cause.value,
        "alerts": [alert],
        "trainwarden": _own(notice),
    }


def headline(incident: Incident) -> str:
    """What a phone shows: severity, what is wrong, whose fault, how sure."""
    culprits = ", ".join(str(entity) for entity in incident.culprits) or "nobody to blame"
    title = incident.title or f"{incident.kind} in job {incident.job}"
    named = "" if any(entity.name in title for entity in incident.culprits) else f" ({culprits})"
    return f"[{incident.severity}] {title}{named} - {incident.confidence:.0%} sure"


def what_was_done(notice: Notice) -> str:
    """One line: the newest step of the newest plan, or what policy recommends."""
    if notice.actions:
        last = notice.actions[-1]
        what = f"{last.verb} {last.target}".strip() or "plan"
        because = f" ({last.reason})" if last.reason else ""
        return f"{what}: {last.status.value}, mode {last.mode.value}{because}"
    if notice.plans:
        steps = ", ".join(f"{step.verb.value} {step.target}" for step in notice.plans[-1].steps)
        return f"planned: {steps or 'nothing'}, mode {notice.plans[-1].mode.value}"
    return f"recommended: {', '.join(notice.incident.remedy)}" if notice.incident.remedy else "nothing is recommended"


def _annotations(notice: Notice, kill_switch: str) -> dict[str, str]:
    incident = notice.incident
    found = {
        "summary": headline(incident),
        "description": incident.report[:KEPT_REPORT_CHARACTERS],
        "culprit": ", ".join(str(entity) for entity in incident.culprits),
        "victims": ", ".join(incident.victims[:64]),
        "action": what_was_done(notice),
        "last_step": str(incident.last_step) if incident.last_step >= 0 else "",
        "runbook": f"docs/runbooks/{incident.kind}.md",
        "stop_automation": f"touch {kill_switch}" if kill_switch else "",
    }
    return {key: value for key, value in found.items() if value}


def _own(notice: Notice) -> dict[str, Any]:
    incident = notice.incident
    return {
        "schema": 1,
        "notice_id": notice.notice_id,
        "cause": notice.cause.value,
        "incident_id": incident.incident_id,
        "dedup_key": incident.dedup_key,
        "revision": incident.revision,
        "status": incident.status.value,
        "cluster": incident.cluster,
        "job": incident.job,
        "attempt": incident.attempt,
        "kind": incident.kind,
        "severity": incident.severity,
        "title": incident.title,
        "culprits": [_entity(entity) for entity in incident.culprits],
        "culprit_rank": incident.culprit_rank if incident.culprit_rank >= 0 else None,
        "victims": list(incident.victims),
        "causes": [
            {"kind": c.kind, "entity": _entity(c.entity), "probability": _number(c.probability)}
            for c in incident.causes
        ],
        "confidence": _number(incident.confidence),
        "last_step": incident.last_step if incident.last_step >= 0 else None,
        "timeline": _timeline(incident.timeline),
        "report": incident.report[:KEPT_REPORT_CHARACTERS],
        "evidence": [_evidence(item) for item in incident.evidence],
        "recommended": list(incident.remedy),
        "plan": _plan(notice.plans[-1]) if notice.plans else None,
        "actions": [_action(action) for action in notice.actions],
        "recurrence": incident.recurrence,
        "superseded_by": incident.superseded_by or None,
        "close_reason": incident.close_reason or None,
    }


def _entity(entity: Entity) -> dict[str, str]:
    return {"kind": entity.kind.value, "name": entity.name, "node": entity.node}


def _timeline(timeline: Timeline) -> dict[str, str | None]:
    moments = {name.removesuffix("_ns"): getattr(timeline, name) for name in timeline.__struct_fields__}
    return {name: timestamp(at_ns) if at_ns else None for name, at_ns in moments.items()}


def _evidence(evidence: Evidence) -> dict[str, Any]:
    return {
        "name": evidence.name, "unit": evidence.unit, "at": [timestamp(at_ns) for at_ns in evidence.at_ns],
        "values": [_number(value) for value in evidence.values], "low": _number(evidence.low), "high": _number(evidence.high),
        "note": evidence.note,
    }  # fmt: skip


def _plan(plan: Plan) -> dict[str, Any]:
    steps = [{"verb": step.verb.value, "target": step.target} for step in plan.steps]
    return {
        "plan_id": plan.plan_id,
        "number": plan.number,
        "mode": plan.mode.value,
        "reason": plan.reason,
        "steps": steps,
    }


def _action(action: ActionResult) -> dict[str, Any]:
    return {
        "at": timestamp(action.observed_at_ns), "plan_id": action.plan_id, "verb": action.verb, "target": action.target,
        "status": action.status.value, "mode": action.mode.value, "rail": action.rail, "reason": action.reason,
    }  # fmt: skip


def _number(value: float) -> float | None:
    """JSON knows no NaN; a receiver's parser would stumble over it."""
    return value if math.isfinite(value) else None


def timestamp(at_ns: int) -> str:
    """RFC 3339 in UTC with milliseconds.

    Examples
    --------
    >>> timestamp(1_700_000_000_123_000_000)
    '2023-11-14T22:13:20.123Z'
    """
    seconds, rest_ns = divmod(at_ns, 10**9)
    moment = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{moment}.{rest_ns // 10**6:03d}Z"
