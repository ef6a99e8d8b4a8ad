"""A DDP job that divides its global batch by `job.shares`, in float64; a file per node slows its micro-batches."""

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

MICRO_BATCHES = 12
SAMPLES = 48


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 8, dtype=torch.float64, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def loss_of(model: torch.nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = ((model(part[0]) - part[1]) ** 2).mean()
    return loss


def pace_s(folder: str) -> float:
    """Seconds that a micro-batch takes on this node, as an accelerator would take them."""
    try:
        return float((Path(folder) / f"pace.{os.environ['TRAINWARDEN_NODE']}").read_text() or 0.004)
    except (OSError, ValueError):
        return 0.004


def flip_is_due(folder: Path, step: int) -> bool:
    """Once; the step is put where the file was."""
    if not (folder / "flip").exists():
        return False
    (folder / "flip").write_text(str(step))
    (folder / "flip").rename(folder / "flipped")
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--folder", required=True)
    parser.add_argument(
        "--flip", type=int, metavar="RANK", help="flip a bit of a parameter there once a file `flip` exists"
    )
    given = parser.parse_args()
    tw.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = tw.attach(model, optimizer)
    with open(Path(given.folder) / f"rows.{os.environ['TRAINWARDEN_NODE']}", "a", buffering=1) as rows:
        for step in range(job.start_step, given.steps):
            loss = torch.zeros((), dtype=torch.float64)
            with job.step(step) as s:
                optimizer.zero_grad()
                pace = pace_s(given.folder)
                for part in job.shares(global_batch(step), MICRO_BATCHES):
                    time.sleep(pace)
                    loss += job.backward(loss_of(model, part))
                optimizer.step()
                if given.flip == dist.get_rank() and flip_is_due(Path(given.folder), step):
                    next(model.parameters()).detach().view(-1)[5:6].view(torch.int64).bitwise_xor_(1 << 30)
                s.report(loss=loss * job.division.world, samples=SAMPLES * job.division.mine // MICRO_BATCHES)
            weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            row = {
                "generation": job.environment.generation,
                "rank": dist.get_rank(),
                "world": dist.get_world_size(),
                "step": step,
                "share": job.division.mine,
                "loss": loss.item(),
                "weights": weights.tolist() if step % 20 == 0 else [],
                "at": time.time(),
                "pid": os.getpid(),
                "errors": dict(job.errors),
            }
            rows.write(json.dumps(row) + "\n")
    job.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
