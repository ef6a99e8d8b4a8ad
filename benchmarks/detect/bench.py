"""The whole benchmark: check the metric, run the methods, summarise, write JSON, page and pictures."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from benchmarks.detect import data, report, summary
from benchmarks.detect.methods.base import Method
from benchmarks.detect.methods.registry import discover, missing, package_version, pick
from benchmarks.detect.published import Check, check_metric
from benchmarks.detect.run import Plan, note_whole_nab, run_method
from benchmarks.detect.store import MethodResults, Store

PACKAGES = ("numpy", "pandas", "scipy", "sklearn", "statsmodels", "pyod", "river", "adtk", "stumpy", "prophet")


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    split: str
    sets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: int
    root: Path
    results: Path
    page: Path
    json: Path | None
    fresh: bool


def benchmark(options: Options, now: datetime, say: Callable[[str], None]) -> int:
    """Run what was asked for; 0 when the metric's check holds and every run gave scores."""
    checks = check_metric(options.root) if "smd" in options.sets else []
    if not checked(checks, say):
        return 1
    known = discover()
    chosen = pick(known, options.methods)
    left_out = absent(chosen, say)
    plan = Plan(options.split, options.sets, options.seeds, options.root, Store(options.results), options.fresh)
    test_runs(options, now, sorted(set(chosen) - set(left_out)), say)
    series = plan.series()
    results = [run_method(one, plan, series, say) for name, one in chosen.items() if name not in left_out]
    if "nab" in options.sets:
        note_whole_nab(plan.store, known, results, options.root)
    whole = summed_up(options, now, results, checks, left_out)
    write(whole, options)
    for line in report.table(whole):
        say(line)
    for name, reason in left_out.items():
        say(f"NOT RUN: {name}: {reason}")
    for name in whole.failed:
        say(f"FAILED: {name}")
    return 1 if whole.failed else 0


def checked(checks: list[Check], say: Callable[[str], None]) -> bool:
    """Say how our VUS-PR of PCA compares with the published values; False when one is off by more than 0.001."""
    for one in checks:
        verdict = "ok" if one.right else "WRONG: the metric does not reproduce TSB-AD; nothing was run"
        say(f"check {one.series}: PCA VUS-PR {one.ours:.4f}, published {one.published:.4f}: {verdict}")
    return all(one.right for one in checks)


def absent(chosen: dict[str, type[Method]], say: Callable[[str], None]) -> dict[str, str]:
    """Methods whose packages are not installed, with the reason; said loudly."""
    out = {}
    for name, method in chosen.items():
        if lacking := missing(method):
            out[name] = (
                f"needs {', '.join(lacking)}, which is not installed here (`make bench-detect` builds an environment that has it)"
            )
            say(f"NOT RUN: {name}: {out[name]}")
    return out


def test_runs(options: Options, now: datetime, methods: list[str], say: Callable[[str], None]) -> None:
    """The test series are for one look: say when each method was last run on them, and note this run."""
    if options.split == "tune":
        return
    path = options.results / "detect" / "test_runs.log"
    earlier = path.read_text().splitlines() if path.is_file() else []
    say(f"test series: {'last run ' + earlier[-1] if earlier else 'never run before'} ({len(earlier)} runs so far)")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*earlier, f"{now:%Y-%m-%d %H:%M} UTC: {' '.join(methods)}"]) + "\n")


def summed_up(
    options: Options, now: datetime, results: list[MethodResults], checks: list[Check], left_out: dict[str, str]
) -> summary.Whole:
    """All figures of this run."""
    names = {one: data.split_names(one, options.split, options.root) for one in options.sets}
    wanted = {f"{one}/{name}" for one in names for name in names[one]}
    broken = [
        f"{one.method} {key}: {record.error.strip().splitlines()[-1]}"
        for one in results
        for key, record in one.records.items()
        if record.error and record.series in wanted
    ]
    return summary.Whole(
        split=options.split,
        date=f"{now:%Y-%m-%d}",
        seeds=options.seeds,
        sets=[summary.summarise(one, names[one], results) for one in options.sets],
        nab={one.method: one.nab for one in results if one.nab},
        checks=checks,
        left_out=left_out,
        failed=broken,
        packages={"python": platform.python_version()} | {name: package_version(name) for name in PACKAGES},
        papers={one.method: one.paper for one in results},
    )


def write(whole: summary.Whole, options: Options) -> None:
    """The summary as JSON, and the page from the summaries of every split run so far. A run of some sets or methods makes no page."""
    text = msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"
    if options.json:
        options.json.write_bytes(text)
    if options.methods or set(options.sets) != set(data.SETS):
        return
    kept = options.results / f"detect-{options.split}.json"
    kept.write_bytes(text)
    report.write_page(options.page, options.results, options.root)
