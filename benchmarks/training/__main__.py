"""`python -m benchmarks.training`: everything of the training side beside its peers, one table of bars met and missed.

Saves, recovery of a killed rank, fewer and more nodes, shares, link escape; each is a program of its own that can be run alone, with more
rounds by flags of its own. The whole takes about a quarter of an hour on two cores and ends within ``--minutes``: what there was no
time for is said, and no success. The peers' environment is made before that. ``--quick`` takes about five minutes and leaves the
published results as they are. A part that fails says so, the others go on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.training import peers
from benchmarks.training.bars import Bar, circumstances, read

MINUTES = 19.0
PART_LIMIT_S = 420.0
"""Of one part: twice to four times what it takes on a quiet machine."""
END_S = 30.0
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
    "quota": Part("rebalance", "training_rebalance", ("--steps", "12", "--quota", "20"), None, "quota"),
    "links": Part("links", "links_ddp_short", ("--trials", "24", "--others", "3"), ("--trials", "6", "--others", "1")),
}


def run(name: str, flags: tuple[str, ...], out: Path, limit_s: float = PART_LIMIT_S) -> dict[str, Any]:
    """Bars and notes of one part; a part that ended without any is a note and no success."""
    if limit_s <= 0:
        return _failed("the time was over before it began (--minutes)")
    command = ["-m", f"benchmarks.training.{PARTS[name].module}", *flags, "--json", str(out)]
    print(f"\n== {name}: python {' '.join(command)}", flush=True)
    before, began = _written_at(out), time.monotonic()
    code = _run_within([sys.executable, *command], limit_s)
    took_s = time.monotonic() - began
    print(f"== {name} took {took_s:.0f} s", flush=True)
    if code is None:
        return _failed(f"it did not end within {limit_s:.0f} s", took_s)
    if _written_at(out) == before:
        return _failed(f"it ended with code {code} and no figures; its words are above", took_s)
    kept: dict[str, Any] = json.loads(out.read_text())
    return {"took_s": took_s, **kept.get(PARTS[name].key, kept)}


def _failed(why: str, took_s: float = 0.0) -> dict[str, Any]:
    return {"bars": [], "notes": [why], "failed": True, "took_s": took_s}


def _run_within(command: list[str], limit_s: float) -> int | None:
    """Exit code; ``None`` when it had to be ended: first as by Ctrl-C, so that it takes its own children along."""
    # a shell's background job ignores it, and its children would
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = subprocess.Popen(command, start_new_session=True)
    try:
        return started.wait(limit_s)
    except subprocess.TimeoutExpired:
        started.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(END_S)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def _written_at(out: Path) -> int:
    return out.stat().st_mtime_ns if out.exists() else 0


def table(found: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    """Lines for people, and whether all is well."""
    lines, well = ["", "bars of the training side"], True
    for name, part in found.items():
        bars: list[Bar] = read(part.get("bars", []))
        well = well and all(bar.met for bar in bars) and not part.get("failed", False)
        lines.append(f"{name} ({part['took_s']:.0f} s)" if part.get("took_s") else name)
        lines += [bar.line() for bar in bars]
        lines += [f"       {note}" for note in part.get("notes", [])]
    every = [bar for part in found.values() for bar in read(part.get("bars", []))]
    lines.append(f"{sum(bar.met for bar in every)} of {len(every)} bars met")
    return lines, well


def prepare_peers() -> None:
    """Make the peers' environment once; what cannot be had is said again by the part that wants it."""
    began = time.monotonic()
    for peer in peers.NEEDS:
        _, why_not = peers.interpreter(peer)
        print(f"{peer}: {why_not or 'ready'}", flush=True)
    print(f"peers took {time.monotonic() - began:.0f} s", flush=True)


def measure(wanted: list[str], quick: bool, minutes: float, folder: Path) -> dict[str, dict[str, Any]]:
    """Every part wanted, one after the other, all within the time."""
    until, found = time.monotonic() + 60.0 * minutes, dict[str, dict[str, Any]]()
    for name in wanted:
        flags = PARTS[name].quick if quick else PARTS[name].whole
        if flags is None:
            found[name] = {"notes": ["not part of a quick look"]}
            continue
        left_s = until - time.monotonic() - END_S
        found[name] = run(name, flags, folder / f"{PARTS[name].result}.json", min(PART_LIMIT_S, left_s))
    return found


def summary(found: dict[str, dict[str, Any]], machine: dict[str, Any], took_s: float) -> dict[str, Any]:
    """For a file: bars, notes and time of every part, without their single figures."""
    keys = ("took_s", "failed", "bars", "notes")
    parts = {name: {key: part[key] for key in keys if key in part} for name, part in found.items()}
    return {"machine": machine, "took_s": took_s, "parts": parts, "met": table(found)[1]}


def main() -> int:
    """Run, print, write; 1 when a bar is missed or a part gave no figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few trials each, nothing of more and fewer nodes")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together; default: %(default)s")
    parser.add_argument("--json", type=Path, help="the table; default: training.json of the results, none with --quick")
    given = parser.parse_args()
    wanted = given.parts.split(",")
    if unknown := sorted(set(wanted) - set(PARTS)):
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    prepare_peers()
    machine, began = circumstances(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tw-bench-") as folder:
        found = measure(wanted, given.quick, given.minutes, Path(folder) if given.quick else RESULTS)
    took_s = time.monotonic() - began
    lines, well = table(found)
    print("\n".join([*lines, f"all of it took {took_s / 60:.1f} minutes"]))
    out = given.json or (None if given.quick else RESULTS / "training.json")
    if out is not None:
        out.write_text(json.dumps(summary(found, machine, took_s), indent=1) + "\n")
        print(f"written to {out}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
