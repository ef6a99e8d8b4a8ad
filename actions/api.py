"""The operator's API, mounted on the service's HTTP server. Reading asks nobody; changing needs the token and an author's reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from actions.desk import set_kill_switch
from actions.http import Request, Response, Router, json_response
from actions.ledger import Row, StoredPlan
from actions.world import NodeState
from trainwarden.errors import UsageError

if TYPE_CHECKING:
    from actions.service import ActionService

MAX_LISTED = 1000


def mount(router: Router, service: ActionService) -> None:
    """Add the API's routes."""
    desk = _Pages(service)
    router.get("/v1/health", desk.health)
    router.get("/metrics", lambda _: Response(service.metrics.page().encode()))
    router.get("/v1/plans", desk.plans)
    router.get("/v1/plans/{plan_id}", desk.plan)
    router.get("/v1/ledger", desk.ledger)
    router.get("/v1/nodes", desk.nodes)
    router.get("/v1/incidents", desk.incidents)
    router.post("/v1/plans/{plan_id}/approve", desk.approve)
    router.post("/v1/plans/{plan_id}/reject", desk.reject)
    router.post("/v1/nodes/{node}/return", desk.return_node)
    router.post("/v1/kill-switch", desk.kill_switch)
    router.post("/v1/reset-breaker", desk.reset_breaker)
    router.post("/v1/raise-fence", desk.raise_fence)


class _Pages:
    def __init__(self, service: ActionService) -> None:
        self._service = service

    def health(self, _: Request) -> Response:
        service = self._service
        value = {
            "state": service.state, "leading": service.leading, "caught_up": service.caught_up, "fence": service.ledger.fence,
            "kill_switch": service.standing.kill_switch(service.clock.now_ns()), "fence_pending": service.fences.nodes(),
            "mode": service.config.policy.mode.value,
        }  # fmt: skip
        return json_response(value)

    def plans(self, request: Request) -> Response:
        stored = self._service.ledger.recent_plans(_number(request, "limit", 50, MAX_LISTED))
        return json_response([self._describe(one) for one in stored])

    def plan(self, request: Request) -> Response:
        stored = self._service.ledger.plan(request.parameters["plan_id"])
        if stored is None:
            raise UsageError(f"no plan {request.parameters['plan_id']!r} in the ledger")
        return json_response(self._describe(stored))

    def ledger(self, request: Request) -> Response:
        rows = self._service.ledger.rows_after(
            _number(request, "after", 0, 1 << 62), _number(request, "limit", 200, MAX_LISTED)
        )
        return json_response([describe_row(row) for row in rows])

    def nodes(self, _: Request) -> Response:
        return json_response([describe_node(state) for _, state in sorted(self._service.watch.cluster().items())])

    def incidents(self, _: Request) -> Response:
        return json_response([msgspec.to_builtins(_named(incident)) for incident in self._service.desk.incidents()])

    def approve(self, request: Request) -> Response:
        author, reason = self._signed(request)
        return json_response(describe_row(self._service.desk.approve(request.parameters["plan_id"], author, reason)))

    def reject(self, request: Request) -> Response:
        author, reason = self._signed(request)
        return json_response(describe_row(self._service.desk.reject(request.parameters["plan_id"], author, reason)))

    def return_node(self, request: Request) -> Response:
        author, reason = self._signed(request)
        plan = self._service.desk.return_node(self._service.config.cluster, request.parameters["node"], author, reason)
        return json_response({"plan_id": plan.plan_id, "reason": plan.reason})

    def kill_switch(self, request: Request) -> Response:
        """The switch is a file, so that it can be thrown without us; here it is only written or removed."""
        author, reason = _author(request)
        on, path = request.json().get("on"), self._service.standing.kill_switch_file
        if not isinstance(on, bool):
            raise UsageError(f'kill-switch: "on" is {on!r}, expected true or false')
        return json_response(set_kill_switch(path, on, author, reason))

    def reset_breaker(self, request: Request) -> Response:
        author, reason = self._signed(request)
        self._service.desk.reset_breaker(author, reason)
        return json_response({"breaker": "closed"})

    def raise_fence(self, request: Request) -> Response:
        self._signed(request)
        at_least = request.json().get("at_least")
        if not isinstance(at_least, int) or isinstance(at_least, bool) or not 0 <= at_least < 1 << 53:
            raise UsageError(f"raise-fence: at_least is {at_least!r}, expected the fence that the wardens keep")
        self._service.ledger.raise_fence(at_least)
        return json_response({"fence": self._service.ledger.fence})

    def _signed(self, request: Request) -> tuple[str, str]:
        if not self._service.leading:
            raise UsageError(f"this action service does not lead ({self._service.state}): ask the one that does")
        return _author(request)

    def _describe(self, stored: StoredPlan) -> dict[str, Any]:
        rows = self._service.ledger.rows_of(stored.plan.plan_id)
        newest = stored.ended or (rows[-1] if rows else None)
        status = newest.status.value if newest else "planned"
        value: dict[str, Any] = msgspec.to_builtins(_named(stored.plan))
        return {
            **value,
            "status": status,
            "ended": stored.ended is not None,
            "rows": [describe_row(row) for row in rows],
        }


def describe_row(row: Row) -> dict[str, Any]:
    """A row as JSON."""
    return {
        "seq": row.seq, "at_ns": row.at_ns, "plan_id": row.plan_id, "incident_id": row.incident_id, "job": row.job, "key": row.key,
        "verb": row.verb, "target": row.target, "status": row.status.value, "mode": row.mode.value, "rail": row.rail,
        "reason": row.reason, "fence": row.fence, "started_at_ns": row.started_at_ns, "detail": dict(row.detail),
    }  # fmt: skip


def describe_node(state: NodeState) -> dict[str, Any]:
    """A node as JSON."""
    return {
        "node": state.node, "reachable": state.reachable, "job": state.job, "state": state.state, "generation": state.generation,
        "members": list(state.members), "last_steps": {str(rank): step for rank, step in state.last_steps.items()},
        "fence": state.fence, "excluded": state.excluded, "reason": state.reason,
    }  # fmt: skip


def _named(record: msgspec.Struct) -> Mapping[str, Any]:
    """Fields by name: records are arrays on the wire, readers of the API want names."""
    return {name: _named_value(getattr(record, name)) for name in record.__struct_fields__}


def _named_value(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _named(value)
    if isinstance(value, tuple):
        return [_named_value(item) for item in value]
    return value


def _author(request: Request) -> tuple[str, str]:
    body = request.json()
    author, reason = str(body.get("author", "")).strip(), str(body.get("reason", "")).strip()
    if not author or not reason:
        raise UsageError(f"{request.path}: author and reason are needed, they are kept in the ledger")
    return author[:100], reason[:500]


def _number(request: Request, name: str, default: int, highest: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal() or len(text) > len(str(highest)) or int(text) > highest:
        raise UsageError(f"{request.path}: {name} = {text!r}, expected a number from 0 to {highest}")
    return int(text)
