"""A tiny DDP job for the launcher tests: learns a line, writes one JSON row per step."""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import trainwarden_hook as tw
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--rows", required=True)
    given = parser.parse_args()
    tw.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job = tw.attach(model, optimizer, checkpoint_every=given.every, extra={"position": 0})
    generation = int(os.environ["TRAINWARDEN_GENERATION"])
    with open(f"{given.rows}.{os.environ['TRAINWARDEN_NODE']}", "a", buffering=1) as rows:
        for step in range(job.start_step, given.steps):
            with job.step(step) as s:
                with s.data():
                    torch.manual_seed(step * 100 + dist.get_rank())
                    x = torch.randn(16, 8)
                    time.sleep(given.pause)
                with s.forward():
                    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
                with s.backward():
                    optimizer.zero_grad()
                    loss.backward()
                with s.optimizer():
                    optimizer.step()
                s.report(loss=loss, samples=16)
            job.extra["position"] = step + 1
            rows.write(
                json.dumps(
                    {
                        "generation": generation,
                        "rank": dist.get_rank(),
                        "world": dist.get_world_size(),
                        "step": step,
                        "loss": loss.item(),
                        "at": time.time(),
                        "pid": os.getpid(),
                        "from": job.restored_from,
                        "errors": dict(job.errors),
                        "position": job.extra["position"],
                    }
                )
                + "\n"
            )
    job.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
