"""When in a run of `benchmarks.scale` something happened: delays, late ticks, memory and cores by the minute, and the worst minute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.selfmetrics import quantile_ms

Page = dict[tuple[str, str], float]
"""Values of a metrics page by name and labels."""
MINUTE_S = 60.0
COINCIDES = 4
"""So many of what rose most in the worst minute are named."""


@dataclass(frozen=True)
class Sample:
    """What the workers' pages and the process table said `at_s` seconds after the beginning: `cpu_s` and `pss_mb` by part."""

    at_s: float
    page: Page
    cpu_s: dict[str, float]
    pss_mb: dict[str, float]


def together(pages: Iterable[Page]) -> Page:
    """Sum over workers."""
    found: Page = {}
    for page in pages:
        for key, value in page.items():
            found[key] = found.get(key, 0.0) + value
    return found


def stretch(first: Sample, last: Sample) -> dict[str, Any]:
    """What happened between two samples; costs in milliseconds a second, `late` and `ticks` as counts, memory at the end."""
    took_s = max(last.at_s - first.at_s, 1e-9)

    def grown(name: str, by: str = "") -> dict[str, float]:
        return {
            labels: value - first.page.get((known, labels), 0.0)
            for (known, labels), value in last.page.items()
            if known == name and by in labels
        }

    buckets = {_limit(labels): count for labels, count in grown("tw_tick_delay_ms_bucket").items()}
    costs = {_named(labels): ms / took_s for labels, ms in grown("tw_detector_ms_sum").items()}
    costs["snapshots"] = sum(grown("tw_snapshot_ms_sum").values()) / took_s
    costs |= {
        f"{part} (process)": 1000 * (spent_s - first.cpu_s[part]) / took_s for part, spent_s in last.cpu_s.items()
    }
    return {
        "at_s": round(last.at_s, 1),
        "ticks": round(buckets.get(math.inf, 0.0)),
        "p50_ms": quantile_ms(buckets, 0.5),
        "p95_ms": quantile_ms(buckets, 0.95),
        "late": round(sum(grown("tw_ticks_late_total").values())),
        "snapshots": round(sum(grown("tw_snapshot_ms_count").values())),
        "verdicts": round(sum(grown("tw_verdicts_total").values())),
        "pss_mb": dict(last.pss_mb),
        "ms_per_s": {name: round(ms, 1) for name, ms in costs.items() if ms >= 0.5},
    }


def by_minute(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """`stretch` of each whole minute."""
    marks = [samples[0]]
    for sample in samples[1:]:
        if sample.at_s - marks[-1].at_s >= MINUTE_S - 0.5:
            marks.append(sample)
    return [stretch(first, last) for first, last in pairwise(marks)]


def by_sample(samples: Sequence[Sample]) -> list[str]:
    """A line for each sample: seconds, grid points, p50 and p95 of their delay, late ticks, snapshots, memory by part."""
    found = []
    for first, last in pairwise(samples):
        row = stretch(first, last)
        told = [row[name] for name in ("at_s", "ticks", "p50_ms", "p95_ms", "late", "snapshots")]
        found.append(" ".join(map(str, [*told, *row["pss_mb"].values()])))
    return found


def worst(minutes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The minute with the longest delays, and what cost more in it than in the median minute, dearest first."""
    known = [minute for minute in minutes if minute["p95_ms"] is not None]
    if not known:
        return {}
    found = max(known, key=lambda minute: minute["p95_ms"])
    names = {name for minute in minutes for name in minute["ms_per_s"]}
    usual = {name: median(minute["ms_per_s"].get(name, 0.0) for minute in minutes) for name in names}
    more = {name: round(found["ms_per_s"].get(name, 0.0) - usual[name], 1) for name in names}
    rose = sorted((name for name in names if more[name] > 0), key=lambda name: -more[name])[:COINCIDES]
    told = {name: found[name] for name in ("at_s", "p50_ms", "p95_ms", "late", "snapshots")}
    return {**told, "above_median_ms_per_s": {name: more[name] for name in rose}}


def late_minutes(minutes: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Ticks that came late, by the minute in which they did (its end, seconds)."""
    return {f"{minute['at_s']:g}": minute["late"] for minute in minutes if minute["late"]}


def growth(samples: Sequence[Sample], part: str) -> dict[str, float]:
    """Memory at the end over that at the beginning, of the whole and of the last third."""
    values = [sample.pss_mb[part] for sample in samples]
    third = values[2 * (len(values) - 1) // 3]
    return {"whole": round(values[-1] / max(values[0], 1.0), 3), "last_third": round(values[-1] / max(third, 1.0), 3)}


def of_window_ms(
    heard: Iterable[tuple[int, int]], quantile: Callable[[list[float], float], float | None]
) -> dict[str, Any]:
    """From the end of what a verdict looked at to the moment at which it could be read, both in ns, over the whole run: all, and the worst
    minute of it by p95 (seconds since the first)."""
    told = sorted((at_ns, (at_ns - window_end_ns) / NS_PER_MS) for window_end_ns, at_ns in heard)
    minutes: dict[int, list[float]] = {}
    for at_ns, delay_ms in told:
        minutes.setdefault(int((at_ns - told[0][0]) / NS_PER_S // MINUTE_S), []).append(delay_ms)
    p95s = {minute: quantile(sorted(delays), 0.95) or 0.0 for minute, delays in minutes.items()}
    at = max(p95s, key=lambda minute: p95s[minute], default=None)
    every = sorted(delay_ms for _, delay_ms in told)
    return {
        "verdicts": len(every),
        "p50_ms": quantile(every, 0.5),
        "p95_ms": quantile(every, 0.95),
        "worst_minute": None
        if at is None
        else {"at_s": MINUTE_S * (at + 1), "p95_ms": p95s[at], "verdicts": len(minutes[at])},
    }


def lines(result: dict[str, Any]) -> list[str]:
    """For people."""
    found = [f"memory at the end over the beginning, and over that after two thirds: {result['memory_growth']}"]
    if bad := result["worst_minute"]:
        found.append(
            f"worst minute ends at {bad['at_s']:g} s: grid point to frame p50 {bad['p50_ms']} p95 {bad['p95_ms']} ms, {bad['late']} late, "
            f"{bad['snapshots']} snapshots; above the median minute by (ms/s) {bad['above_median_ms_per_s']}"
        )
    if result["late_by_minute"]:
        found.append(f"late ticks by the minute: {result['late_by_minute']}")
    found.append(f"end of its window to verdict, the whole run: {result['window_to_verdict']}")
    return found


def _limit(labels: str) -> float:
    return float(labels.split('"')[1])


def _named(labels: str) -> str:
    return labels.split('"')[1]
