"""Processes of ours, found by a mark in their environment, and what they leave on the machine."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.theatre import wait_for

MARK = "TRAINWARDEN_TEST_MARK"
ROOT = Path(__file__).parents[2]


@dataclass
class Started:
    """A command under a mark that everything below it inherits."""

    process: subprocess.Popen[str]
    mark: str
    output: Path

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def says(self, words: str) -> None:
        """Wait until its output has these words."""

        def look() -> bool:
            assert self.process.poll() is None, self.text()
            return words in self.text()

        wait_for(f"{words!r} from process {self.process.pid}", look)

    def ends(self, limit_s: float = 120.0) -> int:
        return self.process.wait(limit_s)

    def left(self) -> dict[int, str]:
        """Processes that carry the mark."""
        return marked(self.mark)

    def kill_all(self) -> None:
        """For a test that has failed."""
        for pid in self.left():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self.process.wait()


def start(command: Sequence[str], output: Path, cwd: Path, more: Mapping[str, str] | None = None) -> Started:
    """Start `command`, its output (both) in a file."""
    mark = uuid.uuid4().hex
    env = {**os.environ, MARK: mark, **(more or {})}
    with output.open("w") as out:
        process = subprocess.Popen(
            list(command), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=cwd, env=env, text=True
        )
    return Started(process, mark, output)


def marked(mark: str) -> dict[int, str]:
    """Live processes with this mark in their environment: id and command line."""
    wanted, found = f"{MARK}={mark}".encode(), {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
                )
        except OSError:
            continue
    return found


@dataclass
class Traces:
    """What a demonstration may leave outside its directory: nothing."""

    places: tuple[Path, ...]
    before: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.before = self._look()

    def new(self) -> set[str]:
        return self._look() - self.before

    def _look(self) -> set[str]:
        found = {str(path) for place in self.places for path in place.rglob("*")}
        found |= {str(path) for path in Path("/dev/shm").glob("trainwarden-digits*")}
        found |= {str(path) for path in Path("/sys/fs/cgroup").glob("*/trainwarden-demo-*")}
        found |= {str(path) for path in Path("/sys/fs/cgroup").glob("trainwarden-demo-*")}
        return found | {f"netns {path.name}" for path in Path("/run/netns").glob("tw*")}


def now_s() -> float:
    return time.monotonic()
