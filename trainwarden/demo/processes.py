"""Child processes of the demonstration: each in a session of its own, its output in a file, none left behind.

A child gets SIGTERM when its parent dies, in whatever way. What children start inherits a mark in its environment, by which it is found
and killed in the end even when it has left the session (launchers do).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwarden.embedded.tether import tethered
from trainwarden.errors import UnavailableError

STOP_S = 8.0
MARK = "TRAINWARDEN_TREE"


@dataclass
class Child:
    """One running process and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def tail(self, lines: int = 12) -> str:
        """Last lines of its output."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL to the process alone, as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Children:
    """Starts processes and stops all of them, in reverse order, whatever happens."""

    def __init__(self, log_directory: Path, environment: Mapping[str, str]) -> None:
        self._logs = log_directory
        self._mark = uuid.uuid4().hex
        self._environment = {**environment, MARK: self._mark}
        self._children: dict[str, Child] = {}
        try:
            log_directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnavailableError(
                f"{log_directory}: cannot be made ({error.strerror}): choose a directory that may be written"
            ) from None

    def start(self, name: str, command: Sequence[str], **extra: str) -> Child:
        """Start `command`; `extra` adds environment variables. A child of the same name must be gone."""
        log = self._logs / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                tethered(command), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **self._environment, **extra},
            )  # fmt: skip
        self._children[name] = Child(name, process, log)
        return self._children[name]

    def get(self, name: str) -> Child:
        """A child by name."""
        return self._children[name]

    def all(self) -> list[Child]:
        """All children, oldest first."""
        return list(self._children.values())

    def require_alive(self) -> None:
        """Raise with the end of its output when a child has ended by itself."""
        for child in self.all():
            if not child.alive():
                raise UnavailableError(
                    f"{child.name} ended with code {child.process.returncode}; its last lines:\n{child.tail()}"
                )

    def stop(self, name: str, patience_s: float = STOP_S) -> None:
        """SIGTERM, then SIGKILL to the whole session."""
        child = self._children.pop(name)
        _signal_session(child, signal.SIGTERM)
        try:
            child.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass
        _signal_session(child, signal.SIGKILL)
        child.process.wait()

    def stop_all(self) -> None:
        """Stop everything: all are asked at once, newest first, then waited for together."""
        for child in reversed(self.all()):
            _signal_session(child, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for child in reversed(self.all()):
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        for child in self.all():
            _signal_session(child, signal.SIGKILL)
            child.process.wait()
        self._children.clear()
        kill_marked(self._mark)


def _signal_session(child: Child, number: signal.Signals) -> None:
    try:
        os.killpg(child.pid, number)
    except (ProcessLookupError, PermissionError):
        return


def kill_marked(mark: str) -> list[int]:
    """SIGKILL to every process that carries this mark; returns their ids."""
    wanted, killed = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                killed.append(int(entry.name))
        except OSError:
            continue  # it ended meanwhile, or is somebody else's
    return killed


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM do nothing inside: cleaning up is done to its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
