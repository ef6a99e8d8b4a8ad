"""What the ranks of this node were started with: a few variables of their environment, their arguments, their pod.

Reading ``/proc/<pid>/environ`` waits for the memory lock of the process, which one that is stuck in a driver may never give back: a thread
that nobody waits for reads it, once per process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from collectors.files import Files
from collectors.ranks import RankState
from collectors.topology.background import Answer, read_text
from collectors.topology.kubernetes import pod_of_cgroup
from collectors.topology.launch import variables_wanted
from trainwarden.clock import Clock

MAX_ENVIRONMENT = 4 * 1024 * 1024
MAX_ARGUMENTS = 4096
EVERY_S = 2.0
TRIES = 3

OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID",
       "TORCHELASTIC_RESTART_COUNT", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES",
       "NVIDIA_VISIBLE_DEVICES", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "JOB_COMPLETION_INDEX", "HOSTNAME", "POD_NAME", "POD_NAMESPACE",
       "POD_UID")  # fmt: skip
SLURM_SECRETS = ("JWT", "KEY", "TOKEN", "PASS")
"""Slurm's own variables are kept by prefix, but for these."""


@dataclass(frozen=True)
class Launch:
    """How one rank's process was started. Nothing of its environment is kept but known names: the rest may hold secrets."""

    environment: dict[str, str]
    argv: tuple[str, ...] = ()
    pod_uid: str = ""


class Processes:
    """Launches of ranks by pid, read in the background."""

    def __init__(self) -> None:
        self._known: dict[int, Launch] = {}
        self._failed: dict[int, int] = {}
        self._wanted: tuple[int, ...] = ()
        self._answer: Answer[int] | None = None

    def of(self, pid: int) -> Launch | None:
        """What is known of a process; None before it was read, and for one that could not be."""
        return self._known.get(pid)

    def want(self, states: Iterable[RankState], files: Files, clock: Clock) -> Answer[int]:
        """Read the processes of `states` that are not known yet, at once or within two seconds; forget those that are gone."""
        pids = tuple(sorted({state.pid for state in states if state.pid > 0}))
        if self._answer is None:
            root = files.root
            self._answer = Answer("launches", clock, EVERY_S, lambda: self._read(root))
        if pids != self._wanted:
            self._wanted = pids
            self._known = {pid: launch for pid, launch in self._known.items() if pid in pids}
            self._failed = {pid: count for pid, count in self._failed.items() if pid in pids}
        if self._left():
            self._answer.refresh()
        return self._answer

    def _left(self) -> list[int]:
        return [pid for pid in self._wanted if pid not in self._known and self._failed.get(pid, 0) < TRIES]

    def _read(self, root: str) -> int:
        problem: OSError | None = None
        for pid in self._left():
            try:
                self._known = {**self._known, pid: read_launch(root, pid)}
            except OSError as error:
                self._failed[pid] = self._failed.get(pid, 0) + 1
                problem = error
        if problem is not None and not isinstance(problem, FileNotFoundError | ProcessLookupError):
            raise problem
        return len(self._known)


def read_launch(root: str, pid: int) -> Launch:
    """Read one process now; raises `OSError`."""
    folder = f"{root}/proc/{pid}"
    environment = parse_environment(_head(f"{folder}/environ"))
    argv = tuple(part.decode("utf-8", "replace") for part in _head(f"{folder}/cmdline").split(b"\0")[:MAX_ARGUMENTS])
    try:
        pod = pod_of_cgroup(read_text(f"{folder}/cgroup", 65536))
    except (OSError, ValueError):
        pod = ""
    return Launch(environment, argv, pod or environment.get("POD_UID", ""))


def parse_environment(data: bytes) -> dict[str, str]:
    """The variables that matter out of ``/proc/<pid>/environ``.

    Examples
    --------
    >>> parse_environment(b"RANK=3\\0AWS_SECRET=x\\0SLURM_JOB_ID=7\\0SLURM_JWT=y\\0")
    {'RANK': '3', 'SLURM_JOB_ID': '7'}
    """
    wanted = variables_wanted() | set(OWN)
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, _, value = entry.partition(b"=")
        key = name.decode("ascii", "replace")
        slurm = key.startswith(("SLURM_", "SLURMD_")) and not any(word in key for word in SLURM_SECRETS)
        if key in wanted or slurm:
            found[key] = value.decode("utf-8", "replace")
    return found


def device_of(launch: Launch, local_rank: int, gpus: int) -> str:
    """Device name of a rank (``gpu3``) on a node with `gpus` accelerators; empty when it is not clear.

    A process that sees one device uses it; one that sees several takes that of its local rank. UUIDs are not resolved here. In a pod
    the numbers are the pod's own, so they say something only where the pod sees the whole node.
    """
    visible = next((launch.environment[key] for key in OWN[8:12] if key in launch.environment), "")
    numbers = [part.strip() for part in visible.split(",") if part.strip()]
    if not numbers:
        numbers = [str(i) for i in range(gpus)]
    local = local_rank if local_rank >= 0 else _number(launch.environment.get("LOCAL_RANK", ""))
    chosen = numbers[0] if len(numbers) == 1 and visible else numbers[local] if 0 <= local < len(numbers) else ""
    return f"gpu{chosen}" if chosen.isdecimal() and int(chosen) < gpus else ""


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 8 else -1


def _head(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        return file.read(MAX_ENVIRONMENT)
