"""What the store knows of the last minutes. Its absence is an answer too, given quickly and not asked for again at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from clickhouse_connect.driver.exceptions import ClickHouseError
from urllib3.exceptions import HTTPError

from actions.console.model import ActionLine, DeliveryLine, IncidentLine, Series, moment_of
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.errors import UnavailableError

RECENT_MINUTES = 15
"""A node that said nothing for so long is no longer shown."""
ASK_AGAIN_AFTER_S = 5.0
LISTED = 30

_NODES = f"""SELECT node, max(arrived_at), argMax(cpu_busy_ratio, ts), argMax(mem_available_ratio, ts) FROM host_ticks
WHERE ts > now() - INTERVAL {RECENT_MINUTES} MINUTE GROUP BY node ORDER BY node"""
_RANKS = f"""SELECT job, attempt, rank, argMax(node, ts), max(step), max(arrived_at), quantile(0.5)(duration_ms), any(world) FROM steps
WHERE ts > now() - INTERVAL {RECENT_MINUTES} MINUTE GROUP BY job, attempt, rank ORDER BY job, attempt, rank"""
_INCIDENTS = f"""SELECT incident_id, revision, status, severity, kind, job, title, culprit, culprit_node, confidence, victims, causes,
cause_probabilities, remedy, report, last_step, evidence, close_reason, fault_at, first_signal_at, verdict_at, decided_at, acted_at,
recovered_at, closed_at FROM incidents ORDER BY coalesce(fault_at, verdict_at, ts) DESC LIMIT {LISTED}"""
_ACTIONS = f"""SELECT ts, incident_id, plan_id, verb, target, status, mode, rail, reason FROM actions ORDER BY ts DESC, seq DESC
LIMIT {LISTED}"""
_DELIVERIES = f"""SELECT ts, incident_id, receiver, cause, attempt, status, reason FROM deliveries ORDER BY ts DESC, seq DESC
LIMIT {LISTED}"""
_MOMENTS = ("fault", "first signal", "verdict", "decided", "acted", "recovered", "closed")


@dataclass(frozen=True)
class NodeTicks:
    """Newest telemetry of a node; `arrived_s` is unix seconds."""

    node: str
    arrived_s: float
    cpu_busy_ratio: float | None
    mem_available_ratio: float | None


@dataclass(frozen=True)
class RankSteps:
    """Newest steps of a rank."""

    job: str
    attempt: int
    rank: int
    node: str
    step: int
    arrived_s: float
    step_ms: float | None
    world: int


@dataclass(frozen=True)
class StoreData:
    """One look at the store."""

    nodes: tuple[NodeTicks, ...] = ()
    ranks: tuple[RankSteps, ...] = ()
    incidents: tuple[IncidentLine, ...] = ()
    actions: tuple[ActionLine, ...] = ()
    deliveries: tuple[DeliveryLine, ...] = field(default=())


Open = Callable[[str], Any]


class StoreView:
    """Asks the store behind `url`.

    Parameters
    ----------
    open_client
        Makes a client; tests put their own in.
    """

    def __init__(self, url: str, clock: Clock, open_client: Open | None = None) -> None:
        self._url = url
        self._clock = clock
        self._open = open_client or open_http
        self._client: Any = None
        self._failed_at_ns: int | None = None
        self._reason = ""

    def look(self) -> StoreData:
        """The store's present picture.

        Raises
        ------
        UnavailableError
            With one sentence; also without asking, within a few seconds after a failure.
        """
        now_ns = self._clock.monotonic_ns()
        if self._failed_at_ns is not None and now_ns - self._failed_at_ns < ASK_AGAIN_AFTER_S * NS_PER_S:
            raise UnavailableError(self._reason)
        try:
            if self._client is None:
                self._client = self._open(self._url)
            data = self._ask()
        except (ClickHouseError, HTTPError, OSError) as error:
            self.close()
            self._failed_at_ns, self._reason = self._clock.monotonic_ns(), _sentence(error)
            raise UnavailableError(self._reason) from None
        self._failed_at_ns = None
        return data

    def close(self) -> None:
        """Let the client go."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _ask(self) -> StoreData:
        def rows(query: str) -> Sequence[Sequence[Any]]:
            return self._client.query(query).result_rows  # type: ignore[no-any-return]

        return StoreData(
            nodes=tuple(NodeTicks(node, seen.timestamp(), cpu, memory) for node, seen, cpu, memory in rows(_NODES)),
            ranks=tuple(
                RankSteps(job, attempt, rank, node, step, seen.timestamp(), step_ms, world)
                for job, attempt, rank, node, step, seen, step_ms, world in rows(_RANKS)
            ),
            incidents=tuple(_incident(row) for row in rows(_INCIDENTS)),
            actions=tuple(ActionLine(moment_of(at), *map(str, rest)) for at, *rest in rows(_ACTIONS)),
            deliveries=tuple(
                DeliveryLine(moment_of(at), incident_id, receiver, cause, int(attempt), status, reason)
                for at, incident_id, receiver, cause, attempt, status, reason in rows(_DELIVERIES)
            ),
        )


def open_http(url: str) -> Any:
    """A client that gives up soon: a page must not hang because the store does."""
    import clickhouse_connect

    parts = urlsplit(url)
    return clickhouse_connect.get_client(
        host=parts.hostname or "127.0.0.1", port=parts.port or 8123, username=unquote(parts.username or "default"),
        password=unquote(parts.password or ""), database=parts.path.strip("/") or "default", secure=parts.scheme == "clickhouses",
        connect_timeout=1, send_receive_timeout=5, autogenerate_session_id=False, tz_mode="aware",
        settings={"readonly": 2, "max_execution_time": 5},
    )  # fmt: skip


def _incident(row: Sequence[Any]) -> IncidentLine:
    (incident_id, revision, status, severity, kind, job, title, culprit, culprit_node, confidence, victims, causes, probabilities, remedy,
     report, last_step, evidence, close_reason, *moments) = row  # fmt: skip
    timeline = tuple((name, moment_of(at)) for name, at in zip(_MOMENTS, moments, strict=True) if at is not None)
    return IncidentLine(
        incident_id=incident_id, revision=revision, status=status, severity=severity, kind=kind, job=job, title=title, culprit=culprit,
        culprit_nodes=tuple(name for name in culprit_node.split(", ") if name), confidence=confidence, victims=tuple(victims),
        causes=tuple(zip(causes, probabilities, strict=False)), remedy=tuple(remedy), report=report,
        last_step=last_step if last_step >= 0 else None, timeline=timeline, began_at=timeline[0][1] if timeline else "",
        evidence=_series(evidence), close_reason=close_reason,
    )  # fmt: skip


def _series(text: str) -> tuple[Series, ...]:
    return tuple(
        Series(e["name"], e["unit"], tuple(e["values"]), e["low"], e["high"], e["note"])
        for e in json.loads(text or "[]")
    )


def _sentence(error: Exception) -> str:
    text = str(error)
    if "Connection refused" in text:
        return "nobody listens at the store's address"
    if "timed out" in text.lower():
        return "the store does not answer in time"
    return (text.splitlines() or [type(error).__name__])[0][:200]
