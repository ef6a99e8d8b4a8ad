"""The Kubernetes API server, asked with the pod's own service account: two small questions a minute, answered from its cache."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from collectors.topology.background import read_text

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_ANSWER_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class ApiServer:
    """Where it is and who asks; the token is read anew each time, since the kubelet rotates it."""

    host: str
    port: int
    account: Path = ACCOUNT
    timeout_s: float = 5.0

    @classmethod
    def of_pod(cls, timeout_s: float) -> ApiServer | None:
        """From the environment that every pod has; None outside pods, and in those without a service account."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not port.isdecimal() or not (ACCOUNT / "token").exists():
            return None
        return cls(host, int(port), ACCOUNT, timeout_s)

    def node(self, name: str) -> Any:
        """The node object. Raises `OSError`, and `ValueError` for an answer that is no JSON."""
        return self._get(f"/api/v1/nodes/{quote(name, safe='')}?resourceVersion=0")

    def pods(self, node: str) -> Any:
        """The pods of a node."""
        return self._get(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{quote(node, safe='')}&resourceVersion=0")

    def _get(self, path: str) -> Any:
        # only where it is needed: the two modules are three megabytes of an agent's memory
        import http.client
        import ssl

        token = read_text(str(self.account / "token"), 65536).strip()
        context = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=self.timeout_s, context=context)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}", "Accept": "application/json"})
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER_BYTES + 1)
        except http.client.HTTPException as error:
            raise OSError(f"API server: {type(error).__name__}") from None
        finally:
            connection.close()
        return parse_answer(answer.status, body, path)


def parse_answer(status: int, body: bytes, path: str) -> Any:
    """The object in an answer; a refusal says which right is missing."""
    if status in (401, 403):
        raise PermissionError(
            f"API server answers {status} to GET {path.partition('?')[0]}: the service account needs that right"
        )
    if status != 200:
        raise OSError(f"API server answers {status} to GET {path.partition('?')[0]}")
    if len(body) > MAX_ANSWER_BYTES:
        raise ValueError(f"API server's answer is larger than {MAX_ANSWER_BYTES} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"API server's answer is no JSON: {error}") from None
