"""What stands until somebody says otherwise, asked beside the agent: files, commands, servers that may never answer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import TypeVar

from collectors.asking import Question

T = TypeVar("T")

MAX_BYTES = 64 * 1024 * 1024


class Answer(Question[T]):
    """A question whose last good answer stands until there is a newer one: where things are does not change because nobody says so."""

    def refresh(self) -> T | None:
        """Ask anew when it is time, and give what is known: the last good answer, None before the first."""
        self.newest()
        return self.last

    @property
    def problem(self) -> str:
        """Why the last question failed; empty when it did not."""
        if isinstance(self.error, OSError):
            return f"{self.error.strerror or self.error}"
        return "" if self.error is None else str(self.error) or type(self.error).__name__

    @property
    def reason(self) -> str:
        """The same as the reason of a gap."""
        if self.error is None:
            return ""
        if isinstance(self.error, OSError):
            return _reason(self.error)
        return "malformed" if isinstance(self.error, ValueError) else "error"

    @property
    def overdue(self) -> bool:
        """Whether it has been open for two periods."""
        return self.waiting_s > 2 * self.every_s


def _reason(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "permission"
    if isinstance(error, FileNotFoundError):
        return "missing"
    return "timeout" if isinstance(error, TimeoutError) else "unreachable"


def read_text(path: str, limit_bytes: int = MAX_BYTES) -> str:
    """A file's text; raises `OSError`, and `ValueError` when it is larger than `limit_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data or b"") > limit_bytes:
        raise ValueError(f"{path} is larger than {limit_bytes} bytes: expected a smaller file")
    return (data or b"").decode("utf-8", "replace")


def output_of(command: Sequence[str], timeout_s: float) -> str:
    """What a command prints; it is killed at the deadline (one that cannot be killed is left alone). Raises `OSError`."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
    )
    try:
        output, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        raise TimeoutError(f"{command[0]} gave no answer within {timeout_s:g} s") from None
    if child.returncode != 0:
        raise OSError(f"{command[0]} ended with code {child.returncode}")
    return output[:MAX_BYTES].decode("utf-8", "replace")
