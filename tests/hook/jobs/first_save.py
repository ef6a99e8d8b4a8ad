"""A DDP job of plain torch: rank 0 evaluates, then saves, each until it is let go; the others wait for it as long."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import trainwarden_hook as tw
from torch.nn.parallel import DistributedDataParallel


class Slow(io.BytesIO):
    """A file on storage that answers only when it is let go."""

    def write(self, data: object) -> int:
        wait_for("save")
        return super().write(data)  # type: ignore[arg-type]


def wait_for(name: str) -> None:
    while not (Path(sys.argv[1]) / name).exists():
        time.sleep(0.02)


def main() -> None:
    tw.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job = tw.attach(model, optimizer, persist="none")

    def train(step: int) -> None:
        with job.step(step):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.ones(4, 8)).sum())
            optimizer.step()

    train(0)
    train(1)
    if dist.get_rank() == 0:
        model.eval()
        wait_for("evaluation")
        model.train()  # type: ignore[no-untyped-call]
    dist.barrier()
    train(2)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), Slow())
    dist.barrier()
    train(3)
    train(4)
    job.finish()
    dist.destroy_process_group()


main()
