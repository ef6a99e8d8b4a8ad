"""`python -m benchmarks.training.saves`: saves and restores of ours and of the peers; JSON to benchmarks/results."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.training import checkpoints
from benchmarks.training.bars import circumstances, rows

RESULTS = Path(__file__).parents[1] / "results" / "training_checkpoints.json"


def main() -> int:
    """Measure, print, write; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.saves", description=__doc__)
    parser.add_argument("--state-mb", type=int, default=1000, help="size of the state; 100 for a quick look")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that torch.save writes to")
    parser.add_argument(
        "--dlrover-python",
        default=os.environ.get("DLROVER_PYTHON", ""),
        help="has dlrover; empty: the bench's own for the peers, none: left out",
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    machine = circumstances()
    found = checkpoints.measure(given.state_mb, given.rounds, given.folder, given.dlrover_python)
    print("\n".join(checkpoints.table(found)))
    bars = checkpoints.bars(found)
    print("\n".join(bar.line() for bar in bars))
    given.json.parent.mkdir(parents=True, exist_ok=True)
    kept = {"machine": machine, "found": found, "bars": rows(bars), "notes": checkpoints.notes(found)}
    given.json.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"written to {given.json}")
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
