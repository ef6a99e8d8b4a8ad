"""Every fault of the demonstration with several seeds, each in processes of its own: who was named, what was done, how long it took.

python -m benchmarks.demo_matrix --seeds 3 [--faults kill freeze ...] [--broker kafka]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FAULTS = ("kill", "freeze", "slow", "slow-loader", "nan", "xid-log", "link")
COLUMNS = ("verdict", "decision", "resumed")
RESULTS = Path(__file__).with_name("results")


def run(fault: str, seed: int, broker: str) -> dict[str, Any]:
    """One demonstration; its outcome, or the end of its output when it wrote none."""
    with tempfile.TemporaryDirectory(prefix="tw-matrix-") as name:
        outcome = Path(name) / "outcome.json"
        command = [
            sys.executable,
            "-m",
            "trainwarden.cli",
            "demo",
            "--fault",
            fault,
            "--seed",
            str(seed),
            "--broker",
            broker,
        ]
        done = subprocess.run(
            [*command, "--directory", f"{name}/demo", "--json", str(outcome)],
            capture_output=True,
            text=True,
            check=False,
        )
        told = json.loads(outcome.read_text()) if outcome.exists() else {"error": (done.stdout + done.stderr)[-2000:]}
        return {"fault": fault, "seed": seed, "broker": broker, "exit": done.returncode, **told}


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    outcome = row.get("outcome", {})
    seconds = outcome.get("seconds", {})
    times = "  ".join(f"{_number(seconds.get(column)):>7}" for column in COLUMNS)
    wrong = "; ".join(outcome.get("failures", [])) or row.get("error", "")[-160:]
    lost = outcome.get("steps_lost", "-")
    named = f"{outcome.get('kind', '-')} {outcome.get('named', '-')}"
    return f"{row['fault']:12} {row['seed']:4}  {'right' if row['exit'] == 0 else 'WRONG':5}  {times}  {lost:>4}  {named}  {wrong}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Counts and the time from decision to resumption."""
    right = sum(row["exit"] == 0 for row in rows)
    healed = [row["outcome"]["seconds"] for row in rows if "outcome" in row]
    spans = [
        s["resumed"] - s["decision"] for s in healed if s.get("resumed") is not None and not math.isnan(s["resumed"])
    ]
    after = (
        f"resumed {statistics.median(spans):.1f} s after the decision (median), {max(spans):.1f} s at most"
        if spans
        else ""
    )
    return f"{right} of {len(rows)} runs right; {after}"


def keep(rows: list[dict[str, Any]], path: Path) -> None:
    """Write `rows` into `path`; earlier runs of the same fault and seed are replaced, others stay."""
    path.parent.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else []
    fresh = {(row["fault"], row["seed"]) for row in rows}
    kept = [row for row in known if (row["fault"], row["seed"]) not in fresh]
    ordered = sorted([*kept, *rows], key=lambda row: (FAULTS.index(row["fault"]), row["seed"]))
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2f}"


def main() -> int:
    """Run the matrix, print it, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    parser.add_argument("--broker", default="tansu")
    args = parser.parse_args()
    faults = [fault for fault in args.faults if fault != "link" or os.geteuid() == 0]
    print(f"{'fault':12} seed  verdict {'verdict':>7}  {'decided':>7}  {'resumed':>7}  lost  named", flush=True)
    rows = []
    for fault in faults:
        for seed in range(args.first, args.first + args.seeds):
            rows.append(run(fault, seed, args.broker))
            print(line(rows[-1]), flush=True)
    print(summary(rows))
    keep(rows, RESULTS / f"demo_matrix_{args.broker}.json")
    return 0 if all(row["exit"] == 0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
