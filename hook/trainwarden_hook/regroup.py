"""Recovery inside the process: when a peer dies the survivors keep theirs, meet again, and give the newcomer their state.

A survivor is thrown out of its collective, aborts the process group (so that those who still wait in it are thrown out as well),
keeps its state in memory as every broken step does, and asks its launcher where to meet. All launchers of the job meet, start what
is missing and answer; the survivors then join the new group and go through what a fresh process goes through after
``init_process_group``: the constructor of DDP and the agreement on the newest state. Between that and `attach` a script for
this may hold no collective of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trainwarden_hook.environment import Environment
from trainwarden_hook.group_sockets import GroupSockets

if TYPE_CHECKING:
    from trainwarden_hook.job import Job

log = logging.getLogger("trainwarden.hook")
ABORT_LIMIT_S = 2.0
SWITCH = "TRAINWARDEN_IN_PROCESS"
REGROUP_LIMIT_S = 10.0
"""Longest wait for the live ranks of a node to ask, and again for the nodes to meet; else the world is restarted in place."""
KEPT_ARGUMENTS = (
    "device_ids", "output_device", "dim", "broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph",
)  # fmt: skip


class Regroup:
    """Of one job that loops by `Job.steps`.

    Parameters
    ----------
    rejoin
        What a fresh process does between the new group and its first step; sets the job's ``start_step``.
    """

    def __init__(self, job: Job, rejoin: Callable[[], None]) -> None:
        self._job = job
        self._rejoin = rejoin
        self._backend = ""
        self._sockets = GroupSockets()
        self._sockets.take()
        self.count = 0

    def leave(self) -> None:
        """Abort the broken group, which wakes everybody who still waits in it."""
        import torch.distributed as dist

        if not dist.is_initialized():
            return
        self._backend = dist.get_backend()
        if "gloo" in self._backend:
            self._sockets.shut()
        group: Any = dist.group.WORLD
        done = threading.Event()

        def abort() -> None:
            try:
                group.abort()
            except Exception:
                log.exception("the process group could not be aborted; its time-out ends it")
            done.set()

        threading.Thread(target=abort, name="trainwarden-abort", daemon=True).start()
        if not done.wait(ABORT_LIMIT_S):
            log.warning("the process group is still not aborted after %g s", ABORT_LIMIT_S)

    def attempt(self, step: int, error: BaseException) -> bool:
        """Whether this process goes on in a new world; ``False``: it has to end, as without all this."""
        began = time.monotonic()
        log.warning("step %d broke off (%s: %s); asking where to meet again", step, type(error).__name__, _first(error))
        answer = self._job.mailbox.ask({"regroup": {"step": step}}, self._job.environment.pg_timeout_s)
        environment = (answer or {}).get("environment")
        if not environment:
            log.warning("the launcher has no new world for this process: %s", (answer or {}).get("why", "no answer"))
            return False
        try:
            self._join(dict(environment))
        except Exception:
            log.exception("the new world did not come together; this process ends")
            return False
        self.count += 1
        log.info("goes on at step %d, %.2f s after the failure", self._job.start_step, time.monotonic() - began)
        return True

    def _join(self, environment: dict[str, str]) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
        os.environ.update(environment)
        self._job.renew(Environment.read())
        dist.init_process_group(self._backend, timeout=timedelta(seconds=self._job.environment.pg_timeout_s))
        self._rejoin()
        self._sockets.take()


def rebuild(model: Any) -> None:
    """Let a ``DistributedDataParallel`` start anew over the present default group, by the collectives of its constructor."""
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"only DistributedDataParallel can join a new world in its process, not {type(model).__name__}")
    kept = {name: getattr(model, name) for name in KEPT_ARGUMENTS}
    if not getattr(model, "bucket_bytes_cap_default", True):
        kept["bucket_cap_mb"] = model.bucket_bytes_cap / 2**20
    module = model.module
    for parameter in module.parameters():
        # it may be a view of a bucket of the broken group
        parameter.grad = None
    DistributedDataParallel.__init__(model, module, **kept)


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:160]
