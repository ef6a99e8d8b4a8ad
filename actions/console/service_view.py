"""What the action service says: over HTTP for a terminal, through its router within its own process. Both give the same JSON."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actions.console.model import ActionLine, IncidentLine, Series, moment
from actions.http import Request, Router, parse_listen
from trainwarden.errors import UnavailableError

TIMEOUT_S = 2.0
PLANS = 20
_MOMENTS = {
    "fault_at_ns": "fault", "first_signal_at_ns": "first signal", "verdict_at_ns": "verdict", "decided_at_ns": "decided",
    "acted_at_ns": "acted", "recovered_at_ns": "recovered", "closed_at_ns": "closed",
}  # fmt: skip

Fetch = Callable[[str], Any]
"""JSON behind a path; raises `UnavailableError`."""


@dataclass(frozen=True)
class WardenLine:
    """A node as its warden describes it."""

    node: str
    reachable: bool
    job: str
    state: str
    excluded: bool
    reason: str
    last_steps: Mapping[int, int]


@dataclass(frozen=True)
class ServiceData:
    """One look at the action service."""

    state: str
    mode: str
    kill_switch: str
    wardens: tuple[WardenLine, ...] = ()
    incidents: tuple[IncidentLine, ...] = ()
    actions: tuple[ActionLine, ...] = field(default=())


def look(fetch: Fetch) -> ServiceData:
    """The service's present picture.

    Raises
    ------
    UnavailableError
        It does not answer, or somebody else does.
    """
    try:
        return _look(fetch)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnavailableError(
            f"what answers is no action service of this build ({type(error).__name__}): check actions.listen"
        ) from None


def _look(fetch: Fetch) -> ServiceData:
    health = fetch("/v1/health")
    return ServiceData(
        state=str(health["state"]),
        mode=str(health.get("effective_mode") or health["mode"]),
        kill_switch=str(health["kill_switch"] or ""),
        wardens=tuple(_warden(entry) for entry in fetch("/v1/nodes")),
        incidents=tuple(_incident(entry) for entry in fetch("/v1/incidents")),
        actions=_actions(fetch(f"/v1/plans?limit={PLANS}")),
    )


def over_http(listen: str) -> Fetch:
    """Fetches from the service at ``host:port``."""
    host, port = parse_listen(listen)

    def fetch(path: str) -> Any:
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"nobody answers at {listen} ({type(error).__name__})") from None
        finally:
            connection.close()
        return _json(path, response.status, body)

    return fetch


def through(router: Router) -> Fetch:
    """Fetches from the router of this very process."""

    def fetch(path: str) -> Any:
        bare, _, query = path.partition("?")
        pairs = dict(pair.split("=", 1) for pair in query.split("&") if pair)
        response = router.dispatch(Request("GET", bare, query=pairs, headers={"host": "localhost"}))
        return _json(path, int(response.status), response.body)

    return fetch


def broker_answers(kafka_url: str, timeout_s: float = 0.5) -> str:
    """Empty when one broker of the address can be connected to, else why not."""
    scheme, _, rest = kafka_url.partition("://")
    if scheme != "kafka":
        return ""
    reasons = []
    for address in rest.split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout_s).close()
        except (OSError, ValueError) as error:
            reasons.append(f"{address}: {getattr(error, 'strerror', None) or error}")
        else:
            return ""
    return "; ".join(reasons)


def _json(path: str, status: int, body: bytes) -> Any:
    if status != 200:
        raise UnavailableError(f"{path} answers {status}: {body[:200].decode(errors='replace')}")
    return json.loads(body)


def _warden(entry: Mapping[str, Any]) -> WardenLine:
    steps = {int(rank): int(step) for rank, step in entry["last_steps"].items()}
    reachable, excluded = bool(entry["reachable"]), bool(entry["excluded"])
    return WardenLine(entry["node"], reachable, entry["job"], entry["state"], excluded, entry["reason"], steps)


def _incident(entry: Mapping[str, Any]) -> IncidentLine:
    culprits = [(c["kind"], c["name"], c["node"]) for c in entry["culprits"]]
    timeline = tuple(
        (label, moment(entry["timeline"][name])) for name, label in _MOMENTS.items() if entry["timeline"][name] > 0
    )
    nodes = dict.fromkeys(node or (name if kind == "node" else "") for kind, name, node in culprits)
    return IncidentLine(
        incident_id=entry["incident_id"], revision=entry["revision"], status=entry["status"], severity=entry["severity"],
        kind=entry["kind"], job=entry["job"], title=entry["title"], culprit=", ".join(f"{kind}:{name}" for kind, name, _ in culprits),
        culprit_nodes=tuple(node for node in nodes if node), confidence=entry["confidence"], victims=tuple(entry["victims"]),
        causes=tuple((f"{c['kind']} {c['entity']['kind']}:{c['entity']['name']}", c["probability"]) for c in entry["causes"]),
        remedy=tuple(entry["remedy"]), report=entry["report"], last_step=entry["last_step"] if entry["last_step"] >= 0 else None,
        timeline=timeline, began_at=timeline[0][1] if timeline else moment(entry["observed_at_ns"]),
        evidence=tuple(_series(e) for e in entry["evidence"]), close_reason=entry["close_reason"],
    )  # fmt: skip


def _series(entry: Mapping[str, Any]) -> Series:
    values = tuple(_number(value) for value in entry["values"])
    return Series(entry["name"], entry["unit"], values, _number(entry["low"]), _number(entry["high"]), entry["note"])


def _number(value: Any) -> float | None:
    # json.dumps writes NaN as such, which reads back as a float that is not equal to itself
    return None if value is None or value != value else float(value)  # noqa: PLR0124


def _actions(plans: Sequence[Mapping[str, Any]]) -> tuple[ActionLine, ...]:
    rows = sorted(
        (row for plan in plans for row in plan["rows"]), key=lambda row: (row["at_ns"], row["seq"]), reverse=True
    )
    return tuple(
        ActionLine(moment(row["at_ns"]), row["incident_id"], row["plan_id"], row["verb"], row["target"], row["status"], row["mode"],
                   row["rail"], row["reason"])
        for row in rows
    )  # fmt: skip
