"""The peers, saving the same state: torch.save, torch.distributed.checkpoint's async_save, DLRover's Flash Checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.training import peers
from benchmarks.training.state import Training

DLROVER_LIMIT_S = 120
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


def dlrover(python: str, place: Path, state_mb: int, rounds: int) -> dict[str, Any]:
    """Flash Checkpoint to memory, in an interpreter that has it; ``why_not`` instead of times when it does not run, twice."""
    found = _dlrover_once(python, place, state_mb, rounds)
    # on a loaded machine its engine may look for its saver before that is there
    return found if "memory_s" in found else _dlrover_once(python, place, state_mb, rounds)


def _dlrover_once(python: str, place: Path, state_mb: int, rounds: int) -> dict[str, Any]:
    if not python or not Path(python).exists():
        return {"why_not": f"there is no interpreter {python!r} with dlrover"}
    job = f"bench{uuid.uuid4().hex[:6]}"
    command = [python, str(DLROVER_SCRIPT), "--state-mb", str(state_mb), "--rounds", str(rounds)]
    env = {**os.environ, **peers.environment(), "ELASTIC_JOB_NAME": job, "TORCHELASTIC_RUN_ID": job}
    told = place / "dlrover.log"
    with told.open("w") as log:
        # Its saver is a child that outlives it and would keep a pipe open: a file, and the end of the whole session.
        started = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            code = started.wait(DLROVER_LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"why_not": f"it did not end within {DLROVER_LIMIT_S} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            _remove_shared_memory(job)
    text = told.read_text(errors="replace").splitlines()
    lines = [line for line in text if line.startswith('{"memory_s"')]
    if code or not lines:
        return {"why_not": f"it ended with code {code}: {' '.join(text[-1:])[:300]}"}
    return dict(json.loads(lines[-1]))


def _remove_shared_memory(job: str) -> None:
    """What its saver leaves in /dev/shm, as large as the state."""
    for path in Path("/dev/shm").glob(f"{job}_*"):
        path.unlink(missing_ok=True)
