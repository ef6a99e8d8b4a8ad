"""The demonstration's script with the loop that outlives a dead peer: `job.steps` instead of `range`."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
import trainwarden_hook as tw
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwarden.demo.train import Shard, build, parse


def main() -> None:
    """Train until stopped."""
    args = parse()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = DistributedDataParallel(build(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    shard = Shard(args.data)
    job = tw.attach(model, optimizer, checkpoint_every=args.save_every)
    for step in job.steps(args.steps):
        with job.step(step) as now:
            with now.data():
                images, labels = shard.batch(step * dist.get_world_size() + dist.get_rank())
            with now.forward():
                time.sleep(args.device_ms / 1000)
                loss = nn.functional.cross_entropy(model(images), labels)
            with now.backward():
                loss.backward()  # type: ignore[no-untyped-call]
            with now.optimizer():
                optimizer.step()
                optimizer.zero_grad()
            now.report(loss=loss.item(), samples=len(labels))


if __name__ == "__main__":
    main()
