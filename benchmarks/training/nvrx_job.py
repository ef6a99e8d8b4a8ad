"""The demonstration's work under nvidia-resiliency-ext's in-process restart: survivors abort the group and go on with fewer ranks.

Run by `recovery` in an interpreter that has it, as plain processes. Its limits are short ones: with gloo, survivors stand until the
group's time-out, since its abort acts on NCCL alone. The wrapper looks at annotations, so they are no texts here.
"""

import argparse
import json
import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess  # type: ignore[import-not-found]
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwarden.demo.train import Shard, build, parse

GROUP_TIMEOUT = timedelta(seconds=3)


class Work:
    """Model, optimizer and place of one rank, kept over restarts in the process."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.model = build(args.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.shard = Shard(args.data)
        self.step = 0
        port, hosts = int(os.environ["NVRX_STORE_PORT"]), os.environ["RANK"] == "0"
        self.store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=hosts)  # type: ignore[attr-defined]
        self.told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def train(self, number: int, iteration: int) -> None:
        """Until stopped; raises when a collective fails."""
        store = dist.PrefixStore(f"{iteration}", self.store)  # type: ignore[attr-defined]
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)
        replica = DistributedDataParallel(self.model)
        while True:
            self.optimizer.zero_grad()
            images, labels = self.shard.batch(self.step * world + rank)
            time.sleep(self.args.device_ms / 1000)
            nn.functional.cross_entropy(replica(images), labels).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.step += 1
            row = {"t": "step", "rank": number, "pid": os.getpid(), "generation": iteration, "step": self.step}
            self.told.sendto(json.dumps({**row, "world": world}).encode(), os.environ["TRAINWARDEN_SOCKET"])


def main() -> None:
    torch.set_num_threads(1)
    number, work = int(os.environ["RANK"]), Work(parse())

    def restarted(call: inprocess.CallWrapper | None = None) -> None:
        work.train(number, call.iteration if call is not None else 0)

    inprocess.Wrapper(soft_timeout=timedelta(seconds=3), hard_timeout=timedelta(seconds=5))(restarted)()


if __name__ == "__main__":
    main()
