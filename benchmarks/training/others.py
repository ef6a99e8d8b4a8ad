"""The peers, saving the same state: torch.save, torch.distributed.checkpoint's async_save, DLRover's Flash Checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.training.state import Training

DLROVER = "dlrover==0.6.1"
DLROVER_NEEDS = ("grpcio", "protobuf", "psutil")
DLROVER_LIMIT_S = 120
INSTALL_LIMIT_S = 600
DLROVER_SCRIPT = Path(__file__).with_name("dlrover_save.py")


def torch_save_s(training: Training, folder: Path, rounds: int, fsync: bool) -> list[float]:
    """torch.save to a file of its own each time: the training thread waits for all of it."""
    times = []
    for number in range(rounds + 1):
        path = folder / f"{number}.pt"
        started = time.perf_counter()
        with path.open("wb") as file:
            torch.save(training.state(), file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        times.append(time.perf_counter() - started)
        path.unlink()
    return times[1:]


def dcp_async_s(training: Training, folder: Path, rounds: int) -> list[float]:
    """How long async_save (thread, default stager) keeps the training thread; each is let finish before the next."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    times = []
    for number in range(rounds + 2):
        target = folder / f"dcp-{number}"
        started = time.perf_counter()
        future: Any = dcp.async_save(training.state(), checkpoint_id=str(target))  # type: ignore[attr-defined]
        times.append(time.perf_counter() - started)
        future.result()
        shutil.rmtree(target)
    return times[2:]


def dlrover_interpreter(folder: Path) -> tuple[str, str]:
    """An interpreter with DLRover, made new in ``folder`` and borrowing this one's torch; and why there is none."""
    python = folder / "dlrover" / "bin" / "python"
    try:
        _run([sys.executable, "-m", "venv", str(python.parents[1])])
        _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", DLROVER])
        _run([str(python), "-m", "pip", "install", "--quiet", *DLROVER_NEEDS])
        shelf = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
        Path(shelf, "torch_of_the_bench.pth").write_text(sysconfig.get_path("purelib") + "\n")
    except (OSError, subprocess.SubprocessError) as error:
        return "", f"{DLROVER} could not be installed: {error}"
    return str(python), ""


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S).stdout


def dlrover(python: str, state_mb: int, rounds: int) -> dict[str, Any]:
    """Flash Checkpoint to memory, in an interpreter that has it; ``why_not`` instead of times when it does not run."""
    if not python or not Path(python).exists():
        return {"why_not": f"there is no interpreter {python!r} with dlrover"}
    command = [python, str(DLROVER_SCRIPT), "--state-mb", str(state_mb), "--rounds", str(rounds)]
    env = {**os.environ, "PYTHONPATH": str(DLROVER_SCRIPT.parents[2])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DLROVER_LIMIT_S, env=env, check=False)
    except subprocess.TimeoutExpired:
        return {"why_not": f"it did not end within {DLROVER_LIMIT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"memory_s"')]
    if done.returncode or not lines:
        tail = (done.stderr or done.stdout).strip().splitlines()[-1:]
        return {"why_not": f"it ended with code {done.returncode}: {' '.join(tail)[:300]}"}
    return dict(json.loads(lines[-1]))
