"""What a second worker is worth on Apache Kafka: the same simulated cluster with one worker of two stages, then with several.

    python -m benchmarks.scale_workers [--nodes 512] [--workers 2] [--minutes 2] [--json FILE]

Each run is one of `benchmarks.scale` with `streams.stages = 2`: real processes, real time, broker and clients included. The stream comes at
the same speed in both, so what is compared is room: the processor time that one worker with all units takes for a second of the cluster,
over what the busiest of several takes. That is by how much faster a stream several could follow, where each has a core. On a machine of
two cores, which broker, store and simulator share, several workers at their limits would measure the machine. Beside it, the processor
time of all workers together: what sharing costs. Exit code 1 when the gain is below 1.7.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.scale import Plan, measure

GAIN_BAR = 1.7


def compare(nodes: int, workers: int, minutes: float, warm_s: float, faults: str) -> dict[str, object]:
    """Both runs, and the gain."""
    cores = {count: _cores(nodes, count, minutes, warm_s, faults) for count in (1, workers)}
    alone, busiest, together = cores[1][0], max(cores[workers]), sum(cores[workers])
    return {
        "nodes": nodes, "minutes": minutes, "faults": faults, "cores": cores, "gain": round(alone / busiest, 2),
        "together": round(together / alone, 2),
    }  # fmt: skip


def _cores(nodes: int, workers: int, minutes: float, warm_s: float, faults: str) -> list[float]:
    """Processor seconds a second of each worker."""
    with tempfile.TemporaryDirectory(prefix="tw-workers-", ignore_cleanup_errors=True) as folder:
        result: dict[str, Any] = measure(Plan(nodes, minutes, warm_s, "kafka", workers, faults, Path(folder), stages=2))
    return [row["cores"] for name, row in result["parts"].items() if name.startswith("worker")]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--warm-seconds", type=float, default=40.0)
    parser.add_argument("--faults", default="mix:4")
    parser.add_argument("--json", type=Path, default=None, help="write the result here too")
    given = parser.parse_args()
    if given.workers < 2:
        parser.error(f"--workers: {given.workers} found, expected two or more")
    result = compare(given.nodes, given.workers, given.minutes, given.warm_seconds, given.faults)
    print(json.dumps(result, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    gain = result["gain"]
    assert isinstance(gain, float)
    return int(gain < GAIN_BAR)


if __name__ == "__main__":
    sys.exit(main())
