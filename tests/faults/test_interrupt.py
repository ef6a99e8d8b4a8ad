"""A demonstration that is broken off leaves nothing: no process, no shared memory, no file outside its directory, nothing in the kernel."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.processes import Started, kernel_traces, listing, seat_of, start, with_path
from tests.faults.theatre import SEEDS, wait_for

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(400)]

MOMENTS = {"starting": "starting broker", "training": "ranks are training", "healing": "FAULT "}
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@dataclass
class Broken:
    """A demonstration that is about to be broken off, in a home of its own."""

    started: Started
    directory: Path
    outside: tuple[Path, ...]
    before: set[str]
    seat: int = -1

    def reaches(self, moment: str, fault: str) -> None:
        """Wait until the moment has come, with what the fault makes in the kernel in place."""
        self.started.says(MOMENTS[moment])
        self.seat = seat_of(self.started.process.pid)
        assert self.seat >= 0
        if moment != "starting":
            wait_for(
                "a save in shared memory",
                lambda: any(trace.startswith("/dev/shm") for trace in kernel_traces(self.seat)),
            )
        if fault == "link":
            wait_for("the namespaces", lambda: any(trace.startswith("netns") for trace in kernel_traces(self.seat)))

    def ports(self) -> set[int]:
        config = self.directory / "trainwarden.toml"
        return (
            {int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", config.read_text())} if config.exists() else set()
        )

    def assert_nothing_is_left(self) -> None:
        assert not self.started.left()
        assert not with_path(self.directory)
        assert listing(*self.outside) == self.before
        assert not kernel_traces(self.seat)
        for port in self.ports():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))


@pytest.fixture
def broken(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Broken]:
    """Started with the fault that the test names, and a HOME, TMPDIR and working directory that can be looked through."""
    fault = request.node.callspec.params["fault"]
    outside = tuple(tmp_path / name for name in ("home", "tmp", "cwd"))
    for place in outside:
        place.mkdir()
    home, tmp, cwd = outside
    directory = tmp_path / "d"
    command = [sys.executable, "-m", "trainwarden.cli", "demo", "--fault", fault, "--directory", str(directory)]
    started = start(command, tmp_path / "output", cwd, {"HOME": str(home), "TMPDIR": str(tmp)})
    try:
        yield Broken(started, directory, outside, listing(*outside))
    finally:
        started.kill_all()


INTERRUPTS = [
    ("kill", "starting", signal.SIGINT),
    pytest.param("link", "starting", signal.SIGTERM, marks=[pytest.mark.root, ROOT_ONLY]),
    ("slow", "healing", signal.SIGINT),
]
MORE = [
    ("kill", "training", signal.SIGINT),
    ("freeze", "training", signal.SIGTERM),
    ("freeze", "healing", signal.SIGINT),
    ("kill", "healing", signal.SIGTERM),
    pytest.param("link", "healing", signal.SIGINT, marks=[pytest.mark.root, ROOT_ONLY]),
]


@pytest.mark.parametrize(("fault", "moment", "number"), [*INTERRUPTS, *(MORE if SEEDS else ())])
def test_a_demonstration_that_is_interrupted_cleans_up(
    broken: Broken, fault: str, moment: str, number: signal.Signals
) -> None:
    broken.reaches(moment, fault)
    broken.started.signal(number)
    broken.started.signal(number)  # an impatient user
    assert broken.started.ends() == 130, broken.started.text()
    assert "Traceback" not in broken.started.text()
    broken.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("fault", "moment"), [("kill", "training"), *([("freeze", "healing"), ("slow", "healing")] if SEEDS else ())]
)
def test_a_demonstration_that_is_killed_takes_everything_along(broken: Broken, fault: str, moment: str) -> None:
    """The kernel tells its children, and each takes along what it started. (Control groups and namespaces wait for the next one.)"""
    broken.reaches(moment, fault)
    broken.started.signal(signal.SIGKILL)
    broken.started.ends()
    wait_for("everything to end", lambda: not broken.started.left() and not with_path(broken.directory), 60)
    assert listing(*broken.outside) == broken.before
    assert not {trace for trace in kernel_traces(broken.seat) if trace.startswith("/dev/shm")}
