"""What every process of a demonstration costs while nothing happens: share of a core and memory (summed PSS) by role.

    python -m benchmarks.process_cost [--seconds 60]

Starts a demonstration without a fault, waits until all ranks train, and measures. Prints a table and, with --json, writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.collector_cost import cpu_s

SETTLE_S = 20.0
ROLES = (
    ("tansu", "broker"),
    ("trainwarden-rendezvous", "rendezvous"),
    ("trainwarden-warden", "warden"),
    ("trainwarden-run", "launcher and rank"),
    ("cli store", "store"),
    ("cli worker", "worker"),
    ("cli actions", "action service"),
    ("cli collect", "collector"),
    ("cli demo", "demonstration"),
    ("cli broker", "broker"),
)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tw-process-cost-") as folder:
        figures = measure(folder, given.seconds)
    for role, row in figures.items():
        print(
            f"{role:20} x{row['processes']:<3} {100 * row['cpu_core_ratio']:6.2f} % of a core  {row['pss_mb']:8.1f} MB"
        )
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(folder: str, seconds: float) -> dict[str, dict[str, float]]:
    """Processor time and memory of each role over `seconds`, once all ranks train."""
    minutes = (SETTLE_S + seconds + 60.0) / 60.0
    command = [sys.executable, "-m", "trainwarden.cli", "demo", "--fault", "none", "--minutes", f"{minutes:.1f}"]
    demo = subprocess.Popen([*command, "--directory", f"{folder}/demo"], stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    try:
        if not any("FAULT none" in line for line in demo.stdout):
            raise SystemExit("the demonstration ended before all ranks trained")
        time.sleep(SETTLE_S)
        return _between(demo.pid, seconds)
    finally:
        demo.terminate()
        demo.stdout.read()
        demo.wait()


def _between(root: int, seconds: float) -> dict[str, dict[str, float]]:
    found = {pid: role for pid in (root, *_descendants(root)) if (role := _role(pid))}
    before = {pid: _own_cpu_s(pid) for pid in found}
    started = time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - started
    figures: dict[str, dict[str, float]] = defaultdict(lambda: {"processes": 0, "cpu_core_ratio": 0.0, "pss_mb": 0.0})
    for pid, role in sorted(found.items(), key=lambda item: item[1]):
        row = figures[role]
        row["processes"] += 1
        row["cpu_core_ratio"] = round(row["cpu_core_ratio"] + (_own_cpu_s(pid) - before[pid]) / elapsed_s, 5)
        row["pss_mb"] = round(row["pss_mb"] + _own_pss_bytes(pid) / 1e6, 1)
    return dict(figures)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            children[int(stat.rpartition(")")[2].split()[1])].append(int(entry))
    found, waiting = [], [root]
    while waiting:
        mine = children[waiting.pop()]
        found += mine
        waiting += mine
    return found


def _role(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return next((role for mark, role in ROLES if mark in line), "")


def _own_cpu_s(pid: int) -> float:
    try:
        return cpu_s(pid)
    except OSError:
        return 0.0


def _own_pss_bytes(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024


if __name__ == "__main__":
    raise SystemExit(main())
