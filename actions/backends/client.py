"""Signed commands to one warden over HTTP. The same id may be sent again: the warden answers what it answered before."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from trainwarden.clock import NS_PER_S, Clock
from trainwarden.errors import ConfigError

SIGNATURE_HEADER = "X-Trainwarden-Signature"
MAX_ANSWER_BYTES = 4 * 1024 * 1024
ATTEMPTS = 3
RETRY_PAUSE_S = 0.1
_ANSWERS = ("done", "accepted", "refused", "failed")


class Unreachable(Exception):
    """A warden that could not be asked; the text says which and why."""


@dataclass(frozen=True)
class Answer:
    """What a warden said. `fence` is the highest it keeps."""

    status: str
    reason: str = ""
    fence: int = 0
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return self.status in ("done", "accepted")


@dataclass(frozen=True)
class Command:
    """One command before it is signed; nonce and times are made anew for every sending."""

    id: str
    verb: str
    node: str
    job: str
    fence: int
    args: Mapping[str, Any] = field(default_factory=dict)


def canonical(value: object) -> bytes:
    """The bytes that are signed: sorted keys, no blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sign(secret: bytes, body: bytes) -> str:
    """Hex HMAC-SHA256 of the body."""
    return hmac.new(secret, body, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class WardenClient:
    """Talks to one warden.

    Parameters
    ----------
    url
        ``http://host:port``.
    expiry_s
        How long after sending a command may still take effect.
    """

    node: str
    url: str
    secret: bytes
    clock: Clock
    connect_timeout_s: float
    expiry_s: float = 15.0

    def status(self, timeout_s: float) -> dict[str, Any]:
        """The warden's status page.

        Raises
        ------
        Unreachable
            No connection, no answer in time, or an answer that is no status.
        """
        code, value = self._ask("GET", "/v1/status", b"", {}, timeout_s)
        if code != 200 or value.get("node") != self.node:
            raise Unreachable(f"{self.url} answered {code} for node {value.get('node')!r}, expected {self.node!r}")
        return value

    def command(self, command: Command, timeout_s: float) -> Answer:
        """Send until something answers, at most `ATTEMPTS` times and `timeout_s` in all.

        Raises
        ------
        Unreachable
            When nothing answered; the command may have taken effect all the same.
        """
        until_ns = self.clock.monotonic_ns() + int(timeout_s * NS_PER_S)
        left_s, attempt = timeout_s, 1
        while True:
            try:
                return self._send(command, left_s)
            except Unreachable:
                left_s = (until_ns - self.clock.monotonic_ns()) / NS_PER_S - RETRY_PAUSE_S
                if attempt == ATTEMPTS or left_s <= 0:
                    raise
            attempt += 1
            self.clock.sleep(RETRY_PAUSE_S)

    def _send(self, command: Command, timeout_s: float) -> Answer:
        body = self.body(command)
        headers = {SIGNATURE_HEADER: sign(self.secret, body), "Content-Type": "application/json"}
        code, value = self._ask("POST", "/v1/command", body, headers, timeout_s)
        status, reason = value.get("status"), str(value.get("reason", ""))
        fence, result = value.get("fence", 0), value.get("result")
        if code in (400, 401):
            return Answer("refused", f"HTTP {code}: {reason or value.get('error', 'no reason given')}")
        if status not in _ANSWERS or value.get("id") != command.id or not isinstance(fence, int):
            raise Unreachable(f"{self.node}: HTTP {code} is no answer to {command.id} ({reason or 'no reason given'})")
        return Answer(str(status), reason, fence, result if isinstance(result, dict) else {})

    def body(self, command: Command) -> bytes:
        """Canonical bytes of `command` as sent now."""
        now_ns = self.clock.now_ns()
        return canonical({
            "id": command.id, "verb": command.verb, "node": command.node, "job": command.job, "fence": command.fence,
            "issued_at_ns": now_ns, "expires_at_ns": now_ns + int(self.expiry_s * NS_PER_S),
            "nonce": secrets.token_hex(8), "args": dict(command.args),
        })  # fmt: skip

    def _ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        host, port = address_of(self.node, self.url)
        connection = http.client.HTTPConnection(host, port, timeout=self.connect_timeout_s)
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            value = json.loads(answer.read(MAX_ANSWER_BYTES) or b"{}")
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise Unreachable(f"{self.node} ({self.url}): {error or type(error).__name__}") from None
        finally:
            connection.close()
        if not isinstance(value, dict):
            raise Unreachable(f"{self.node} ({self.url}): answered a {type(value).__name__}, expected an object")
        return answer.status, value


def address_of(node: str, url: str) -> tuple[str, int]:
    """Host and port of a warden's URL."""
    split = urlsplit(url)
    try:
        port = split.port
    except ValueError:
        port = None
    if split.scheme != "http" or not split.hostname or port is None:
        raise ConfigError(f"backends.warden: {url!r} is no address of node {node}, expected http://host:port")
    return split.hostname, port
