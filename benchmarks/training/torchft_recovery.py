"""kill -9 of one of four ranks under torchft: how long the survivors stand, and when the dead one is back."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plain_torchrun import NODES, WARM_STEPS, Steps
from benchmarks.training import peers
from trainwarden.demo.data import write_held_out, write_shard
from trainwarden.demo.processes import Children
from trainwarden.embedded.ports import free_port

LIGHTHOUSE = ("--min_replicas", "2", "--join_timeout_ms", "2000", "--heartbeat_timeout_ms", "2000")
SCRIPT = Path(__file__).with_name("torchft_job.py")
START_LIMIT_S, LIMIT_S = 180.0, 60.0


def start(directory: Path, children: Children, python: str) -> None:
    """A lighthouse and one torchrun a node."""
    port = free_port()
    lighthouse = str(Path(python).with_name("torchft_lighthouse"))
    children.start("lighthouse", [lighthouse, *LIGHTHOUSE, "--bind", f"127.0.0.1:{port}"])
    for number in range(NODES):
        home = directory / f"n{number}"
        home.mkdir()
        write_shard(home / "shard.bin")
        write_held_out(home / "held_out.bin")
        command = [
            python, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "10", "--monitor-interval",
            "0.1", "--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), str(SCRIPT),
            "--data", str(home / "shard.bin"), "--held-out", str(home / "held_out.bin"),
        ]  # fmt: skip
        children.start(
            f"torchft-{number}", command, TRAINWARDEN_SOCKET=str(directory / "steps.sock"), TORCHFT_REPLICA=str(number),
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}", GLOO_SOCKET_IFNAME="lo", **peers.environment(),
        )  # fmt: skip


def kill_one(
    python: str, killed: int, begin: Callable[[Path, Children, str], None] = start, comes_back: bool = True
) -> dict[str, Any]:
    """One trial, seconds from the signal: to a step of all survivors without the dead one, and to one of all four."""
    with tempfile.TemporaryDirectory(prefix="tw-torchft-") as name:
        directory = Path(name)
        steps = Steps(directory / "steps.sock")
        children = Children(directory / "logs", {"OMP_NUM_THREADS": "1"})
        try:
            begin(directory, children, python)
            before = steps.wait(
                lambda seen: (
                    len(seen) == NODES
                    and all(row["step"] >= WARM_STEPS and row["world"] == NODES for row in seen.values())
                ),
                START_LIMIT_S,
            )
            dead = before[killed]["pid"]
            at = time.monotonic()
            os.kill(dead, signal.SIGKILL)
            alone = {rank: row for rank, row in before.items() if rank != killed}
            steps.wait(
                lambda seen: (
                    len(rows := [seen[rank] for rank in alone if rank in seen]) == len(alone)
                    and all(row["world"] < NODES for row in rows)
                ),
                LIMIT_S,
            )
            survivors_s = time.monotonic() - at
            if not comes_back:
                return {"resume_s": survivors_s}
            steps.wait(lambda seen: killed in seen and seen[killed]["pid"] != dead, LIMIT_S)
            return {"resume_s": survivors_s, "back_s": time.monotonic() - at, "steps_lost": 0}
        finally:
            children.stop_all()
