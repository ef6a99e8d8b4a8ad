"""Processes of ours, found by a mark in their environment, and what they leave on the machine."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwarden_hook import segments

from tests.faults.theatre import wait_for

MARK = "TRAINWARDEN_TEST_MARK"
SEAT = "@trainwarden-demo-"
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


def with_path(directory: Path) -> dict[int, str]:
    """Live processes that have this directory in their command line or as where they stand."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(directory) in command or os.readlink(entry / "cwd").startswith(str(directory)):
                found[int(entry.name)] = command[:200]
        except OSError:
            continue
    return found


def seat_of(pid: int) -> int:
    """Number of the seat that a demonstration holds: the abstract socket among its descriptors; -1 before it has one."""
    held = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    for line in Path("/proc/net/unix").read_text().splitlines():
        name, inode = line.rpartition(" ")[2], line.split()[6]
        if name.startswith(SEAT) and inode in held:
            return int(name.removeprefix(SEAT))
    return -1


def kernel_traces(seat: int) -> set[str]:
    """What the demonstration in this seat has outside any directory: shared memory, control groups, namespaces, links."""
    job = f"digits-{seat}" if seat else "digits"
    names = {Path(segments.prefix(job, f"n{number}")).name for number in range(4)}
    found = {str(path) for name in names for path in Path("/dev/shm").glob(f"{name}*")}
    for pattern in (f"trainwarden-demo-{seat}", f"*/trainwarden-demo-{seat}"):
        found |= {str(path) for path in Path("/sys/fs/cgroup").glob(pattern)}
    found |= {f"netns {path.name}" for path in Path("/run/netns").glob(f"tw{seat}-n*")}
    return found | {f"link {path.name}" for path in Path("/sys/class/net").glob(f"tw{seat}[-mr]*")}


def listing(*places: Path) -> set[str]:
    """Every path below some places."""
    return {str(path) for place in places for path in place.rglob("*")}
