"""The job of `benchmarks.training.rebalance`: a DDP model whose global batch is divided by `job.shares`.

With ``--pace-ms`` a micro-batch takes that long as an accelerator would take it (the processor sleeps); a file ``pace.<node>``
overrides it while it exists. With ``--rounds`` it is so many forward and backward passes on the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import trainwarden_hook as tw
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 32
SAMPLES = 512


def pace_s(folder: Path, usual_ms: float) -> float:
    """Seconds that a micro-batch takes on this node now."""
    try:
        return float((folder / f"pace.{os.environ['TRAINWARDEN_NODE']}").read_text()) / 1e3
    except (OSError, ValueError):
        return usual_ms / 1e3


def main() -> None:
    """Train until stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    tw.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = tw.attach(model, optimizer, persist="none")
    x = torch.randn(SAMPLES, 32)
    y = x.sum(1, keepdim=True).sin()
    with (given.folder / f"rows.{os.environ['TRAINWARDEN_NODE']}").open("a", buffering=1) as rows:
        for step in range(job.start_step, 10**9):
            with job.step(step) as s:
                optimizer.zero_grad()
                pace = pace_s(given.folder, given.pace_ms)
                for part_x, part_y in job.shares((x, y), MICRO_BATCHES):
                    time.sleep(pace)
                    for _ in range(given.rounds - 1):
                        torch.nn.functional.mse_loss(model.module(part_x), part_y).backward()  # type: ignore[no-untyped-call]
                        optimizer.zero_grad(set_to_none=False)
                    job.backward(torch.nn.functional.mse_loss(model(part_x), part_y))
                optimizer.step()
                s.report(loss=0.0, samples=SAMPLES * job.division.mine // MICRO_BATCHES)
            row = {"rank": dist.get_rank(), "world": dist.get_world_size(), "step": step, "share": job.division.mine}
            where = {"generation": job.environment.generation, "at": time.time(), "pid": os.getpid()}
            rows.write(json.dumps({**row, **where}) + "\n")


if __name__ == "__main__":
    main()
