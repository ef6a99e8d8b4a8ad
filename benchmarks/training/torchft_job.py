"""The demonstration's work under torchft: one replica group a node, gradients by its manager, the dead one heals from a peer.

Run by `recovery` in an interpreter that has torchft, under torchrun and beside a lighthouse. As released, 0.2.0's hook for DDP fails the
survivors on gloo (`assert fut._fut`); the one here waits for the collective and gives the bucket back, as later versions do. PyTorch
looks at the hook's annotations, so they are no texts here.
"""

import json
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

from trainwarden.demo.train import Shard, build, parse

STORE_TIMEOUT = timedelta(seconds=30)


class Replica(DistributedDataParallel):  # type: ignore[misc]
    """torchft's wrapper with a hook that runs on gloo."""

    @staticmethod
    def _comm_hook(
        state: Any,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    number = int(os.environ["TORCHFT_REPLICA"])
    model = build(args.width)
    plain = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=2, load_state_dict=load, timeout=STORE_TIMEOUT,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()}, replica_id=f"replica_{number}_",
    )  # fmt: skip
    replica, optimizer, shard = Replica(manager, model), Optimizer(manager, plain), Shard(args.data)
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    while (step := manager.current_step()) < args.steps:
        optimizer.zero_grad()
        images, labels = shard.batch(step * 4 + number)
        time.sleep(args.device_ms / 1000)
        nn.functional.cross_entropy(replica(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if manager.current_step() > step:
            row = {"t": "step", "rank": number, "pid": os.getpid(), "generation": 0, "step": step}
            row["world"] = manager.num_participants()
            told.sendto(json.dumps(row).encode(), os.environ["TRAINWARDEN_SOCKET"])


if __name__ == "__main__":
    main()
