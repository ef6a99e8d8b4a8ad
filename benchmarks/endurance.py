"""Memory of every detector over many ticks, with jobs and nodes that come and go: it must be flat.

    python -m benchmarks.endurance [NAME ...] [--ticks 100000]

The bar is 1,000,000 ticks: some minutes for most detectors, half an hour for those that follow every series, so the default is a tenth.
Prints the size of the state after a third and at the end, and by how much the process grew in between. Exit code 1 when one grew.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from time import process_time

from detectors.base import Detector, registry
from detectors.disturbances import cheap_frames

GROWN_BAR_BYTES = 16 * 2**20
CHURN_TICKS = 1000


@dataclass(frozen=True)
class Endured:
    """What one detector held after a third of the ticks, and at the end."""

    name: str
    ticks: int
    early_bytes: int
    late_bytes: int
    grown_bytes: int
    cpu_s: float

    @property
    def flat(self) -> bool:
        """Whether neither state nor process grew."""
        return self.late_bytes <= 1.25 * self.early_bytes + 4096 and self.grown_bytes < GROWN_BAR_BYTES


def endure(kind: type[Detector], ticks: int) -> Endured:
    """Run one detector over `ticks` ticks."""
    detector, early, before = kind(), 0, 0
    started = process_time()
    for number, frame in enumerate(cheap_frames(ticks, min(CHURN_TICKS, max(ticks // 100, 1)))):
        detector.update(frame)
        if number == ticks // 3:
            early, before = len(detector.snapshot()), _resident_bytes()
    grown = _resident_bytes() - before
    return Endured(kind.name, ticks, early, len(detector.snapshot()), grown, process_time() - started)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="detectors; default: all")
    parser.add_argument("--ticks", type=int, default=100_000)
    chosen = parser.parse_args()
    known, results = registry(), []
    for kind in [known.get(name) for name in chosen.names or known.all()]:
        results.append(endure(kind, chosen.ticks))
        print(line(results[-1]), flush=True)
    return int(not all(result.flat for result in results))


def line(result: Endured) -> str:
    """One detector for people."""
    state = (
        f"state {result.early_bytes:9,} -> {result.late_bytes:9,} bytes, process {result.grown_bytes / 2**20:+6.1f} MiB"
    )
    return f"{result.name:20} {result.ticks:9,} ticks  {state}  {result.cpu_s:7.1f} s  {'flat' if result.flat else 'GROWS'}"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())
