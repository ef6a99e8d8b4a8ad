"""The command line of the benchmark of detectors."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.detect import data
from benchmarks.detect.bench import Options, benchmark
from benchmarks.detect.methods.registry import MethodError
from benchmarks.detect.report import PAGE
from benchmarks.detect.store import RESULTS, StoreError


def run(arguments: list[str]) -> int:
    """Parse, run, print; 0 when every run gave scores and the metric's check holds, 2 for a request that cannot be met."""
    given = parser().parse_args(arguments)
    options = Options(
        split=given.split,
        sets=tuple(given.sets),
        methods=tuple(given.methods),
        seeds=given.seeds,
        root=given.data,
        results=given.results,
        page=given.page,
        json=given.json,
        fresh=given.fresh,
    )
    try:
        return benchmark(options, datetime.now(UTC), lambda line: print(line, flush=True))
    except (data.DataError, MethodError, StoreError) as wrong:
        print(f"benchmark of detectors: {wrong}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Options, their defaults and what they mean."""
    out = argparse.ArgumentParser(prog="python -m benchmarks.detect", description=__doc__)
    out.add_argument("--split", choices=("tune", "test", "all"), default="tune")
    out.add_argument("--sets", nargs="+", choices=data.SETS, default=list(data.SETS))
    out.add_argument("--methods", nargs="+", default=[], help="names; all when left out")
    out.add_argument("--seeds", type=int, default=1, help="seeds of the methods that draw random numbers")
    out.add_argument("--data", type=Path, default=data.DATA, help="folder that holds smd/, asd/, nab/ and tsb_ad/")
    out.add_argument("--results", type=Path, default=RESULTS, help="where figures are kept, so that a run resumes")
    out.add_argument("--json", type=Path, default=None, help="also write the summary here")
    out.add_argument("--page", type=Path, default=PAGE, help="page to write")
    out.add_argument("--fresh", action="store_true", help="run again what is known")
    return out
