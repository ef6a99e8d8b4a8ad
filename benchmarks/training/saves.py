"""`python -m benchmarks.training`: saves and restores of ours and of the peers; JSON to benchmarks/results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.training import checkpoints

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    """Measure, print, write; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--state-mb", type=int, default=1000, help="size of the state; 100 for a quick look")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that torch.save writes to")
    parser.add_argument(
        "--dlrover-python",
        default=os.environ.get("DLROVER_PYTHON", "none"),
        help="has dlrover; empty: installed anew into a temporary environment, none (default): left out",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "training_checkpoints.json")
    given = parser.parse_args()
    load_before = os.getloadavg()
    found = checkpoints.measure(given.state_mb, given.rounds, given.folder, given.dlrover_python)
    print("\n".join(checkpoints.table(found)))
    bars = checkpoints.bars(found)
    for bar in bars:
        sign = ">=" if bar.at_least else "<="
        print(f"  {'ok  ' if bar.met else 'MISS'} {bar.name}: {bar.found:.3f} {sign} {bar.limit:g}")
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load_before": load_before}
    text = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine,
        "found": found,
        "bars": [{"name": bar.name, "found": bar.found, "limit": bar.limit, "met": bar.met} for bar in bars],
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(text, indent=1) + "\n")
    print(f"written to {given.out}")
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
