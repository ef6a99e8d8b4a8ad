"""From the figures of every run to one row a method and set, and ours against the best peer, series by series."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from benchmarks.detect.evaluate import RISKS, Record
from benchmarks.detect.methods.base import F64
from benchmarks.detect.metrics.compare import Paired, paired
from benchmarks.detect.published import Check
from benchmarks.detect.store import MethodResults, NabFigures

STRICT, LOOSE = f"{RISKS[1]:g}", f"{RISKS[0]:g}"


@dataclass
class Row:
    """Means of one method over the series of one set; None where there is nothing to take a mean of. Delays in seconds."""

    method: str
    ours: bool
    online: bool
    series: int
    seeds: int
    vus_pr: float | None
    vus_pr_spread: float
    """Standard deviation of the mean over seeds."""
    rf1: dict[str, float | None]
    """Range-based F1 by risk of the label-free line."""
    found: dict[str, float | None]
    """Share of events found, by risk."""
    delay_p50_s: float | None
    delay_p95_s: float | None
    false_alarms_per_day: dict[str, float]
    cpu_s_per_day: float
    peak_mb: float
    most_thinned: int


@dataclass
class Versus:
    """One of ours against the best peer of a set."""

    method: str
    peer: str
    difference: Paired


@dataclass
class SetSummary:
    """All rows of one set, best first."""

    set: str
    rows: list[Row]
    versus: list[Versus] = field(default_factory=list)


@dataclass
class Whole:
    """What one run of the benchmark says, as it is written to JSON."""

    split: str
    date: str
    seeds: int
    sets: list[SetSummary]
    nab: dict[str, dict[str, NabFigures]]
    """By method and split."""
    checks: list[Check]
    left_out: dict[str, str]
    failed: list[str]
    packages: dict[str, str]
    papers: dict[str, str]


def summarise(set_name: str, names: list[str], results: list[MethodResults]) -> SetSummary:
    """One set: rows of the methods that have every series, and each of ours against the best peer."""
    keys = [f"{set_name}/{name}" for name in names]
    whole = {one.method: of_method(one, keys) for one in results}
    complete = {method: records for method, records in whole.items() if records}
    rows = [row_of(one, complete[one.method]) for one in results if one.method in complete]
    rows.sort(key=lambda row: -(row.vus_pr or 0.0))
    summary = SetSummary(set_name, rows)
    peers = [row for row in rows if not row.ours and row.vus_pr is not None]
    for row in rows:
        if row.ours and peers:
            best = peers[0].method
            difference = paired(by_series(complete[row.method]), by_series(complete[best]))
            summary.versus.append(Versus(row.method, best, difference))
    return summary


def of_method(results: MethodResults, keys: list[str]) -> list[list[Record]]:
    """Records of each seed in the order of `keys`; nothing unless every series succeeded."""
    seeds = sorted({record.seed for key, record in results.records.items() if key.rsplit("@", 1)[0] in set(keys)})
    table = [[results.records.get(f"{key}@{seed}") for key in keys] for seed in seeds]
    return [
        [one for one in row if one is not None]
        for row in table
        if all(one is not None and not one.error for one in row)
    ]


def row_of(results: MethodResults, seeds: list[list[Record]]) -> Row:
    """Means over series and seeds."""
    surface = [[one.vus_pr for one in records if one.vus_pr is not None] for records in seeds]
    every = [one for records in seeds for one in records]
    days = sum(one.days for one in every)
    delays = [delay for one in every for delay in one.lines[STRICT].delays_s]
    return Row(
        method=results.method,
        ours=results.ours,
        online=results.online,
        series=len(seeds[0]),
        seeds=len(seeds),
        vus_pr=fmean(fmean(one) for one in surface) if surface[0] else None,
        vus_pr_spread=float(np.std([fmean(one) for one in surface])) if surface[0] else 0.0,
        rf1={risk: mean_f1(every, risk) for risk in (LOOSE, STRICT)},
        found={risk: found_ratio(every, risk) for risk in (LOOSE, STRICT)},
        delay_p50_s=float(np.quantile(delays, 0.5)) if delays else None,
        delay_p95_s=float(np.quantile(delays, 0.95)) if delays else None,
        false_alarms_per_day={
            risk: sum(one.lines[risk].false_alarms for one in every) / days for risk in (LOOSE, STRICT)
        },
        cpu_s_per_day=sum(one.cpu_s for one in every) / days,
        peak_mb=max(one.peak_mb for one in every),
        most_thinned=max(one.thinned for one in every),
    )


def mean_f1(records: list[Record], risk: str) -> float | None:
    """Mean range-based F1 over the series that have anomalies."""
    some = [one.lines[risk].f1 for one in records if one.windows]
    return fmean(some) if some else None


def found_ratio(records: list[Record], risk: str) -> float | None:
    """Share of all events found."""
    events = sum(one.lines[risk].events for one in records)
    return sum(one.lines[risk].found for one in records) / events if events else None


def by_series(seeds: list[list[Record]]) -> F64:
    """VUS-PR of each series with anomalies, mean over seeds."""
    surface = [[one.vus_pr for one in records if one.vus_pr is not None] for records in seeds]
    return np.asarray(np.mean(np.array(surface, np.float64), axis=0), np.float64)
