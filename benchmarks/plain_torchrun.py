"""How long the demonstration's job stands after a fault when nobody but torchrun looks after it.

Runs the same script on the same four nodes with plain `torchrun` (elastic, c10d rendezvous in a process of its own, settings as a careful
user would have them), kills or stops one rank, and measures from the fault to the first step of the restarted job on all ranks.

    python -m benchmarks.plain_torchrun --write trainwarden/demo/plain_torchrun.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from trainwarden_hook.segments import unlink_all

from trainwarden.demo.cluster import SCRIPT
from trainwarden.demo.data import write_held_out, write_shard
from trainwarden.demo.processes import Children
from trainwarden.embedded.ports import free_port

NODES = 4
WARM_STEPS = 60
RENDEZVOUS = "join_timeout=120,last_call_timeout=3,is_host=false"


class Steps:
    """Hears the hook's datagrams of all ranks on one socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(0.2)

    def wait(self, enough: Callable[[dict[int, dict[str, Any]]], bool], limit_s: float) -> dict[int, dict[str, Any]]:
        """Newest step of each rank once `enough` of it is there."""
        newest: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                message = json.loads(self._socket.recv(65536))
            except TimeoutError:
                continue
            if message.get("t") == "step":
                newest[message["rank"]] = message
            if enough(newest):
                return newest
        raise TimeoutError(f"after {limit_s} s only {newest}")


def start(directory: Path, children: Children, group_timeout_s: float) -> None:
    """Start the store and one torchrun a node."""
    port = free_port()
    children.start(
        "rendezvous", [str(Path(sys.executable).with_name("trainwarden-rendezvous")), "--listen", f"127.0.0.1:{port}"]
    )
    for number in range(NODES):
        home = directory / f"n{number}"
        home.mkdir()
        write_shard(home / "shard.bin")
        write_held_out(home / "held_out.bin")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", f"2:{NODES}", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "plain", "--rdzv-conf", RENDEZVOUS, "--local-addr", "127.0.0.1",
            "--max-restarts", "5", "--monitor-interval", "0.1", str(SCRIPT), "--data", str(home / "shard.bin"),
            "--held-out", str(home / "held_out.bin"), "--group-timeout-s", str(group_timeout_s),
        ]  # fmt: skip
        children.start(
            f"torchrun-{number}", command, TRAINWARDEN_SOCKET=str(directory / "steps.sock"), TRAINWARDEN_NODE=f"n{number}",
            TRAINWARDEN_JOB="plain", TRAINWARDEN_CHECKPOINT_DIR=str(home / "checkpoints"), TRAINWARDEN_RUN_DIR=str(home / "run"),
            GLOO_SOCKET_IFNAME="lo", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )  # fmt: skip


def measure(fault: signal.Signals, group_timeout_s: float) -> float:
    """Seconds from the signal to the first step of the restarted job on every rank."""
    with tempfile.TemporaryDirectory(prefix="tw-plain-") as name:
        directory = Path(name)
        steps = Steps(directory / "steps.sock")
        children = Children(directory / "logs", {"OMP_NUM_THREADS": "1"})
        try:
            start(directory, children, group_timeout_s)
            before = steps.wait(
                lambda seen: len(seen) == NODES and min(s["step"] for s in seen.values()) >= WARM_STEPS, 180
            )
            pids = {message["pid"] for message in before.values()}
            at = time.monotonic()
            os.kill(before[2]["pid"], fault)
            steps.wait(lambda seen: len({s["pid"] for s in seen.values()} - pids) == NODES, 400)
            return time.monotonic() - at
        finally:
            children.stop_all()
            for number in range(NODES):
                unlink_all("plain", f"n{number}")  # no launcher of ours owned the shared memory


def main() -> None:
    """Measure kill and freeze, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group-timeout-s", type=float, default=30.0)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {
        "measured_on": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }
    for fault, number, timeout_s in (
        ("kill", signal.SIGKILL, 1800.0),
        ("freeze", signal.SIGSTOP, args.group_timeout_s),
    ):
        found[fault] = {"resume_s": round(measure(number, timeout_s), 1), "group_timeout_s": timeout_s}
        print(fault, found[fault], flush=True)
    if args.write:
        args.write.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
