"""A DDP job that outlives a dead peer in its process: loops by `job.steps`; one JSON row per step and rank."""

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
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--rows", required=True)
    given = parser.parse_args()
    tw.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job = tw.attach(model, optimizer, checkpoint_every=50, persist="none")
    with open(f"{given.rows}.{os.environ['TRAINWARDEN_NODE']}", "a", buffering=1) as rows:
        for step in job.steps(given.steps):
            with job.step(step) as s:
                generator = torch.Generator().manual_seed(step * 100 + job.environment.rank)
                x = torch.randn(16, 8, generator=generator)
                time.sleep(given.pause)
                loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                s.report(loss=loss, samples=16)
            if job.regrouped:
                continue
            weights = float(sum(parameter.detach().double().abs().sum() for parameter in model.parameters()))
            row = {
                "generation": job.environment.generation,
                "rank": dist.get_rank(),
                "world": dist.get_world_size(),
                "step": step,
                "weights": weights,
                "at": time.time(),
                "pid": os.getpid(),
                "errors": dict(job.errors),
            }
            rows.write(json.dumps(row) + "\n")
    job.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
