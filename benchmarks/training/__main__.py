"""`python -m benchmarks.training`: everything of the training side beside its peers, one table of bars met and missed.

Saves, recovery of a killed rank, fewer and more nodes, shares, link escape; each is a program of its own that can be run alone. The whole
takes about a quarter of an hour on two cores, ``--quick`` about five minutes (and leaves the published results
as they are). What cannot be measured here says why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.training.bars import Bar, read

PART_LIMIT_S = 900.0
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Part:
    """A program, its flags, and those for a quick look (``None``: not in one); ``key``: its own among the figures of a file."""

    module: str
    result: str
    whole: tuple[str, ...]
    quick: tuple[str, ...] | None
    key: str = ""


PARTS = {
    "saves": Part("saves", "training_checkpoints", ("--rounds", "3"), ("--rounds", "3", "--state-mb", "250")),
    "kill": Part("recovery", "training_recovery", ("--trials", "2"), ("--trials", "1"), "kill"),
    "elastic": Part("recovery", "training_recovery", ("--elastic",), None, "elastic"),
    "rebalance": Part("rebalance", "training_rebalance", ("--steps", "12"), ("--steps", "8"), "pace"),
    "links": Part("links", "links_ddp", ("--trials", "24", "--others", "3"), ("--trials", "6", "--others", "1")),
}


def run(name: str, flags: tuple[str, ...], out: Path) -> dict[str, Any]:
    """Bars and notes of one part; a part that ended without any is a note and no success."""
    command = ["-m", f"benchmarks.training.{PARTS[name].module}", *flags, "--json", str(out)]
    print(f"\n== {name}: python {' '.join(command)}", flush=True)
    command, before, began = [sys.executable, *command], _written_at(out), time.monotonic()
    try:
        code = subprocess.run(command, check=False, timeout=PART_LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return {"bars": [], "notes": [f"it did not end within {PART_LIMIT_S:.0f} s"], "failed": True}
    print(f"== {name} took {time.monotonic() - began:.0f} s", flush=True)
    if _written_at(out) == before:
        return {"bars": [], "notes": [f"it ended with code {code} and no figures; its words are above"], "failed": True}
    kept: dict[str, Any] = json.loads(out.read_text())
    return dict(kept.get(PARTS[name].key, kept))


def _written_at(out: Path) -> int:
    return out.stat().st_mtime_ns if out.exists() else 0


def table(found: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    """Lines for people, and whether all is well."""
    lines, well = ["", "bars of the training side"], True
    for name, part in found.items():
        bars: list[Bar] = read(part.get("bars", []))
        well = well and all(bar.met for bar in bars) and not part.get("failed", False)
        lines.append(f"{name}")
        lines += [bar.line() for bar in bars]
        lines += [f"       {note}" for note in part.get("notes", [])]
    every = [bar for part in found.values() for bar in read(part.get("bars", []))]
    lines.append(f"{sum(bar.met for bar in every)} of {len(every)} bars met")
    return lines, well


def main() -> int:
    """Run, print; 1 when a bar is missed or a part gave no figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few trials each, nothing of more and fewer nodes")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas; default: %(default)s")
    given = parser.parse_args()
    wanted = given.parts.split(",")
    if unknown := sorted(set(wanted) - set(PARTS)):
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="tw-bench-") as folder:
        for name in wanted:
            flags = PARTS[name].quick if given.quick else PARTS[name].whole
            if flags is None:
                found[name] = {"notes": ["not part of a quick look"]}
            else:
                found[name] = run(
                    name, flags, (Path(folder) if given.quick else RESULTS) / f"{PARTS[name].result}.json"
                )
    lines, well = table(found)
    print("\n".join(lines))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
