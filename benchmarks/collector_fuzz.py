"""Damaged captures for every parser of the collectors: each answers, or refuses with the error that it names.

    python -m benchmarks.collector_fuzz [--cases 500000] [--seed TEXT] [--only NAME ...]

The same seed makes the same cases; a failure names its parser and number. Which parsers there are is in `tests/collectors/parsers.py`,
and a test holds that list complete. Prints cases, seconds and failures of each; exit code 1 when something failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.collectors.fuzzing import failures
from tests.collectors.parsers import PARSERS

SHOWN = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Feed them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500_000, help="of all parsers together")
    parser.add_argument("--seed", default="", help="any text; empty makes the cases of the tests")
    parser.add_argument("--only", nargs="*", choices=sorted(PARSERS), metavar="NAME", help="some parsers only")
    given = parser.parse_args(arguments)
    names = sorted(given.only or PARSERS)
    each = max(1, given.cases // len(names))
    failed = sum(_feed(name, each, given.seed) for name in names)
    print(f"{len(names)} parsers, {each * len(names)} cases, seed {given.seed!r}: {failed} failed")
    return 1 if failed else 0


def _feed(name: str, count: int, seed: str) -> int:
    """Cases of one parser; how many failed."""
    begun_s, found = time.process_time(), 0
    for sentence in failures(name, count, seed):
        found += 1
        if found <= SHOWN:
            print(sentence)
    print(f"{name:24} {count:7} cases {time.process_time() - begun_s:7.1f} s {found:5} failed", flush=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
