"""kill -9 of one of four ranks under nvidia-resiliency-ext, in the process: how long the survivors stand. The dead one stays away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plain_torchrun import NODES
from benchmarks.training import peers, torchft_recovery
from trainwarden.demo.data import write_held_out, write_shard
from trainwarden.demo.processes import Children
from trainwarden.embedded.ports import free_port

SCRIPT = Path(__file__).with_name("nvrx_job.py")


def start(directory: Path, children: Children, python: str) -> None:
    """One process a node."""
    port, store_port = free_port(), free_port()
    for number in range(NODES):
        home = directory / f"n{number}"
        home.mkdir()
        write_shard(home / "shard.bin")
        write_held_out(home / "held_out.bin")
        command = [python, str(SCRIPT), "--data", str(home / "shard.bin"), "--held-out", str(home / "held_out.bin")]
        children.start(
            f"nvrx-{number}", command, TRAINWARDEN_SOCKET=str(directory / "steps.sock"), RANK=str(number), WORLD_SIZE=str(NODES),
            LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NVRX_STORE_PORT=str(store_port), GLOO_SOCKET_IFNAME="lo",
            **peers.environment(),
        )  # fmt: skip


def kill_one(python: str, killed: int) -> dict[str, Any]:
    """One trial, seconds from the signal to a step of all survivors."""
    return torchft_recovery.kill_one(python, killed, start, comes_back=False)
