"""What the training hook costs: its own time per step, and the time to import it.

Prints one JSON object. ``empty_step_us`` is a loop over steps that do nothing but the marks
and the datagram; ``in_training_us`` is what the hook measures of itself (processor time
of the training thread, or with ``--wall`` wall time) in DDP steps of about ``step_ms``, with the caches
as the model leaves them (one process, gloo, gradients of ``parameters`` numbers).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

BUDGET_RATIO = 0.003


SINK = """
import socket, sys
receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
receiver.bind(sys.argv[1])
with open(sys.argv[2], "wb", buffering=0) as out:
    while True:
        out.write(receiver.recv(65536) + bytes([10]))
"""


class Sink:
    """A collector in a process of its own that keeps the datagrams in a file."""

    def __init__(self, folder: str) -> None:
        self.socket_path = f"{folder}/collector.sock"
        self._file = Path(folder) / "datagrams"
        self._process = subprocess.Popen([sys.executable, "-c", SINK, self.socket_path, str(self._file)])
        while not os.path.exists(self.socket_path):
            time.sleep(0.01)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Datagrams of one kind, in order."""
        return [row for line in self._file.read_text().splitlines() if (row := json.loads(line))["t"] == kind]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def import_ms(runs: int) -> float:
    """Median time of ``import trainwarden_hook`` in fresh interpreters."""
    code = "import time; t=time.perf_counter(); import trainwarden_hook; print((time.perf_counter()-t)*1e3)"
    return statistics.median(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(runs)
    )


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, p95 and largest, rounded."""
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 1),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 1),
        "max": round(ordered[-1], 1),
    }


def empty_steps(count: int) -> list[float]:
    """Wall time of steps that only carry the marks, in microseconds."""
    import trainwarden_hook as tw

    times = []
    for number in range(count):
        started = time.perf_counter_ns()
        with tw.step(number) as s:
            with s.data():
                pass
            with s.forward():
                pass
            with s.backward():
                pass
            with s.optimizer():
                pass
            s.report(loss=0.5, samples=64)
        times.append((time.perf_counter_ns() - started) / 1e3)
        time.sleep(0.0005)
    return times


def train(steps: int, width: int, batch: int) -> int:
    """DDP steps with the hook; returns the number of parameters."""
    import torch
    import torch.distributed as dist
    import trainwarden_hook as tw
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1)
    layers = [
        torch.nn.Linear(64, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    ]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    job = tw.attach(model, optimizer, persist="none")
    for step in range(steps):
        with job.step(step) as s:
            with s.data():
                x, y = torch.randn(batch, 64), torch.randint(0, 10, (batch,))
            with s.forward():
                loss = torch.nn.functional.cross_entropy(model(x), y)
            with s.backward():
                optimizer.zero_grad()
                loss.backward()
            with s.optimizer():
                optimizer.step()
            s.report(loss=loss, samples=batch)
    job.finish()
    dist.destroy_process_group()
    return sum(parameter.numel() for parameter in model.parameters())


def count_processor_time() -> None:
    """Let the hook account for itself by its thread's processor time, so that other processes do not count."""
    from trainwarden_hook import gradients, steps

    steps.now_ns = gradients.now_ns = time.thread_time_ns


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=1400, help="choose it so that measured_step_ms is about --step-ms")
    parser.add_argument("--step-ms", type=float, default=60.0)
    parser.add_argument(
        "--wall", action="store_true", help="count wall time: only on a machine with nothing else to do"
    )
    parser.add_argument("--json", default="", help="also write the result to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sink = Sink(folder)
        os.environ.update({"TRAINWARDEN_SOCKET": sink.socket_path, "TRAINWARDEN_JOB": f"overhead{os.getpid()}"})
        empty = empty_steps(2000)[200:]
        if not given.wall:
            count_processor_time()
        parameters = train(given.steps, given.width, given.batch)
        time.sleep(0.2)
        rows = sink.rows("step")[-given.steps :][20:]
        sink.close()
    result = report(given.step_ms, empty, rows, parameters)
    text = json.dumps(result, indent=1)
    print(text)
    if given.json:
        Path(given.json).write_text(text + "\n", encoding="utf-8")
    return 0 if result["within_budget"] else 1


def report(step_ms: float, empty: list[float], rows: list[dict[str, Any]], parameters: int) -> dict[str, Any]:
    """The printed object."""
    in_training = quantiles([row["hook_us"] for row in rows])
    ratio = in_training["median"] / (step_ms * 1e3)
    return {
        "step_ms": step_ms,
        "parameters": parameters,
        "empty_step_us": quantiles(empty),
        "in_training_us": in_training,
        "measured_step_ms": quantiles([(later["start_ns"] - row["start_ns"]) / 1e6 for row, later in pairwise(rows)]),
        "load": round(os.getloadavg()[0], 1),
        "ratio_of_step": round(ratio, 5),
        "budget_ratio": BUDGET_RATIO,
        "within_budget": ratio < BUDGET_RATIO,
        "local_norm_share": round(sum("grad_norm_local" in row for row in rows) / len(rows), 3),
        "import_ms": round(import_ms(5), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
