"""The job of `benchmarks.training.recovery --elastic`: the same global batch in every step, divided among whoever is there."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

MICRO_BATCHES, SAMPLES = 12, 48


def make_model() -> torch.nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step; -1 is the data by which the loss is measured."""
    generator = torch.Generator().manual_seed(step + 1)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared error."""
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def held_out(model: torch.nn.Module) -> float:
    """Loss on the fixed data."""
    with torch.no_grad():
        return loss_of(model, batch_of(-1)).item()


def undisturbed(steps: int) -> list[float]:
    """Held-out loss after each step of one process that nothing happens to."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(held_out(model))
    return losses


def main() -> None:
    """Train until stopped."""
    import torch.distributed as dist
    import trainwarden_hook as tw
    from torch.nn.parallel import DistributedDataParallel

    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    tw.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    job = tw.attach(model, optimizer, checkpoint_every=5)
    with (given.folder / f"rows.{os.environ['TRAINWARDEN_NODE']}").open("a", buffering=1) as rows:
        for step in range(job.start_step, 10**9):
            with job.step(step) as s:
                optimizer.zero_grad()
                for part in job.shares(batch_of(step), MICRO_BATCHES):
                    time.sleep(0.01)
                    job.backward(loss_of(model, part))
                optimizer.step()
                s.report(loss=0.0)
            row = {
                "rank": dist.get_rank(),
                "world": dist.get_world_size(),
                "step": step,
                "loss": held_out(model.module),
            }
            where = {"generation": job.environment.generation, "at": time.time(), "pid": os.getpid()}
            rows.write(json.dumps({**row, **where}) + "\n")


if __name__ == "__main__":
    main()
