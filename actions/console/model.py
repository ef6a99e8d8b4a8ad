"""The status as data, for text, page and ``/v1/status.json``. Ages are seconds, times RFC 3339, None is "not known"."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

OPEN_STATES = frozenset({"open", "acting"})
SILENT_AFTER_S = 5.0
"""A node whose newest tick is older is silent: its health is not known, which is not the same as well."""


@dataclass(frozen=True)
class Part:
    """One part of the system as seen from here. `detail` is one sentence, `trouble` what is the matter when it is not ok."""

    name: str
    ok: bool
    detail: str
    trouble: str = "is away"


@dataclass(frozen=True)
class NodeLine:
    """One node. `state` is ok, suspect, excluded, silent or unknown; `why` says it in words."""

    node: str
    state: str
    why: str
    tick_age_s: float | None = None
    job: str = ""
    ranks: tuple[int, ...] = ()
    last_step: int | None = None
    step_age_s: float | None = None
    cpu_busy_ratio: float | None = None
    mem_available_ratio: float | None = None


@dataclass(frozen=True)
class JobLine:
    """One job: its newest attempt."""

    job: str
    attempt: int
    ranks: int
    world: int
    last_step: int | None
    step_ms: float | None
    step_age_s: float | None


@dataclass(frozen=True)
class Series:
    """A piece of evidence: values in time order, None where absent, with the band that was expected."""

    name: str
    unit: str
    values: tuple[float | None, ...]
    low: float | None
    high: float | None
    note: str


@dataclass(frozen=True)
class IncidentLine:
    """One incident at its newest revision."""

    incident_id: str
    revision: int
    status: str
    severity: str
    kind: str
    job: str
    title: str
    culprit: str
    culprit_nodes: tuple[str, ...]
    confidence: float
    victims: tuple[str, ...]
    causes: tuple[tuple[str, float], ...]
    remedy: tuple[str, ...]
    report: str
    last_step: int | None
    timeline: tuple[tuple[str, str], ...]
    began_at: str
    evidence: tuple[Series, ...] = ()
    close_reason: str = ""

    @property
    def is_open(self) -> bool:
        """Whether somebody still has to care."""
        return self.status in OPEN_STATES


@dataclass(frozen=True)
class ActionLine:
    """One row of the ledger."""

    at: str
    incident_id: str
    plan_id: str
    verb: str
    target: str
    status: str
    mode: str
    rail: str
    reason: str


@dataclass(frozen=True)
class DeliveryLine:
    """One attempt to tell somebody."""

    at: str
    incident_id: str
    receiver: str
    cause: str
    attempt: int
    status: str
    reason: str


@dataclass(frozen=True)
class Status:
    """Everything at one moment."""

    at: str
    cluster: str
    mode: str
    kill_switch: str
    telemetry_age_s: float | None
    parts: tuple[Part, ...] = ()
    jobs: tuple[JobLine, ...] = ()
    nodes: tuple[NodeLine, ...] = ()
    incidents: tuple[IncidentLine, ...] = ()
    actions: tuple[ActionLine, ...] = ()
    deliveries: tuple[DeliveryLine, ...] = field(default=())

    @property
    def open_incidents(self) -> tuple[IncidentLine, ...]:
        """Incidents that are not over."""
        return tuple(incident for incident in self.incidents if incident.is_open)


def moment(at_ns: int) -> str:
    """RFC 3339 in UTC with milliseconds; empty for 0."""
    if at_ns <= 0:
        return ""
    seconds, rest_ns = divmod(at_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest_ns // 10**6:03d}Z"


def moment_of(value: Any) -> str:
    """RFC 3339 of a store's datetime (naive is UTC); empty for None."""
    if value is None:
        return ""
    if value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    return f"{value.astimezone(UTC):%Y-%m-%dT%H:%M:%S}.{value.microsecond // 1000:03d}Z"
