"""The warden's gate: which commands are let through, each at most once."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwarden_hook.warden_state import Memory, StateFile

VERBS = ("world", "stop", "admit", "save", "kill", "status", "reroute", "shares")
KINDS: dict[str, type] = {
    "id": str,
    "verb": str,
    "node": str,
    "job": str,
    "nonce": str,
    "fence": int,
    "issued_at_ns": int,
    "expires_at_ns": int,
    "args": dict,
}
HTTP_OK, HTTP_MALFORMED, HTTP_FORBIDDEN, HTTP_REFUSED = 200, 400, 401, 409
MAX_CLOCK_SKEW_NS = 30_000_000_000
Answer = dict[str, Any]
log = logging.getLogger("trainwarden.warden")


def canonical(body: dict[str, Any]) -> bytes:
    """The one byte form of a command: sorted keys, no spaces."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def sign(secret: bytes, body: bytes) -> str:
    """Hex HMAC-SHA256, the value of ``X-Trainwarden-Signature``."""
    return hmac.new(secret, body, hashlib.sha256).hexdigest()


class Malformed(Exception):
    """Bytes that are no command; the text says which key, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Command:
    """A checked command."""

    id: str
    verb: str
    node: str
    job: str
    fence: int
    issued_at_ns: int
    expires_at_ns: int
    nonce: str
    args: dict[str, Any]

    @classmethod
    def parse(cls, body: bytes) -> Command:
        """From the bytes of a request.

        Raises
        ------
        Malformed
            One sentence: which key, what was found, what was expected.
        """
        try:
            fields = json.loads(body)
        except ValueError as error:
            raise Malformed(f"the body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise Malformed(f"the body is a {type(fields).__name__}, expected an object")
        for key, kind in KINDS.items():
            found = fields.get(key)
            if not isinstance(found, kind) or isinstance(found, bool):
                raise Malformed(f"{key} is {found!r}, expected a value of kind {kind.__name__}")
        if fields["verb"] not in VERBS:
            raise Malformed(f"verb is {fields['verb']!r}, expected one of {', '.join(VERBS)}")
        unknown = sorted(set(fields) - set(KINDS))
        if unknown:
            raise Malformed(f"unknown key {unknown[0]!r}")
        return cls(**fields)


class Gate:
    """Signature, node and job, expiry, nonce, fence; then the stored answer or one execution.

    Parameters
    ----------
    execute
        Carries a command out; returns ``status``, ``reason``, ``result``.
    now_ns
        The wall clock.
    """

    def __init__(
        self,
        secret: bytes,
        memory: Memory,
        file: StateFile,
        execute: Callable[[Command], Answer],
        now_ns: Callable[[], int],
    ) -> None:
        self._secret = secret
        self._memory = memory
        self._file = file
        self._execute = execute
        self._now_ns = now_ns
        self._changed = threading.Condition()
        self._running: set[str] = set()

    def handle(self, body: bytes, signature: str) -> tuple[int, Answer]:
        """HTTP status and answer for one request."""
        if not hmac.compare_digest(sign(self._secret, body).encode(), signature.encode()):
            return HTTP_FORBIDDEN, self._answer("", "refused", "the signature does not fit the body and the secret")
        try:
            command = Command.parse(body)
        except Malformed as error:
            return HTTP_MALFORMED, self._answer("", "refused", str(error))
        stored, refusal = self._admit(command)
        if stored is not None:
            return _code(stored), stored
        if refusal:
            return HTTP_REFUSED, self._answer(command.id, "refused", refusal)
        return self._run(command)

    def _admit(self, command: Command) -> tuple[Answer | None, str]:
        with self._changed:
            self._changed.wait_for(lambda: command.id not in self._running)
            stored = self._memory.answers.get(command.id)
            if stored is not None:
                return stored, ""
            refusal = self._refusal(command)
            if not refusal:
                self._remember(command)
                self._running.add(command.id)
            return None, refusal

    def _refusal(self, command: Command) -> str:
        memory, now = self._memory, self._now_ns()
        if command.node != memory.node or command.job != memory.job:
            return f"this is node {memory.node} of job {memory.job}, not node {command.node} of job {command.job}"
        if now >= command.expires_at_ns:
            return f"the command expired {(now - command.expires_at_ns) / 1e9:.1f} s ago"
        if command.issued_at_ns > now + MAX_CLOCK_SKEW_NS:
            return f"the command was issued {(command.issued_at_ns - now) / 1e9:.1f} s in the future; check the clocks"
        if memory.nonces.get(command.nonce, [0, command.id])[1] != command.id:
            return f"the nonce {command.nonce} was used before"
        if command.fence < memory.fence:
            return f"fence {command.fence} is lower than {memory.fence}, the highest seen: a newer leader acts"
        return ""

    def _remember(self, command: Command) -> None:
        """Durable before anything is done: a crash must not open the gate for an older leader."""
        memory, now = self._memory, self._now_ns()
        memory.fence = max(memory.fence, command.fence)
        memory.nonces = {nonce: entry for nonce, entry in memory.nonces.items() if entry[0] > now}
        memory.nonces[command.nonce] = [command.expires_at_ns, command.id]
        self._file.save(memory)

    def _run(self, command: Command) -> tuple[int, Answer]:
        outcome: Answer = {
            "status": "failed",
            "reason": "the warden failed while carrying the command out",
            "result": {},
        }
        try:
            outcome = self._execute(command)
        finally:
            answer = self._answer(command.id, outcome["status"], outcome["reason"], outcome["result"])
            with self._changed:
                if command.verb != "status":
                    self._memory.answers[command.id] = answer
                self._running.discard(command.id)
                self._changed.notify_all()
                self._keep_answer(command)
        return _code(answer), answer

    def _keep_answer(self, command: Command) -> None:
        """What was done is done: a disk that is full now must not keep the answer from whoever asked."""
        try:
            self._file.save(self._memory)
        except OSError as error:
            log.error(
                "the answer to %s is not on disk (%s): free space, or it is forgotten at a restart", command.id, error
            )

    def _answer(self, key: str, status: str, reason: str, result: Answer | None = None) -> Answer:
        return {"id": key, "status": status, "reason": reason, "fence": self._memory.fence, "result": result or {}}

    def persist(self, change: Callable[[Memory], None]) -> None:
        """Apply a change to the memory and make it durable."""
        with self._changed:
            change(self._memory)
            self._file.save(self._memory)


def _code(answer: Answer) -> int:
    return HTTP_REFUSED if answer["status"] == "refused" else HTTP_OK
