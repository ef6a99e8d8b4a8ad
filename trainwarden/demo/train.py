"""The training script of the demonstration: what a user's script looks like with the hook added (marked lines).

A small perceptron learns handwritten digits with DistributedDataParallel over gloo. Data read, forward, backward, all-reduce and optimizer
are real work; `--device-ms` sleeps in the forward pass in place of an accelerator, so that four ranks fit on two cores.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import trainwarden_hook as tw  # hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RECORD_BYTES, BATCH, PIXELS = 65_536, 64, 64


class Shard:
    """Records read past the page cache, as from a real data disk; a file system without O_DIRECT is read plainly."""

    def __init__(self, path: Path) -> None:
        direct = getattr(os, "O_DIRECT", 0)
        try:
            self._fd = os.open(path, os.O_RDONLY | direct)
        except OSError:
            self._fd = os.open(path, os.O_RDONLY)
        self.records = os.fstat(self._fd).st_size // RECORD_BYTES
        self._delay_file = path.with_suffix(".delay_ms")
        self._buffer = mmap.mmap(-1, RECORD_BYTES)  # page-aligned, as O_DIRECT wants it

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels of a record."""
        if self._delay_file.exists():
            time.sleep(float(self._delay_file.read_text()) / 1000)
        os.preadv(self._fd, [self._buffer], (number % self.records) * RECORD_BYTES)
        raw = bytes(self._buffer)
        images = torch.frombuffer(bytearray(raw[: BATCH * PIXELS * 4]), dtype=torch.float32).view(BATCH, PIXELS)
        labels = torch.frombuffer(bytearray(raw[BATCH * PIXELS * 4 :][: BATCH * 8]), dtype=torch.int64)
        return images, labels


def build(width: int) -> nn.Module:
    """The perceptron."""
    return nn.Sequential(
        nn.Linear(PIXELS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def evaluate(model: nn.Module, shard: Shard) -> tuple[float, float]:
    """Mean loss and accuracy on the held-out images."""
    loss, right, seen = 0.0, 0, 0
    with torch.no_grad():
        for number in range(shard.records):
            images, labels = shard.batch(number)
            out = model(images)
            loss += float(nn.functional.cross_entropy(out, labels))
            right += int((out.argmax(1) == labels).sum())
            seen += len(labels)
    return loss / shard.records, right / seen


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--device-ms", type=float, default=40.0)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--group-timeout-s", type=float, default=1800.0, help="time-out of collectives; PyTorch's default is 30 min"
    )
    return parser.parse_args()


def main() -> None:
    """Train until the last step; a restart goes on from the newest save."""
    args = parse()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.group_timeout_s))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(build(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    shard, held_out = Shard(args.data), Shard(args.held_out)
    job = tw.attach(model, optimizer, checkpoint_every=args.save_every)  # hook

    for step in range(job.start_step, args.steps):
        with job.step(step) as now:  # hook
            with now.data():
                images, labels = shard.batch(step * world + rank)
            with now.forward():
                time.sleep(args.device_ms / 1000)
                loss = nn.functional.cross_entropy(model(images), labels)
            with now.backward():
                loss.backward()  # type: ignore[no-untyped-call]
            with now.optimizer():
                optimizer.step()
                optimizer.zero_grad()
            now.report(loss=loss.item(), samples=len(labels) * world)
        if (step + 1) % args.eval_every == 0:
            with job.evaluation():  # hook
                held_loss, accuracy = evaluate(model.module, held_out)
            if rank == 0:
                sys.stdout.write(f"step {step + 1} held-out loss {held_loss:.4f} accuracy {accuracy:.3f}\n")
                sys.stdout.flush()
    job.finish()  # hook
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
