"""The agent of this tree and that of another one, an older checkout, at the same time under the same load: which costs less, how much.

One after the other they cannot be compared on a machine with other work: what a second of the agent costs there changes by a fifth
from minute to minute, with what others leave in the caches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.collector.cost import WARM_UP_S, agent, stand_in
from benchmarks.collector.machine import build_tree
from benchmarks.collector.processes import family_of
from benchmarks.collector.surroundings import surrounded
from tests.collectors.nvml_stub import built

APART_S = 0.37
"""Between the two starts, so that they do not tick at once."""


@dataclass(frozen=True)
class Ran:
    """What all threads of an agent and its child have run, and how often they were put on a processor."""

    busy_s: float
    turns: int


def measure(folder: Path, seconds: float, latency_us: int, other: Path) -> dict[str, Any]:
    """Shares of a core of both, their ratio, turns a second; ok when this tree's costs no more."""
    here = Path(__file__).parents[2]
    with ExitStack() as stack:
        pids = {}
        for name, tree in (("this", here), ("other", other.resolve())):
            pids[name] = stack.enter_context(_one(folder / name, tree, latency_us))
            time.sleep(APART_S)
        time.sleep(WARM_UP_S)
        begun, before = time.monotonic(), {name: ran(pid) for name, pid in pids.items()}
        time.sleep(seconds)
        elapsed_s, after = time.monotonic() - begun, {name: ran(pid) for name, pid in pids.items()}
    shares = {name: (after[name].busy_s - before[name].busy_s) / elapsed_s for name in pids}
    return {
        "seconds": round(elapsed_s, 1),
        "cpu_core_ratio": {name: round(share, 5) for name, share in shares.items()},
        "turns_per_s": {name: round((after[name].turns - before[name].turns) / elapsed_s, 1) for name in pids},
        "this_by_other": round(shares["this"] / shares["other"], 3),
        "ok": shares["this"] <= shares["other"],
    }


@contextmanager
def _one(folder: Path, tree: Path, latency_us: int) -> Iterator[int]:
    """An agent with all that surrounds it; its process."""
    folder.mkdir()
    stub, root = stand_in(folder, latency_us), build_tree(folder, live_proc=True)
    more = f'root = "{root}"\n[collector.sources.nvidia]\nlibrary = "{built()}"\n'
    with surrounded(folder) as around, agent(around, more, {"NVML_STUB_STATE": str(stub.path)}, tree) as process:
        yield process.pid


def ran(pid: int) -> Ran:
    """By the scheduler's own count of each thread, in nanoseconds."""
    busy_ns = turns = 0
    for member in family_of(pid):
        for path in Path(f"/proc/{member}/task").glob("*/schedstat"):
            try:
                words = path.read_text(encoding="ascii").split()
            except OSError:
                continue  # that thread has just ended
            busy_ns += int(words[0])
            turns += int(words[2])
    return Ran(busy_ns / 1e9, turns)
