"""One rank of the recorded job: a small network trained with DDP over gloo, a row for every step, under whatever is done to it.

Started by torchrun with the folder of the run's files (from whose checkpoint the job resumes), a data file on a disk, this node's folder
for checkpoints, the name of the run, the node's number and a seed. Faults that lie in the program are read from `orders.json` in the first.

(Annotations are real here: DDP looks at those of its hook.)
"""

import argparse
import csv
import itertools
import json
import math
import mmap
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

COLUMNS = (
    "wall", "node", "rank", "world", "step", "data_ms", "fwd_ms", "bwd_ms", "ar_wait_ms", "opt_ms", "ckpt_ms", "step_ms", "cpu_ms",
    "arrive", "loss", "local_gnorm", "gnorm", "param_sum", "ckpt_ok", "rx_bytes", "tx_bytes", "tcp_retrans",
)  # fmt: skip
RECORD_BYTES, RECORDS = 64 * 1024, 256
DEVICE_S = 0.030
SAVE_EVERY, STOP_EVERY, FLUSH_EVERY, COUNTERS_EVERY, SUM_EVERY = 50, 20, 20, 10, 5
LEAVE_S = 20.0
BATCH = 64


@dataclass
class Orders:
    """What the recorder wants done in the program, by node."""

    path: Path
    node: int

    def now(self) -> dict[str, Any]:
        """Orders for this node that are in force."""
        try:
            told = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return dict(told.get(str(self.node), {})) | dict(told.get("all", {}))


class Loader:
    """Reads one record with O_DIRECT and makes a batch of it: what the page cache holds does not count."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(os.urandom(RECORD_BYTES) * RECORDS)
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._page = mmap.mmap(-1, RECORD_BYTES)

    def batch(self, step: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        os.preadv(self._file, [self._page], (step % RECORDS) * RECORD_BYTES)
        inputs = torch.randn(BATCH, 256, generator=generator)
        return inputs, (inputs[:, :10] * 3.0).argmax(dim=1)


class Reduction:
    """Hands buckets to the all-reduce, and notes the norm of the local gradient and when the last one was handed over."""

    def __init__(self) -> None:
        self.arrived_s, self.squares = 0.0, 0.0

    def begin(self) -> None:
        self.squares = 0.0

    def reduce(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.squares += float(bucket.buffer().square().sum())
        self.arrived_s = time.time()
        return allreduce_hook(group, bucket)


class Rank:
    """The loop of one rank."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen, self.node = chosen, int(chosen.node)
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.orders = Orders(chosen.out / "orders.json", self.node)
        self.shared = chosen.out / "checkpoint.pt"
        self.counters = (0, 0, 0)
        self.step = 0
        self._flipped: object = None
        self._leaked: list[bytes] = []
        self._rows: list[tuple[object, ...]] = []
        self.event(
            "proc_start",
            pid=os.getpid(),
            world=str(self.world),
            restart=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        began_s = time.time()
        dist.init_process_group("gloo")
        self.event("pg_ready", dt=round(time.time() - began_s, 3), world=self.world)
        self._build()

    def _build(self) -> None:
        torch.manual_seed(self.chosen.seed)
        width = [256, 512, 512, 512]
        layers = [part for a, b in itertools.pairwise(width) for part in (nn.Linear(a, b), nn.ReLU())]
        self.plain = nn.Sequential(*layers, nn.Linear(512, 10))
        self.watched: torch.Tensor = list(self.plain.parameters())[2]
        self.model = DistributedDataParallel(self.plain, bucket_cap_mb=25)
        self.reduction = Reduction()
        self.model.register_comm_hook(None, self.reduction.reduce)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(1000 * self.chosen.seed + self.rank)
        self.loader = Loader(self.chosen.data)
        self._resume()

    def _resume(self) -> None:
        began_s = time.time()
        if self.shared.exists():
            state = torch.load(self.shared, weights_only=True)
            self.plain.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = int(state["step"])
            self.event("resumed", step=self.step, dt=round(time.time() - began_s, 3))

    def event(self, kind: str, **more: object) -> None:
        """One line, whole, into the file that all ranks share."""
        line = json.dumps(
            {"t": round(time.time(), 4), "node": str(self.node), "rank": str(self.rank), "kind": kind} | more
        )
        with (self.chosen.out / f"{self.chosen.name}.events.jsonl").open("a", buffering=1) as file:
            file.write(line + "\n")

    def run(self) -> NoReturn:
        """Train until the folder says stop."""
        self.event("first_step", step=self.step)
        while True:
            self._one_step()
            if self.step % STOP_EVERY == 0 and self._stops():
                break
        self._flush()
        self._leave()

    def _leave(self) -> NoReturn:
        """End when every rank is done, and at once: where one tears its group down beside others it may abort, and torchrun begins anew."""
        (self.chosen.out / f"done.{self.rank}").touch()
        deadline_s = time.monotonic() + LEAVE_S
        while len(list(self.chosen.out.glob("done.*"))) < self.world and time.monotonic() < deadline_s:
            time.sleep(0.02)
        os._exit(0)

    def _stops(self) -> bool:
        flag = torch.tensor([float((self.chosen.out / "stop").exists())])
        dist.all_reduce(flag)
        return bool(flag.item() > 0)

    def _one_step(self) -> None:
        orders, began_s, cpu_s = self.orders.now(), time.time(), time.process_time()
        inputs, labels = self._load(orders)
        loaded_s = time.time()
        if orders.get("nan"):
            inputs = inputs * math.nan
        self.optimizer.zero_grad(set_to_none=False)
        time.sleep(DEVICE_S * float(orders.get("compute_times", 1.0)))
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        forward_s = time.time()
        self.reduction.begin()
        loss.backward()  # type: ignore[no-untyped-call]
        backward_s = time.time()
        self._update(orders)
        updated_s = time.time()
        saved, saved_s = self._save(orders), time.time()
        arrived_s = min(max(self.reduction.arrived_s, forward_s), backward_s)
        spent_ms = [
            1000 * (b - a)
            for a, b in itertools.pairwise((began_s, loaded_s, forward_s, arrived_s, backward_s, updated_s, saved_s))
        ]
        spent_ms[-1] *= saved >= 0
        spent_ms += [1000 * (saved_s - began_s), 1000 * (time.process_time() - cpu_s)]
        if self.step % COUNTERS_EVERY == 0:
            self.counters = counters("self")
        total = float(self.watched.detach().sum()) if self.step % SUM_EVERY == 0 else math.nan
        local = math.sqrt(self.reduction.squares) if math.isfinite(self.reduction.squares) else math.nan
        self._rows.append((
            f"{began_s:.4f}", self.node, self.rank, self.world, self.step, *(f"{ms:.2f}" for ms in spent_ms), f"{arrived_s:.4f}",
            f"{float(loss.detach()):.4f}", f"{local:.4f}", f"{self.norm:.4f}", f"{total:.6f}", saved, *self.counters,
        ))  # fmt: skip
        self.step += 1
        if len(self._rows) >= FLUSH_EVERY:
            self._flush()

    def _load(self, orders: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        if "exit" in orders:
            self._flush()
            sys.exit(int(orders["exit"]))
        if "leak_mib" in orders:
            self._leaked.append(b"\xff" * (int(orders["leak_mib"]) << 20))
        time.sleep(float(orders.get("loader_s", 0.0)))
        return self.loader.batch(self.step, self.generator)

    def _update(self, orders: dict[str, Any]) -> None:
        self.norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), math.inf))
        if math.isfinite(self.norm):
            self.optimizer.step()
        if orders.get("flip_bit") not in (None, self._flipped):
            weights = self.watched.data.view(torch.int32)
            weights[3, 5] ^= 1 << int(orders["flip_bit"])
        self._flipped = orders.get("flip_bit")
        time.sleep(float(orders.get("pause_s", 0.0)) if self.step % int(orders.get("pause_every", 1)) == 0 else 0.0)

    def _save(self, orders: dict[str, Any]) -> int:
        """1 saved, 0 not, -1 not due."""
        if (self.step + 1) % SAVE_EVERY:
            return -1
        time.sleep(float(orders.get("save_s", 0.0)))
        state = {"model": self.plain.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step + 1}
        target = self.chosen.saves / "checkpoint.pt"
        try:
            torch.save(state, target.with_suffix(".part"))
            target.with_suffix(".part").replace(target)
        except (OSError, RuntimeError) as error:
            target.with_suffix(".part").unlink(missing_ok=True)
            self.event("ckpt_fail", step=self.step, err=str(error)[:80], cls=type(error).__name__)
            return 0
        if self.rank == 0:
            shutil.copy(target, self.shared.with_suffix(".part"))
            self.shared.with_suffix(".part").replace(self.shared)
        return 1

    def _flush(self) -> None:
        path = self.chosen.out / f"{self.chosen.name}.rank{self.rank}.csv"
        with path.open("a", newline="") as file:
            csv.writer(file).writerows(self._rows)
        self._rows = []


def counters(process: str) -> tuple[int, int, int]:
    """Bytes in, bytes out of eth0 and TCP segments sent again, in the namespace of a process (its id, or "self")."""
    received = sent = again = 0
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "eth0":
            fields = rest.split()
            received, sent = int(fields[0]), int(fields[8])
    rows = [
        line.split() for line in Path(f"/proc/{process}/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    ]
    if len(rows) == 2:
        again = int(rows[1][rows[0].index("RetransSegs")])
    return received, sent, again


def main() -> None:
    """One rank, to the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("out", Path), ("data", Path), ("saves", Path), ("name", str), ("node", int), ("seed", int)):
        parser.add_argument(name, type=kind)
    torch.set_num_threads(1)
    Rank(parser.parse_args()).run()


if __name__ == "__main__":
    main()
