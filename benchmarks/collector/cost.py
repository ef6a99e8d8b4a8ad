"""Share of a core, memory, descriptors and messages of the agent on a node with eight GPUs and eight ports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.collector.machine import build_tree
from benchmarks.collector.processes import Footprint, footprint
from benchmarks.collector.surroundings import Surroundings, by_label, surrounded
from tests.collectors.nvml_stub import CALLS, Stub, built
from trainwarden import topics

CPU_BAR_RATIO = 0.01
PSS_BAR_BYTES = 60e6
TICKS_BAR_PER_S = 0.95
WARM_UP_S = 15.0
HOST_FILES = ("stat", "meminfo", "loadavg", "diskstats", "vmstat", "interrupts", "net/dev", "net/snmp", "pressure/cpu",
              "pressure/memory", "pressure/io")  # fmt: skip
GPUS = 8
Page = dict[str, float]


def measure(folder: Path, seconds: float, latency_us: int) -> dict[str, Any]:
    """Figures of one run of `seconds` after the warm-up."""
    stub = stand_in(folder, latency_us)
    root = build_tree(folder, live_proc=True)
    more = f'root = "{root}"\n[collector.sources.nvidia]\nlibrary = "{built()}"\n'
    with surrounded(folder) as around, agent(around, more, {"NVML_STUB_STATE": str(stub.path)}) as process:
        time.sleep(WARM_UP_S)
        begun, before, page = time.monotonic(), footprint(process.pid), around.page()
        time.sleep(seconds)
        elapsed_s = time.monotonic() - begun
        after, later = footprint(process.pid), around.page()
    figures = {
        **shares(before, after, elapsed_s),
        "messages_per_s": {
            t: round(n / elapsed_s, 2) for t, n in increases(page, later, "tw_records_total", "topic").items()
        },
        "gaps": {s: n for s, n in increases(page, later, "tw_source_gaps_total", "source").items() if n},
        "source_wall_ms_per_tick": per_tick(page, later),
    }
    loop_s = open_read_close_s(root)
    figures["open_read_close_loop"] = {
        **loop_s,
        "times_the_agent": round(loop_s["core_ratio"] / figures["cpu_core_ratio"], 2),
    }
    # a starved agent is a cheap one: without nearly every tick the figures say nothing
    figures["ticks_ok"] = figures["messages_per_s"].get(topics.TICKS.name, 0.0) >= TICKS_BAR_PER_S
    ok = figures["cpu_ok"] and figures["pss_ok"] and figures["ticks_ok"]
    return {**figures, "gpus": GPUS, "latency_us": latency_us, "ok": ok}


def stand_in(folder: Path, latency_us: int) -> Stub:
    """The driver's answers; every call of a GPU takes its time."""
    stub = Stub(folder / "nvml", GPUS)
    for gpu in range(GPUS):
        for name in CALLS:
            if name.startswith(("DeviceGet", "Gpm")):
                stub.latency_us(name, latency_us, gpu)
    return stub


@contextmanager
def agent(
    around: Surroundings, more: str, environment: dict[str, str], tree: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The agent's process, of another tree where one is given; it is ended in order."""
    command = [sys.executable, "-m", "benchmarks.collector.node", str(around.configuration(more))]
    process = subprocess.Popen(command, env={**os.environ, **environment}, cwd=tree)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def shares(before: Footprint, after: Footprint, elapsed_s: float) -> dict[str, Any]:
    """The figures that have bars, and their parts."""
    share = (after.total_cpu_s - before.total_cpu_s) / elapsed_s
    names = {name: name.partition(" ")[0] for name in after.cpu_s}
    return {
        "seconds": round(elapsed_s, 1), "cpu_core_ratio": round(share, 5), "cpu_bar_ratio": CPU_BAR_RATIO, "cpu_ok": share < CPU_BAR_RATIO,
        "cpu_core_ratio_of": {names[n]: round((s - before.cpu_s.get(n, 0.0)) / elapsed_s, 5) for n, s in after.cpu_s.items()},
        "pss_bytes": after.total_pss_bytes, "pss_bar_bytes": int(PSS_BAR_BYTES), "pss_ok": after.total_pss_bytes < PSS_BAR_BYTES,
        "pss_bytes_of": {names[name]: size for name, size in after.pss_bytes.items()},
        "files": after.files, "files_before": before.files, "threads": after.threads,
    }  # fmt: skip


def per_tick(before: Page, after: Page) -> dict[str, float]:
    """Wall milliseconds of each source per time it was asked, dearest first; on a busy machine more than it worked."""
    asked = increases(before, after, "tw_source_ms_count", "source")
    took_ms = increases(before, after, "tw_source_ms_sum", "source")
    means = {source: took_ms[source] / count for source, count in asked.items() if count}
    return {source: round(mean, 3) for source, mean in sorted(means.items(), key=lambda item: -item[1])}


def increases(before: Page, after: Page, name: str, label: str) -> dict[str, float]:
    """By how much a counter grew, by label."""
    old = by_label(before, name, label)
    return {key: value - old.get(key, 0.0) for key, value in by_label(after, name, label).items()}


def open_read_close_s(root: Path, rounds: int = 10) -> dict[str, Any]:
    """What it costs to open, read as text and close all the same files once a second, as exporters do: ports, interfaces, host."""
    files = [path for name in ("sys/class/infiniband", "sys/class/net") for path in (root / name).rglob("*")]
    files += [root / "proc" / name for name in HOST_FILES]
    readable = [str(path) for path in files if path.is_file()]
    spent_s = 0.0
    for _ in range(rounds):
        time.sleep(1.0)  # as the agent: with caches that others have used meanwhile
        begun = time.process_time()
        for path in readable:
            _read(path)
        spent_s += time.process_time() - begun
    return {"files": len(readable), "core_ratio": round(spent_s / rounds, 5)}


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""  # a counter that refuses: the loop goes on as exporters do
