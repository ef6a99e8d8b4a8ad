"""Notices of clouds in one shape, from the four answers that they come in. Pure functions on bytes; what is malformed is `ValueError`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

INTERRUPTION, RETIREMENT, MAINTENANCE, FREEZE, REBALANCE = (
    "interruption",
    "retirement",
    "maintenance",
    "freeze",
    "rebalance",
)
SEVERITY = {
    INTERRUPTION: "critical",
    RETIREMENT: "error",
    MAINTENANCE: "warning",
    FREEZE: "warning",
    REBALANCE: "info",
}
MEANING = {
    INTERRUPTION: "takes this machine away",
    RETIREMENT: "found the hardware below this machine failing and retires it",
    MAINTENANCE: "stops or restarts this machine for its own work",
    FREEZE: "pauses or moves this machine for some seconds",
    REBALANCE: "says that this machine is more likely than others to be taken away",
}
FORMATS = ("%d %b %Y %H:%M:%S GMT", "%a, %d %b %Y %H:%M:%S GMT")
AWS_KINDS = {"instance-retirement": RETIREMENT}
AZURE_KINDS = {
    "Freeze": FREEZE,
    "Reboot": MAINTENANCE,
    "Redeploy": MAINTENANCE,
    "Preempt": INTERRUPTION,
    "Terminate": INTERRUPTION,
}
GCP_KINDS = {"MIGRATE_ON_HOST_MAINTENANCE": FREEZE, "TERMINATE_ON_HOST_MAINTENANCE": MAINTENANCE}
ALIBABA_OVER = {"executed", "avoided", "canceled", "failed"}
TEXT_CHARS = 200


@dataclass(frozen=True)
class Notice:
    """One notice.

    Attributes
    ----------
    notice_id
        The cloud's own identity; where it gives none, what the notice says.
    kind
        ``interruption``, ``retirement``, ``maintenance``, ``freeze`` or ``rebalance``.
    not_before
        Earliest time, ISO 8601 in UTC; empty = at once, or the cloud does not say.
    """

    notice_id: str
    kind: str
    not_before: str = ""
    what: str = ""
    text: str = ""


def aws_scheduled(body: bytes) -> list[Notice]:
    """``events/maintenance/scheduled``: a list of events, of which those that are over are left out."""
    return [
        Notice(_text(e, "EventId"), AWS_KINDS.get(_text(e, "Code"), MAINTENANCE), time_of(_text(e, "NotBefore")), _text(e, "Code"),
               _text(e, "Description"))
        for e in _objects(_json(body))
        if _text(e, "EventId") and _text(e, "State") in ("", "active") and not _text(e, "Description").startswith("[Comp")
    ]  # fmt: skip


def aws_spot(body: bytes) -> list[Notice]:
    """``spot/instance-action``: ``{"action": "terminate", "time": ...}``."""
    found = _object(_json(body))
    action, at = _text(found, "action"), time_of(_text(found, "time"))
    return [Notice(f"spot:{action}:{at}", INTERRUPTION, at, f"spot {action}")] if action else []


def aws_rebalance(body: bytes) -> list[Notice]:
    """``events/recommendations/rebalance``: ``{"noticeTime": ...}``."""
    at = time_of(_text(_object(_json(body)), "noticeTime"))
    return [Notice(f"rebalance:{at}", REBALANCE, at, "rebalance recommendation")]


def gcp_event(body: bytes) -> list[Notice]:
    """``maintenance-event``: a word."""
    word = body.decode("utf-8", "replace").strip()
    if word in ("NONE", ""):
        return []
    return [Notice(f"maintenance-event:{word[:TEXT_CHARS]}", GCP_KINDS.get(word, MAINTENANCE), "", word[:TEXT_CHARS])]


def gcp_upcoming(body: bytes) -> list[Notice]:
    """``upcoming-maintenance?alt=json``; its keys are written with underscores or in camel case."""
    found = _object(_json(body))
    inner = found.get("Upcoming maintenance", found)
    plain = {name.replace("_", "").lower(): value for name, value in _object(inner).items()}
    at = time_of(_text(plain, "windowstarttime") or _text(plain, "starttime"))
    status, kind = _text(plain, "maintenancestatus"), _text(plain, "type")
    if not at and not status:
        return []
    return [Notice(f"upcoming:{at or status}", MAINTENANCE, at, " ".join(filter(None, (kind, status))))]


def gcp_preempted(body: bytes) -> list[Notice]:
    """``preempted``: TRUE once, half a minute before the end."""
    return [Notice("preempted", INTERRUPTION, "", "preempted")] if body.strip() == b"TRUE" else []


def azure_events(body: bytes, own_name: str) -> list[Notice]:
    """``scheduledevents``: events of every machine of the set; those of others are left out when our name is known."""
    return [
        Notice(_text(e, "EventId"), AZURE_KINDS.get(_text(e, "EventType"), MAINTENANCE), time_of(_text(e, "NotBefore")),
               " ".join(filter(None, (_text(e, "EventType"), _text(e, "EventStatus")))), _text(e, "Description"))
        for e in _objects(_object(_json(body)).get("Events"))
        if _text(e, "EventId") and _concerns(e.get("Resources"), own_name)
    ]  # fmt: skip


def alibaba_events(body: bytes) -> list[Notice]:
    """``active-system-events``: a list of events; nothing, or an empty list, when there is none."""
    if not body.strip():
        return []
    found = _json(body)
    notices = []
    for entry in _objects(found if isinstance(found, list) else [found]):
        event = {name.lower(): value for name, value in entry.items()}
        what, status = _text(event, "eventtype"), _text(event, "eventstatus")
        if _text(event, "eventid") and status.lower() not in ALIBABA_OVER:
            kind = RETIREMENT if what.startswith("SystemFailure") else MAINTENANCE
            notices.append(Notice(_text(event, "eventid"), kind, time_of(_text(event, "notbefore")), what))
    return notices


def alibaba_spot(body: bytes) -> list[Notice]:
    """``spot/termination-time``: a time."""
    at = time_of(body.decode("utf-8", "replace"))
    return [Notice(f"spot:{at}", INTERRUPTION, at, "spot released")] if at else []


def time_of(text: str) -> str:
    """A time as clouds write it, in ISO 8601 and UTC; empty for what is none.

    Examples
    --------
    >>> time_of("21 Jan 2019 09:00:43 GMT"), time_of("2024-12-01T08:00:00.5-08:00"), time_of("soon")
    ('2019-01-21T09:00:43Z', '2024-12-01T16:00:00Z', '')
    """
    text = text.strip()
    for form in FORMATS:
        try:
            return f"{datetime.strptime(text, form):%Y-%m-%dT%H:%M:%SZ}"
        except ValueError:
            continue
    try:
        moment = datetime.fromisoformat(text)
        return f"{moment.astimezone(UTC) if moment.tzinfo else moment:%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError):
        return ""


def _concerns(resources: object, own_name: str) -> bool:
    if not own_name or not isinstance(resources, list):
        return True
    return any(isinstance(name, str) and name.lower() == own_name.lower() for name in resources)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError(f"expected JSON, found {body[:60]!r}") from None


def _object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")  # noqa: TRY004 - the answer is wrong, not the call
    return value


def _objects(value: object) -> Iterable[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of events, found {type(value).__name__}")  # noqa: TRY004
    return (entry for entry in value if isinstance(entry, dict))


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    return str(value)[:TEXT_CHARS] if isinstance(value, str | int) and not isinstance(value, bool) else ""
