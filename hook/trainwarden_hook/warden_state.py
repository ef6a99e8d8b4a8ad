"""What a warden must remember over its own death: fence, nonces, answers, exclusion, last order."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from trainwarden_hook.addresses import UsageError

MAX_ANSWERS = 512
FORMAT = 1


@dataclass
class Memory:
    """Persisted state of one warden; times are epoch nanoseconds."""

    node: str
    job: str
    fence: int = 0
    generation: int = 0
    excluded: str = ""
    stopped: bool = False
    finished: bool = False
    order: dict[str, Any] | None = None
    nonces: dict[str, list[Any]] = field(default_factory=dict)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    avoided: list[list[str]] = field(default_factory=list)


class StateFile:
    """Reads and writes `Memory` atomically: temporary file, fsync, rename, fsync of the directory."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.path = os.path.join(folder, "warden.json")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot create the state directory {folder}: {error.strerror}") from error
        if not os.access(folder, os.W_OK):
            raise UsageError(f"no permission to write in the state directory {folder}")
        self._lock = open(os.path.join(folder, "lock"), "w", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"another warden uses the state directory {folder}; stop it first") from error

    def close(self) -> None:
        """Let another warden use the directory."""
        self._lock.close()

    def load(self, node: str, job: str) -> Memory:
        """The stored memory, or a new one.

        Raises
        ------
        UsageError
            The file is damaged or belongs to another node or job: a lost fence must not pass silently.
        """
        try:
            with open(self.path, encoding="utf-8") as file:
                body = json.load(file)
            if body.pop("format") != FORMAT:
                raise ValueError("unknown format")
            memory = Memory(**body)
        except FileNotFoundError:
            return Memory(node, job)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UsageError(
                f"the warden's state {self.path} cannot be read ({error}); repair it or remove it"
            ) from error
        if (memory.node, memory.job) != (node, job):
            raise UsageError(
                f"the state {self.path} is of node {memory.node} and job {memory.job}, "
                f"not of {node} and {job}; give this warden its own --state-dir"
            )
        return memory

    def save(self, memory: Memory) -> None:
        """Make ``memory`` durable before this returns."""
        _trim(memory)
        temporary = f"{self.path}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **asdict(memory)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self.path)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _trim(memory: Memory) -> None:
    while len(memory.answers) > MAX_ANSWERS:
        memory.answers.pop(next(iter(memory.answers)))
