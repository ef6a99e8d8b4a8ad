"""Questions that may never be answered (a dead file system, a process that holds its memory lock, a server): asked in a thread that nobody
waits for, one at a time.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from trainwarden.clock import NS_PER_S, Clock

T = TypeVar("T")

MAX_BYTES = 64 * 1024 * 1024


class Answer(Generic[T]):
    """The newest answer to one question.

    Parameters
    ----------
    ask
        Called in an own daemon thread. `OSError` and `ValueError` are its expected ways to fail: `problem` then holds the sentence.
    every_s
        Pause between two questions; the same one is not asked again while it hangs.
    """

    def __init__(self, name: str, clock: Clock, every_s: float, ask: Callable[[], T]) -> None:
        self._name = name
        self._clock = clock
        self._every_ns = int(every_s * NS_PER_S)
        self._ask = ask
        self._asked_ns: int | None = None
        self._thread: threading.Thread | None = None
        self.value: T | None = None
        self.problem = ""
        self.reason = ""
        self.count = 0

    def refresh(self) -> T | None:
        """Ask anew when it is time, and give what is known: the last good answer, None before the first."""
        now_ns = self._clock.monotonic_ns()
        if not self.hangs and (self._asked_ns is None or now_ns - self._asked_ns >= self._every_ns):
            self._asked_ns = now_ns
            self._thread = threading.Thread(target=self._run, name=f"tw-{self._name}", daemon=True)
            self._thread.start()
        return self.value

    @property
    def hangs(self) -> bool:
        """Whether the question is still open."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def overdue(self) -> bool:
        """Whether it has been open for two periods."""
        return (
            self.hangs
            and self._asked_ns is not None
            and self._clock.monotonic_ns() - self._asked_ns > 2 * self._every_ns
        )

    def wait(self, timeout_s: float) -> bool:
        """Wait for the open question: for a person, never for the agent."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.hangs

    def _run(self) -> None:
        try:
            self.value = self._ask()
            self.problem, self.reason = "", ""
        except OSError as error:
            self.problem, self.reason = f"{error.strerror or error}", _reason(error)
        except ValueError as error:
            self.problem, self.reason = str(error), "malformed"
        self.count += 1


def _reason(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "permission"
    return (
        "missing"
        if isinstance(error, FileNotFoundError)
        else "timeout"
        if isinstance(error, TimeoutError)
        else "unreachable"
    )


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
