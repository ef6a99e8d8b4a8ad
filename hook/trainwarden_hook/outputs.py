"""Where a worker's output goes: files, the console, or nowhere."""

from __future__ import annotations

import os

from trainwarden_hook.options import Options
from trainwarden_hook.torchrun_flags import ERR, OUT
from trainwarden_hook.workers import Worker

NOWHERE = "/dev/null"


def paths_of(options: Options, worker: Worker) -> tuple[str, str]:
    """Files for stdout and stderr; empty for the launcher's own.

    With a run directory everything goes to files there unless ``--redirects`` says otherwise; without one, only what
    ``--redirects`` names goes to ``--log-dir``. ``--local-ranks-filter`` keeps other ranks off the console.
    """
    root = options.log_dir or (os.path.join(options.run_dir, "logs") if options.run_dir else "")
    usual = OUT | ERR if options.run_dir and not options.redirects else 0
    code = options.redirects.get(worker.local_rank, options.redirects.get(-1, usual)) if root else 0
    quiet = options.console_ranks and worker.local_rank not in options.console_ranks
    rest = NOWHERE if quiet else ""
    if not code:
        return rest, rest
    folder = os.path.join(root, f"generation-{worker.generation}")
    os.makedirs(folder, exist_ok=True)
    base = os.path.join(folder, f"rank-{worker.rank}")
    return f"{base}.out" if code & OUT else rest, f"{base}.err" if code & ERR else rest


def virtual(environment: dict[str, str], devices: str) -> dict[str, str]:
    """What ``--virtual-local-rank`` changes: LOCAL_RANK is 0 and only the rank's own device is visible.

    Parameters
    ----------
    devices
        CUDA_VISIBLE_DEVICES of the launcher; empty for all.
    """
    real = environment["LOCAL_RANK"]
    listed = [part for part in devices.split(",") if part]
    device = listed[int(real)] if int(real) < len(listed) else real
    return {**environment, "LOCAL_RANK": "0", "TRAINWARDEN_LOCAL_RANK": real, "CUDA_VISIBLE_DEVICES": device}
