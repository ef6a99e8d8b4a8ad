"""A small job of several nodes on this machine, for the tests: store, wardens, launchers, commands."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trainwarden_hook.commands import canonical, sign

SECRET = b"a secret of the tests, long enough"
JOBS = Path(__file__).parent / "jobs"
ANSWER_S = 60.0
"""A failure, not an expectation: an answer that comes late on a starved machine is still one."""
T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float = 180.0) -> T:
    """Poll until ``look`` gives something true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {timeout_s} s in vain for {what}")


def module(name: str) -> list[str]:
    return [sys.executable, "-m", f"trainwarden_hook.{name}"]


def children_of(job: str) -> list[int]:
    """Processes whose environment names this job."""
    mark = f"TRAINWARDEN_TEST_JOB={job}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if mark in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
            except OSError:
                continue
    return found


class Cluster:
    """Nodes n0, n1, ... with one warden each."""

    def __init__(
        self, root: Path, nodes: int, script_args: list[str], flags: list[str], script: str = "tiny.py"
    ) -> None:
        self.root = root
        self.job = f"t{uuid.uuid4().hex[:8]}"
        self.names = [f"n{number}" for number in range(nodes)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}
        self.fence = 1
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "TRAINWARDEN_TEST_JOB": self.job}
        (root / "secret").write_bytes(SECRET)
        self._flags = flags
        self._script = [str(JOBS / script), *script_args]
        self.endpoint = self._start_store()

    def _start_store(self) -> str:
        log = self.root / "store.log"
        self.processes["store"] = subprocess.Popen(
            [*module("rendezvous"), "--listen", "127.0.0.1:0"],
            env=self.env,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        line = wait_for("the store", lambda: log.read_text() if "rendezvous store on" in log.read_text() else None)
        return line.split()[-1]

    def launcher(self, node: str) -> list[str]:
        return [
            *module("launcher"),
            "--rdzv-endpoint",
            self.endpoint,
            "--local-addr",
            "127.0.0.1",
            "--checkpoint-dir",
            str(self.root / node / "checkpoints"),
            *self._flags,
            *self._script,
        ]

    def start_warden(self, node: str) -> None:
        folder = self.root / node
        folder.mkdir(exist_ok=True)
        log = (folder / "warden.log").open("ab")
        earlier = self._served(folder)
        self.processes[node] = subprocess.Popen(
            [
                *module("warden"),
                "--node",
                node,
                "--job",
                self.job,
                "--listen",
                f"127.0.0.1:{self.ports.get(node, 0)}",
                "--secret-file",
                str(self.root / "secret"),
                "--state-dir",
                str(folder / "state"),
                "--run-dir",
                str(folder / "run"),
                "--",
                *self.launcher(node),
            ],
            env=self.env,
            stdout=log,
            stderr=log,
        )
        self.ports[node] = wait_for(f"the warden of {node}", lambda: self._served(folder)[len(earlier) :])[0]

    @staticmethod
    def _served(folder: Path) -> list[int]:
        """Ports of this and earlier wardens of the node."""
        lines = (folder / "warden.log").read_text().splitlines()
        return [int(line.rpartition(":")[2]) for line in lines if "serves on" in line]

    def start_launcher(self, node: str, *more: str) -> None:
        """A launcher without a warden."""
        folder = self.root / node
        folder.mkdir(exist_ok=True)
        log = (folder / "launcher.log").open("ab")
        argv = self.launcher(node)
        own = ["--node", node, "--job", self.job, "--run-dir", str(folder / "run"), *more]
        self.processes[node] = subprocess.Popen([*argv[:3], *own, *argv[3:]], env=self.env, stdout=log, stderr=log)

    def status(self, node: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[node], timeout=ANSWER_S)
        connection.request("GET", "/v1/status")
        return dict(json.loads(connection.getresponse().read()))

    def command(self, node: str, verb: str, args: dict[str, Any], **over: Any) -> tuple[int, dict[str, Any]]:
        now = time.time_ns()
        body = canonical(
            {
                "id": uuid.uuid4().hex,
                "verb": verb,
                "node": node,
                "job": self.job,
                "fence": self.fence,
                "issued_at_ns": now,
                "expires_at_ns": now + int(ANSWER_S * 1e9),
                "nonce": uuid.uuid4().hex[:16],
                "args": args,
                **over,
            }
        )
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[node], timeout=ANSWER_S)
        connection.request("POST", "/v1/command", body, {"X-Trainwarden-Signature": sign(SECRET, body)})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def order(self, generation: int, members: list[str], **more: Any) -> dict[str, dict[str, Any]]:
        """A world order to every node that has a warden."""
        args = {"generation": generation, "members": members, "rendezvous_id": f"{self.job}.{generation}", **more}
        return {node: self.command(node, "world", args)[1] for node in self.ports}

    def rows(self) -> list[dict[str, Any]]:
        """What the ranks wrote, by time, each with its node."""
        found: list[dict[str, Any]] = []
        for path in self.root.glob("rows.*"):
            for line in path.read_text().splitlines():
                # of a row that is being written, or whose writer was killed in it, only a part may be there
                with contextlib.suppress(json.JSONDecodeError):
                    found.append({**json.loads(line), "node": path.suffix[1:]})
        return sorted(found, key=lambda row: float(row["at"]))

    def rows_of(self, generation: int) -> list[dict[str, Any]]:
        return [row for row in self.rows() if row["generation"] == generation]

    def wait_rows(self, generation: int, step: int, world: int, timeout_s: float = 180.0) -> list[dict[str, Any]]:
        """Wait until all ranks of a generation have passed ``step``."""

        def look() -> list[dict[str, Any]] | None:
            rows = self.rows_of(generation)
            passed = {row["rank"] for row in rows if row["step"] >= step and row["world"] == world}
            return rows if len(passed) == world else None

        return wait_for(f"step {step} of generation {generation} on {world} ranks", look, timeout_s)

    def pid_of(self, rank: int, generation: int) -> int:
        return int([row for row in self.rows_of(generation) if row["rank"] == rank][-1]["pid"])

    def pid_on(self, node: str, generation: int) -> int:
        """The process of a node with one rank; a first meeting deals the ranks by process id, which is in no order of the nodes."""
        return next(int(row["pid"]) for row in self.rows_of(generation) if row["node"] == node)

    def close(self) -> None:
        """SIGTERM to all of ours, then SIGKILL to whatever is left."""
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in children_of(self.job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def leftovers(self) -> list[str]:
        """Processes and segments that should be gone."""
        segments = [name for name in os.listdir("/dev/shm") if f"trainwarden-{self.job}-" in name]
        return segments + [f"process {pid}" for pid in children_of(self.job)]
