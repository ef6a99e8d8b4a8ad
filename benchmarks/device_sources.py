"""What the sources of devices cost: processor time of the sampling thread and of the whole process per tick, on a machine made of fixtures.

    python -m benchmarks.device_sources [--ticks 120]

Eight InfiniBand ports (a captured port, eight times), eight interfaces whose drivers answer with six hundred recorded statistics, a host
with captured /proc and /sys. Ticks are a second apart on a clock that is moved; every tenth reads counters in the background, which is
waited for and counted as well. Compared with opening, reading and closing the same files once a tick. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks.collector.drivers import RecordedDriver
from benchmarks.collector.machine import build_tree
from collectors.base import Context, Facts, Source
from collectors.files import Files
from collectors.ranks import RankBoard
from collectors.sources.drift import DriftSource
from collectors.sources.ethtool import EthtoolSource
from collectors.sources.host import HostSource
from collectors.sources.machine import MachineSource
from collectors.sources.mounts import MountsSource
from collectors.sources.nic import NicSource
from collectors.sources.rdma import RdmaSource
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.selfmetrics import Metrics
from trainwarden.settings import parse_settings

KINDS: tuple[type[Source], ...] = (
    HostSource, NicSource, RdmaSource, EthtoolSource, MachineSource, MountsSource, DriftSource,
)  # fmt: skip
BACKGROUND = (RdmaSource, EthtoolSource, MachineSource, MountsSource, DriftSource)


class Silent:
    """An outlet for events that nobody reads."""

    def log(self, *_: object, **__: object) -> None: ...
    def step(self, *_: object) -> None: ...
    def dead(self, *_: object) -> None: ...
    def topology_changed(self) -> None: ...


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ticks", type=int, default=120)
    ticks = parser.parse_args().ticks
    with tempfile.TemporaryDirectory(prefix="tw-devices-") as folder:
        print(json.dumps(measure(Path(folder), ticks), indent=2))
    return 0


def measure(folder: Path, ticks: int) -> dict[str, object]:
    """Microseconds per tick by source, their sum as a share of a core at 1 Hz, and the ratio to open/read loops."""
    root = build_tree(folder)
    per_source = {kind.name: cost(kind, root, folder, ticks) for kind in KINDS}
    total_us = sum(figures["process_us"] for figures in per_source.values())
    ports_us, files = open_read_us(root / "sys/class/infiniband", ticks)
    ours_us = per_source["rdma"]["process_us"]
    return {
        "ticks": ticks,
        "sources": per_source,
        "core_ratio": round(total_us / 1e6, 5),
        "open_read_loop_of_all_port_files": {
            "files": files,
            "us_per_tick": round(ports_us),
            "times_ours": round(ports_us / ours_us, 1),
        },
    }


def cost(kind: type[Source], root: Path, folder: Path, ticks: int) -> dict[str, float]:
    """Microseconds of the sampling thread and of the process per tick."""
    clock = SimulatedClock()
    context = Context("n0", clock, Files(root, clock), RankBoard(), Silent(), Metrics("bench"), folder, folder, Facts())
    source = kind(context, parse_settings(kind.Settings, {}, kind.name))
    if isinstance(source, EthtoolSource):
        source.ask = RecordedDriver()
    for _ in range(21):
        tick(source, clock)
    process, thread = time.process_time(), 0.0
    for _ in range(ticks):
        thread += tick(source, clock)
    return {
        "thread_us": round(1e6 * thread / ticks, 1),
        "process_us": round(1e6 * (time.process_time() - process) / ticks, 1),
    }


def tick(source: Source, clock: SimulatedClock) -> float:
    """Thread seconds of one sample; what it began in the background is waited for."""
    clock.advance_ns(NS_PER_S)
    started = time.thread_time()
    source.sample(clock.now_ns())
    used = time.thread_time() - started
    if isinstance(source, BACKGROUND):
        source.settle(60)
    return used


def open_read_us(directory: Path, ticks: int) -> tuple[float, int]:
    """Microseconds to open, read and close every file of the ports once, as exporters without open descriptors do each time."""
    files = [str(path) for path in directory.rglob("*") if path.is_file()]
    rounds = max(1, ticks // 10)
    started = time.process_time()
    for _ in range(rounds):
        for path in files:
            with open(path, encoding="utf-8") as file:
                file.read()
    return 1e6 * (time.process_time() - started) / rounds, len(files)


if __name__ == "__main__":
    raise SystemExit(main())
