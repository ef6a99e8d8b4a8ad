"""The collector on a node with eight GPUs, eight InfiniBand ports, eight interfaces and this host's own numbers, all sources on.

    python -m benchmarks.collector [--seconds 60] [--latency-us 50]     what it costs: bars of 1 % of a core and 60 MB
    python -m benchmarks.collector --ticks 100000                       memory and descriptors over so many ticks: flat or not
    python -m benchmarks.collector --against TREE [--seconds 60]        beside the agent of another checkout, at the same time
    python -m benchmarks.collector --real 600                           the agent on this very machine: what each source gave

The driver library of the GPUs is the tests' stand-in at NVML's C interface; every call sleeps `--latency-us`. Needs a C compiler.
Prints JSON and writes it to benchmarks/results; exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--latency-us", type=int, default=50)
    parser.add_argument("--ticks", type=int, default=0)
    parser.add_argument("--real", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--against", type=Path, metavar="TREE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tw-bench-") as folder:
        name, figures = run(given, Path(folder))
    text = json.dumps(figures, indent=2)
    (RESULTS / f"collector_{name}.json").write_text(f"{text}\n", encoding="utf-8")
    print(text)
    return 0 if figures["ok"] else 1


def run(given: argparse.Namespace, folder: Path) -> tuple[str, dict[str, Any]]:
    """(name of the result, figures)."""
    if given.ticks:
        from benchmarks.collector import flat

        return "flat", flat.measure(folder, given.ticks)
    if given.real:
        from benchmarks.collector import real

        return "real", real.measure(folder, given.real)
    if given.against:
        from benchmarks.collector import against

        return "against", against.measure(folder, given.seconds, given.latency_us, given.against)
    from benchmarks.collector import cost

    return "cost", cost.measure(folder, given.seconds, given.latency_us)


if __name__ == "__main__":
    raise SystemExit(main())
