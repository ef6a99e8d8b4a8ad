"""The job under the link benchmark: plain torch, gloo, DDP. It knows nothing of rails; each step writes when it ended."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", required=True)
    parser.add_argument("--width", type=int, default=192, help="of two square layers: 0.3 MB of gradients by default")
    parser.add_argument("--pause-ms", type=float, default=4.0, help="stands for computing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(given.width, given.width), torch.nn.Tanh(), torch.nn.Linear(given.width, given.width)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(4, given.width)
    with open(f"{given.rows}.{os.environ['TRAINWARDEN_NODE']}", "a", buffering=1, encoding="ascii") as rows:
        rows.write(f"# pid {os.getpid()}\n")
        step = 0
        while not os.path.exists(f"{given.rows}.stop"):
            time.sleep(given.pause_ms / 1000)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            rows.write(f"{step} {time.time_ns()}\n")
            step += 1
            if step % 200 == 0:
                dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
