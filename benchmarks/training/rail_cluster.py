"""A real job on the stage: rendezvous store, one warden with links and one launcher with one rank on every node."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trainwarden_hook.commands import canonical, sign

from benchmarks.training.rail_stage import Stage

T = TypeVar("T")
SECRET = b"a secret of the benchmark, long enough"
JOB = Path(__file__).with_name("link_job.py")
STORE_PORT, WARDEN_PORT = 29400, 9470


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float = 120.0) -> T:
    """Poll until `look` gives something true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout_s} s in vain for {what}")


class Collectors:
    """Stands for the nodes' collectors: keeps the `link` datagrams with the node they speak of."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hook.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self.events: list[dict[str, Any]] = []
        threading.Thread(target=self._receive, name="collectors", daemon=True).start()

    def _receive(self) -> None:
        while True:
            data = self._socket.recv(65536)
            if not data:
                return
            told = json.loads(data)
            if told["t"] == "link":
                self.events.append(told)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RD)
        self._socket.close()


class StepRows:
    """What the ranks wrote: when each step ended."""

    def __init__(self, rows: Path, stage: Stage) -> None:
        self.rows, self.stage = rows, stage

    def steps(self, number: int) -> list[int]:
        """When each step of a node's rank ended, nanoseconds of the wall clock."""
        path = Path(f"{self.rows}.{self.stage.names[number]}")
        if not path.exists():
            return []
        lines = path.read_text(encoding="ascii").splitlines(keepends=True)
        return [int(line.split()[1]) for line in lines if line.endswith("\n") and not line.startswith("#")]

    def pids(self) -> list[list[int]]:
        """Worker processes so far, per node: more than one means a restart."""
        found = []
        for name in self.stage.names:
            path = Path(f"{self.rows}.{name}")
            lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
            found.append([int(line.split()[2]) for line in lines if line.startswith("# pid")])
        return found

    def wait_steps(self, count: int, timeout_s: float = 120.0) -> None:
        """Until every rank has made so many more steps."""
        goals = [len(self.steps(number)) + count for number in range(len(self.stage.names))]
        wait_for(
            f"{count} more steps",
            lambda: all(len(self.steps(number)) >= goal for number, goal in enumerate(goals)),
            timeout_s,
        )

    def gap_ms(self, since_ns: int, until_ns: int) -> float:
        """Longest time between two steps of any rank within the window; an interval that reaches into it counts whole."""
        longest = 0
        for number in range(len(self.stage.names)):
            ends = self.steps(number)
            pairs = zip(ends, [*ends[1:], until_ns], strict=True)
            longest = max([longest, *(b - a for a, b in pairs if b > since_ns and a < until_ns)])
        return longest / 1e6


class RailCluster(StepRows):
    """The job; use as a context manager.

    Parameters
    ----------
    links
        Settings of the links file.
    program
        What the wardens keep running instead of launchers; then there is no store and no rank either.
    """

    def __init__(self, root: Path, stage: Stage, links: dict[str, object], program: tuple[str, ...] = ()) -> None:
        super().__init__(root / "rows", stage)
        self.root, self.links, self._program = root, links, program
        self.job = f"rails{uuid.uuid4().hex[:6]}"
        self.wardens: list[subprocess.Popen[bytes]] = []
        self._others: list[subprocess.Popen[bytes]] = []
        root.mkdir(parents=True, exist_ok=True)
        (root / "secret").write_bytes(SECRET)
        self.collectors = Collectors(root)

    def __enter__(self) -> RailCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        store = [
            sys.executable,
            "-m",
            "trainwarden_hook.rendezvous",
            "--listen",
            f"{self.stage.address(0)}:{STORE_PORT}",
        ]
        if not self._program:
            self._others.append(self._spawn(0, store, "store"))
        self.stage.links_file(self.root / "links.toml", **self.links)
        for number in range(len(self.stage.names)):
            self.start_warden(number)

    def start_warden(self, number: int) -> None:
        name = self.stage.names[number]
        home = self.root / name
        home.mkdir(exist_ok=True)
        python = [sys.executable, "-m"]
        warden = [
            *python, "trainwarden_hook.warden", "--node", name, "--job", self.job,
            "--listen", f"{self.stage.address(number)}:{WARDEN_PORT}",
            "--secret-file", str(self.root / "secret"), "--state-dir", str(home / "state"), "--run-dir", str(home / "run"),
            "--links", str(self.root / "links.toml"),
        ]  # fmt: skip
        count = len(self.stage.names)
        launcher = [
            *python, "trainwarden_hook.launcher", "--nnodes", f"{count}:{count}", "--nproc-per-node", "1", "--rdzv-endpoint",
            f"{self.stage.address(0)}:{STORE_PORT}", "--local-addr", self.stage.address(number), str(JOB), "--rows", str(self.rows),
        ]  # fmt: skip
        made = self._spawn(number, [*warden, "--", *(self._program or launcher)], f"{name}/warden")
        self.wardens[number : number + 1] = [made]

    def _spawn(self, number: int, command: list[str], log: str) -> subprocess.Popen[bytes]:
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lb0", "TRAINWARDEN_SOCKET": str(self.collectors.path),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])),
        }  # fmt: skip
        out = (self.root / f"{log}.log").open("ab")
        return subprocess.Popen(self.stage.enter(number, command), env=env, stdout=out, stderr=out)

    def command(self, number: int, verb: str, args: dict[str, Any], **over: Any) -> tuple[int, dict[str, Any]]:
        now = time.time_ns()
        body = canonical({
            "id": uuid.uuid4().hex, "verb": verb, "node": self.stage.names[number], "job": self.job, "fence": 1, "issued_at_ns": now,
            "expires_at_ns": now + 20_000_000_000, "nonce": uuid.uuid4().hex[:16], "args": args, **over,
        })  # fmt: skip
        return self._http(number, "POST", "/v1/command", body, {"X-Trainwarden-Signature": sign(SECRET, body)})

    def status(self, number: int) -> dict[str, Any]:
        return self._http(number, "GET", "/v1/status", None, {})[1]

    def _http(
        self, number: int, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, Any]:
        def ask() -> tuple[int, Any]:
            connection = http.client.HTTPConnection(self.stage.address(number), WARDEN_PORT, timeout=20)
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

        return self.stage.inside(number, ask)

    def close(self) -> None:
        """Stop all of ours; whatever does not stop ends with the stage."""
        for process in [*self.wardens, *self._others]:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in [*self.wardens, *self._others]:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        self.collectors.close()
