"""Who holds the lease, and whether that process is still there."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Holder:
    """A process that cannot be confused with another: host, boot, process-id namespace, pid and its start time."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: str
    name: str = ""

    @property
    def text(self) -> str:
        """Form in the ledger."""
        return "|".join((self.host, self.boot, self.namespace, str(self.pid), self.started, self.name))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """Back from the ledger; None when nobody holds the lease."""
        parts = text.split("|")
        if len(parts) != 6 or not parts[3].isdecimal():
            return None
        host, boot, namespace, pid, started, name = parts
        return cls(host, boot, namespace, int(pid), started, name)

    @classmethod
    def myself(cls, name: str = "") -> Holder:
        """This process."""
        return cls(
            socket.gethostname(),
            _read("sys/kernel/random/boot_id"),
            _namespace(),
            os.getpid(),
            _started(os.getpid()),
            name,
        )


def is_gone(holder: Holder, judge: Holder) -> bool:
    """Whether `holder` certainly no longer runs, as far as `judge` can see; False when in doubt."""
    if holder.host != judge.host:
        return False
    if holder.boot != judge.boot:
        return True
    if holder.namespace != judge.namespace or not holder.started:
        return False
    return _started(holder.pid) != holder.started


def _read(name: str) -> str:
    try:
        return (_PROC / name).read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty when there is no such process (a zombie counts as none)."""
    fields = _read(f"{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""
