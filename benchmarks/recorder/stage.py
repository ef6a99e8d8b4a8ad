"""Four nodes of one machine: a network namespace, cgroups (version 1), a small file system for checkpoints and a torchrun for each.

Names begin with `PREFIX`; what a killed run left is removed at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.training.rail_stage import run_ip

PREFIX, SWITCH, NODES = "twr-", "twr-switch", 4
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "cpuacct", "blkio", "freezer", "memory")
CONTROLLER_ADDRESS = "10.79.0.1"
SAVES_MIB = 24
PORT, CLOSED_PORT = 29471, 9
LOCK = Path("/tmp/trainwarden-recorder.lock")


class StageError(RuntimeError):
    """This machine lacks something that a recording needs."""


def require() -> None:
    """Raise `StageError`, in one sentence, when no recording can be made here."""
    if os.geteuid():
        raise StageError("recording needs root (namespaces, cgroups): run it as root")
    if missing := [name for name in ("ip", "tc", "iptables") if shutil.which(name) is None]:
        raise StageError(f"{missing[0]} is not installed: install iproute2 and iptables")
    if lacking := [name for name in CONTROLLERS if not (CGROUPS / name).is_dir()]:
        raise StageError(f"no cgroup controller {lacking[0]!r} below {CGROUPS}: version 1 has to be mounted there")


def run(*words: str, check: bool = True) -> None:
    """Run a program; raises with what it said."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if check and done.returncode:
        raise StageError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def environment() -> dict[str, str]:
    """Ours, with the modules that we found."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


class Node:
    """One node of the stage."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.space, self.group = number, f"{PREFIX}n{number}", f"{PREFIX}n{number}"
        self.address, self.port = f"10.79.0.{10 + number}", f"p{number}"
        self.folder = folder / f"n{number}"
        self.saves, self.data = self.folder / "saves", self.folder / "data.bin"
        self.launcher: subprocess.Popen[bytes] | None = None
        self.holder: subprocess.Popen[bytes] | None = None

    def build(self) -> None:
        run_ip("netns", "add", self.space)
        run_ip("-n", self.space, "link", "set", "lo", "up")
        run_ip("link", "add", self.port, "netns", SWITCH, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        run_ip("-n", SWITCH, "link", "set", self.port, "master", "br0", "up")
        run_ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        run_ip("-n", self.space, "link", "set", "eth0", "up")
        for controller in CONTROLLERS:
            (CGROUPS / controller / self.group).mkdir(exist_ok=True)
        self.saves.mkdir(parents=True)
        run("mount", "-t", "tmpfs", "-o", f"size={SAVES_MIB}m", "tmpfs", str(self.saves))
        self.holder = subprocess.Popen(["ip", "netns", "exec", self.space, "sleep", "infinity"])

    def set(self, controller: str, name: str, value: str) -> None:
        """Write one of the node's cgroup files."""
        (CGROUPS / controller / self.group / name).write_text(value)

    def read(self, controller: str, name: str) -> str:
        """One of the node's cgroup files."""
        return (CGROUPS / controller / self.group / name).read_text()

    def command(self, *words: str) -> list[str]:
        """Words, run inside the node's namespace."""
        return ["ip", "netns", "exec", self.space, *words]

    def start(self, words: list[str]) -> subprocess.Popen[bytes]:
        """Start a program on the node."""
        env = environment() | {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        # the store that torchrun shares by default outlives an attempt: whoever starts first in the next one reads addresses of the dead
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        joined = "".join(f"echo $$ > {CGROUPS / controller / self.group}/tasks; " for controller in CONTROLLERS)
        command = ["sh", "-c", f'{joined}exec "$@"', "sh", *self.command(*words)]
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def launch(self, out: Path, name: str, seed: int) -> None:
        """Start this node's torchrun."""
        trainer = str(Path(__file__).with_name("trainer.py"))
        options = {"nnodes": NODES, "nproc-per-node": 1, "max-restarts": 6, "local-addr": self.address, "rdzv-backend": "c10d",
                   "rdzv-id": name, "rdzv-endpoint": f"10.79.0.10:{PORT}", "rdzv-conf": f"is_host={int(self.number == 0)}"}  # fmt: skip
        words = [f"--{option}={value}" for option, value in options.items()]
        work = [trainer, str(out), str(self.data), str(self.saves), name, str(self.number), str(seed)]
        self.launcher = self.start([sys.executable, "-m", "torch.distributed.run", *words, *work])


class Stage:
    """All nodes and the switch between them; the switch's namespace is where the central prober sits."""

    def __init__(self, folder: Path) -> None:
        require()
        self.folder = folder
        self.nodes = [Node(number, folder) for number in range(NODES)]
        self._lock = LOCK.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StageError(
                f"another recorder is at work on this machine (it holds {LOCK}): wait for its end"
            ) from None
        remove_all(folder)
        try:
            run_ip("netns", "add", SWITCH)
            run_ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
            run_ip("-n", SWITCH, "addr", "add", f"{CONTROLLER_ADDRESS}/24", "dev", "br0")
            run_ip("-n", SWITCH, "link", "set", "br0", "up")
            for node in self.nodes:
                node.build()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove everything."""
        for node in self.nodes:
            if node.holder is not None:
                node.holder.kill()
                node.holder.wait()
        remove_all(self.folder)
        for node in self.nodes:
            if node.launcher is not None:
                node.launcher.wait()
        self._lock.close()


def remove_all(folder: Path) -> None:
    """Kill what is in our cgroups, and remove namespaces, groups and mounts of ours."""
    deadline_s = time.monotonic() + 10
    groups = [path for controller in CONTROLLERS for path in (CGROUPS / controller).glob(f"{PREFIX}n*")]
    for path in groups:
        with contextlib.suppress(OSError):
            (path / "freezer.state").write_text("THAWED") if path.parent.name == "freezer" else None
    while pids := {pid for path in groups if path.parent.name == "cpu" for pid in (path / "tasks").read_text().split()}:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline_s:
            raise StageError(f"processes {sorted(pids)} in {PREFIX}* do not end")
        time.sleep(0.05)
    for path in groups:
        with contextlib.suppress(OSError):
            path.rmdir()
    for path in Path("/run/netns").glob(f"{PREFIX}*"):
        run("ip", "netns", "del", path.name, check=False)
    for path in folder.glob("n*/saves"):
        run("umount", "-l", str(path), check=False)
