"""A broker as a child process: its log, its end, and what to say when it died."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainwarden.embedded.tether import tethered
from trainwarden.errors import UnavailableError

_TAIL_BYTES = 4096
_WATCH_S = 0.5


class Child:
    """One long-running process of ours, in a session of its own.

    The session keeps a Ctrl-C at the terminal from the broker: it must outlive the parts that still write to it, and is
    stopped by its owner, or by the kernel when its owner was killed.

    Parameters
    ----------
    name
        Who it is, for messages.
    argv
        The command line.
    log_path
        Where its output goes; appended, the folder is made.
    env
        Added to the environment.
    """

    def __init__(self, name: str, argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log_path = log_path
        self._process = self._start(list(argv), dict(env or {}))

    def _start(self, argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.log_path.open("ab") as log:
                return subprocess.Popen(
                    tethered(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **env},
                    start_new_session=True,
                )
        except OSError as error:
            raise UnavailableError(
                f"{self.name} cannot be started: {error}; it needs {argv[0]} and a writable log at {self.log_path}"
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def died(self) -> str | None:
        """One sentence when the process is gone, else None."""
        code = self._process.poll()
        if code is None:
            return None
        return f"{self.name} ended with code {code}: {self.last_words()} (log: {self.log_path})"

    def last_words(self) -> str:
        """The last telling line of its log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if "rror" in line or "xception" in line or "ERROR" in line]
        return (telling or lines or ["no output"])[-1][:300]

    def stop(self, grace_s: float) -> int:
        """End it with SIGTERM, after `grace_s` with SIGKILL; return its exit code."""
        if self.alive():
            self._signal(signal.SIGTERM)
            try:
                return self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
        return self._process.wait()

    def kill(self) -> int:
        """End it as a crash would (SIGKILL)."""
        if self.alive():
            self._signal(signal.SIGKILL)
        return self._process.wait()

    def wait(self) -> int:
        return self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # it ended between the check and the signal; wait() reaps it


def wait_until_stopped(stop: threading.Event, died: Callable[[], str | None]) -> None:
    """Wait for `stop`, watching that a child lives.

    Raises
    ------
    UnavailableError
        The child ended by itself.
    """
    while not stop.wait(_WATCH_S):
        reason = died()
        if reason is not None:
            raise UnavailableError(reason)
