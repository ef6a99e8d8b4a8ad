"""What `trainwarden actions ...` does: asks the running service over its API; a button reports the ledger, never optimism."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from actions.desk import set_kill_switch
from actions.http import TOKEN_HEADER, parse_listen, read_token
from trainwarden.config import Config
from trainwarden.errors import UnavailableError, UsageError

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class OperatorClient:
    """One operator at one service. Every method raises `UsageError` with the service's sentence when it says no."""

    config: Config
    author: str

    def health(self) -> dict[str, Any]:
        """State, fence, kill switch."""
        return dict(self._ask("GET", "/v1/health"))

    def plans(self, limit: int = 20) -> list[dict[str, Any]]:
        """Newest plans with their rows."""
        return list(self._ask("GET", f"/v1/plans?limit={limit}"))

    def nodes(self) -> list[dict[str, Any]]:
        """Nodes as the wardens describe them."""
        return list(self._ask("GET", "/v1/nodes"))

    def approve(self, plan_id: str, reason: str) -> dict[str, Any]:
        """Let a waiting plan run; the answer is the row that was written (it may be a refusal by a rail)."""
        return dict(self._ask("POST", f"/v1/plans/{plan_id}/approve", {"reason": reason}))

    def reject(self, plan_id: str, reason: str) -> dict[str, Any]:
        """End a waiting plan."""
        return dict(self._ask("POST", f"/v1/plans/{plan_id}/reject", {"reason": reason}))

    def return_node(self, node: str, reason: str) -> dict[str, Any]:
        """Admit a node and let its job grow again."""
        return dict(self._ask("POST", f"/v1/nodes/{node}/return", {"reason": reason}))

    def kill_switch(self, on: bool, reason: str) -> dict[str, Any]:
        """Throw or release the kill switch. Without a service that answers, the file itself is written or removed."""
        try:
            return dict(self._ask("POST", "/v1/kill-switch", {"on": on, "reason": reason}))
        except UnavailableError:
            path = self.config.path(self.config.actions.kill_switch, "KILL_SWITCH")
            return set_kill_switch(path, on, self.author, reason)

    def reset_breaker(self, reason: str) -> dict[str, Any]:
        """Close the breaker."""
        return dict(self._ask("POST", "/v1/reset-breaker", {"reason": reason}))

    def raise_fence(self, at_least: int, reason: str) -> dict[str, Any]:
        """Continue above the fence of a ledger that is gone."""
        return dict(self._ask("POST", "/v1/raise-fence", {"at_least": at_least, "reason": reason}))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        host, port = parse_listen(self.config.actions.listen)
        headers = {"Content-Type": "application/json"}
        if method == "POST":
            headers[TOKEN_HEADER] = read_token(self.config.path(self.config.actions.token_file, "operator.token"))
        payload = json.dumps({**body, "author": self.author}) if body is not None else None
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, payload, headers)
            answer = connection.getresponse()
            value = json.loads(answer.read() or b"null")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UnavailableError(
                f"no action service answers at {self.config.actions.listen} ({error}): start it or check actions.listen"
            ) from None
        finally:
            connection.close()
        if answer.status != 200:
            raise UsageError(str(value.get("error", value)) if isinstance(value, dict) else f"HTTP {answer.status}")
        return value
