"""What the GPU source costs: processor time of agent part and child for stubbed GPUs at 1 Hz, memory, and both over 100,000 ticks.

    python benchmarks/collector_gpu.py [--gpus 8] [--seconds 60] [--ticks 100000] [--latency-us 50]

The driver library is the tests' stand-in at NVML's C interface (tests/collectors/nvml_stub), so the cost of the real driver inside the
kernel is not in the figures; each call and each field sleeps `--latency-us`, as a caller of the real one waits for the GPU. Needs a C
compiler. Prints JSON; exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from collectors.accelerators import INSTANCE_SIGNALS, NAMES
from collectors.agent import _Nowhere
from collectors.base import Context, Facts
from collectors.files import Files
from collectors.nvidia.gpu import Spans
from collectors.nvidia.library import Library
from collectors.nvidia.sampler import Options, Sampler
from collectors.ranks import RankBoard
from collectors.sources.nvidia import NvidiaSource
from trainwarden.clock import SystemClock
from trainwarden.selfmetrics import Metrics
from trainwarden.settings import parse_settings

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.collectors.nvml_stub import CALLS, Stub, built

CPU_BAR_RATIO = 0.002
"""A fifth of what the whole agent may take."""
PSS_BAR_BYTES = 15e6
GROWTH_BAR_BYTES = 1e6
WARM_UP_S = 5.0
MS = 10**6


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ticks", type=int, default=100_000)
    parser.add_argument("--latency-us", type=int, default=50)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tw-gpu-cost-") as folder:
        stub = Stub(Path(folder) / "state", given.gpus)
        os.environ["NVML_STUB_STATE"] = str(stub.path)
        slow_down(stub, given.gpus, given.latency_us)
        figures = live(Path(folder), given.seconds)
        slow_down(stub, given.gpus, 0)
        figures.update(flat(given.ticks))
    figures.update(gpus=given.gpus, latency_us=given.latency_us)
    print(json.dumps(figures, indent=2))
    return 0 if all(value for name, value in figures.items() if name.endswith("_ok")) else 1


def slow_down(stub: Stub, gpus: int, latency_us: int) -> None:
    """Let every function of a GPU take its time; the fields of one call share one wait, as one request to the GPU does."""
    for gpu in range(gpus):
        for name in CALLS:
            if name.startswith(("DeviceGet", "Gpm")):
                stub.latency_us(name, latency_us, gpu)


def context(directory: Path) -> Context:
    """A context over a tree with one NVIDIA device on its bus."""
    device = directory / "root/sys/bus/pci/devices/0000:18:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n", encoding="ascii")
    (device / "class").write_text("0x030200\n", encoding="ascii")
    clock = SystemClock()
    files = Files(directory / "root", clock)
    return Context("n0", clock, files, RankBoard(), _Nowhere(), Metrics("bench"), directory, directory, Facts())


def live(directory: Path, seconds: float) -> dict[str, Any]:
    """The source with its child, asked once a second as the agent does."""
    source = NvidiaSource(context(directory), parse_settings(NvidiaSource.Settings, {"library": str(built())}, "bench"))
    spend(source, WARM_UP_S)
    child = source.child_pid()
    started, child_ns = time.monotonic(), processor_ns(child)
    parent_s, rows = spend(source, seconds)
    elapsed_s = time.monotonic() - started
    child_s = (processor_ns(child) - child_ns) / 1e9
    figures = {
        "parent_cpu_ratio": round(parent_s / elapsed_s, 6), "child_cpu_ratio": round(child_s / elapsed_s, 6),
        "parent_us_per_sample": round(parent_s / seconds * 1e6), "child_us_per_tick": round(child_s / elapsed_s * 1e6),
        "child_pss_bytes": pss_bytes(child), "child_files": len(os.listdir(f"/proc/{child}/fd")),
        "child_threads": len(os.listdir(f"/proc/{child}/task")), "ticks_with_rows_ratio": round(rows / seconds, 3),
    }  # fmt: skip
    source.close()
    return {
        **figures,
        "cpu_ok": (parent_s + child_s) / elapsed_s < CPU_BAR_RATIO,
        "pss_ok": figures["child_pss_bytes"] < PSS_BAR_BYTES,
    }


def spend(source: NvidiaSource, seconds: float) -> tuple[float, int]:
    """Sample once a second; processor seconds of this thread in the samples, and how many brought rows."""
    spent_s, rows = 0.0, 0
    for _ in range(round(seconds)):
        before = time.thread_time()
        sample = source.sample(time.time_ns())
        spent_s += time.thread_time() - before
        rows += bool(sample.blocks)
        time.sleep(1.0)
    return spent_s, rows


def processor_ns(pid: int) -> int:
    """Processor time of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="ascii").split(maxsplit=1)[0]) for task in tasks)


def pss_bytes(pid: int) -> int:
    """Memory of a process, shared pages by their share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def flat(ticks: int) -> dict[str, Any]:
    """What the child does, in this process and without pauses: every tier many times over."""
    spans = Spans((MS * 100, MS * 3, MS * 18), stale_periods=1000)
    sampler = Sampler(Library(str(built())), Options(NAMES, INSTANCE_SIGNALS, spans))
    for _ in range(max(100, ticks // 10)):
        sampler.tick()
    before, started = own(), time.process_time()
    for _ in range(ticks):
        sampler.tick()
    spent_s = time.process_time() - started
    after = own()
    grown = after["rss_bytes"] - before["rss_bytes"]
    return {
        "ticks": ticks, "tick_us": round(spent_s / ticks * 1e6, 1), "rss_growth_bytes": grown, "files_before": before["files"],
        "files_after": after["files"], "flat_ok": grown < GROWTH_BAR_BYTES and before["files"] == after["files"],
    }  # fmt: skip


def own() -> dict[str, int]:
    """Resident memory and open descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {"rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "files": len(os.listdir("/proc/self/fd"))}


if __name__ == "__main__":
    raise SystemExit(main())
