"""What log lines cost: 100,000 of them through each log source, as a ratio to a loop that reads the file and splits it into lines.

    python benchmarks/log_lines.py [--lines 100000]

Processor time of one thread. Prints JSON; exit code 1 when plain lines cost more than the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from collectors.base import Context, Facts, Source
from collectors.files import Files
from collectors.ranks import RankBoard
from collectors.sources.containerlog import ContainerLogSource
from collectors.sources.logfile import LogfileSource
from collectors.sources.steplog import StepLogSource
from trainwarden.clock import SimulatedClock
from trainwarden.records import LogEvent, StepRow
from trainwarden.selfmetrics import Metrics
from trainwarden.settings import parse_settings

PLAIN_BAR_US = 5.0
IDLE_POLLS = 1000
PIECE_BYTES = 256 * 1024


class Polled(Protocol):
    """A source that looks when told."""

    def poll(self) -> None: ...


class Counting:
    """An outlet that counts."""

    def __init__(self) -> None:
        self.logs = self.steps = 0

    def log(self, event: LogEvent, urgent: bool) -> None:
        self.logs += 1

    def step(self, job: str, attempt: int, rank: int, world: int, row: StepRow) -> None:
        self.steps += 1

    def dead(self, origin: str, reason: str, payload: bytes) -> None: ...

    def topology_changed(self) -> None: ...


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tw-lines-") as folder:
        figures = measure(Path(folder), given.lines)
    print(json.dumps(figures, indent=2))
    return 0 if figures["plain"]["us_per_line"] <= PLAIN_BAR_US else 1


def measure(directory: Path, count: int) -> dict[str, dict[str, float]]:
    """Figures by kind of line."""
    (directory / "state").mkdir()
    plain = training_lines(count)
    known = [b"INFO: task worker:%d blocked for more than 120 seconds." % (n % 5000) for n in range(count)]
    stamp = b"2026-01-05T10:11:12.345678901Z stdout F "
    step = b" iteration %d/ 500000 | elapsed time per iteration (ms): 8723.4 | lm loss: 2.3E+00 | grad norm: 0.431 |"
    steps = [step % n for n in range(count)]
    return {
        "plain": one(directory, plain, LogfileSource, logfile),
        "one_known_in_1000": one(
            directory, [known[n] if n % 1000 == 0 else line for n, line in enumerate(plain)], LogfileSource, logfile
        ),
        "all_known": one(directory, known, LogfileSource, logfile),
        "container": one(directory, [stamp + line for line in plain], ContainerLogSource, container),
        "steps": one(directory, steps, StepLogSource, steplog),
        "idle": idle(directory),
    }


def training_lines(count: int) -> list[bytes]:
    """Lines as eight ranks of a training write them."""
    chance = random.Random(1)
    return [
        f"[rank{n % 8}]: step {n // 8:6d} loss {chance.random():.5f} grad_norm {chance.random():.4f} lr 1.5e-04 "
        f"tokens/s {chance.randint(7000, 9000)} mem 61.2GiB".encode()
        for n in range(count)
    ]


def logfile(path: Path) -> dict[str, Any]:
    """Settings to read one file."""
    return {"files": {"train": str(path)}, "from_start": True}


def container(path: Path) -> dict[str, Any]:
    """Settings to read it as the log of a container; the first search finds nothing, so that it is read from its beginning."""
    return {"globs": [str(path)], "find_every_s": 0.0, "limit": 1}


def steplog(path: Path) -> dict[str, Any]:
    """Settings to read steps in it."""
    return {"files": {"llm": str(path)}, "from_start": True}


def one(
    directory: Path, lines: list[bytes], kind: type[Source], settings: Callable[[Path], dict[str, Any]]
) -> dict[str, float]:
    """Cost of all lines."""
    path = directory / "train.log"
    path.unlink(missing_ok=True)
    outlet = Counting()
    source: Any = built(directory, kind, settings(path), outlet)
    if kind is ContainerLogSource:
        source.poll()
    path.write_bytes(b"\n".join(lines) + b"\n")
    base_s, ours_s = cost_s(lambda: plain_loop(path)), cost_s(lambda: poll_to_the_end(source, path))
    return {
        "us_per_line": ours_s / len(lines) * 1e6, "bytes_per_s": path.stat().st_size / ours_s, "ratio_to_plain_loop": ours_s / base_s,
        "events": outlet.logs, "step_rows": outlet.steps,
    }  # fmt: skip


def poll_to_the_end(source: Polled, path: Path) -> None:
    """Look until the file must have been read."""
    for _ in range(path.stat().st_size // PIECE_BYTES + 8):
        source.poll()


def idle(directory: Path) -> dict[str, float]:
    """Cost of looking at eight files in which nothing is new."""
    path = directory / "idle.log"
    path.write_bytes(b"x\n")
    source: Any = built(directory, LogfileSource, {"files": {f"f{n}": str(path) for n in range(8)}}, Counting())
    source.poll()
    return {"us_per_look_at_8_files": cost_s(lambda: [source.poll() for _ in range(IDLE_POLLS)]) / IDLE_POLLS * 1e6}


def built(directory: Path, kind: type[Source], settings: dict[str, Any], outlet: Counting) -> Source:
    """A source with nothing around it."""
    for saved in (directory / "state").iterdir():
        saved.unlink()
    clock = SimulatedClock()
    context = Context(
        "n0",
        clock,
        Files(Path("/"), clock),
        RankBoard(),
        outlet,
        Metrics("bench"),
        directory / "state",
        directory,
        Facts(),
    )
    return kind(context, parse_settings(kind.Settings, settings, kind.name))


def plain_loop(path: Path) -> int:
    """Read, split, count."""
    descriptor, count, rest = os.open(path, os.O_RDONLY), 0, b""
    while piece := os.read(descriptor, PIECE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        for _ in lines:
            count += 1
    os.close(descriptor)
    return count


def cost_s(work: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


if __name__ == "__main__":
    sys.exit(main())
