"""Foretelling on simulated fleets: what is named in time, what is named falsely, and whether the probabilities are right.

``python -m benchmarks.foretell`` runs seeds that were not used in development (``--first-seed 1000``) and prints one JSON line. Seeds below
1000 are for development; ``--fit`` prints the reliability table that they give.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from detectors.base import Detector
from detectors.series.foretell import Foretell
from detectors.series.reliability import FAR, NEAR
from detectors.series.scenes import KINDS, START_NS, Fleet, Precursor
from detectors.series.watch import watch_of
from detectors.synthetic import node_name
from trainwarden.clock import NS_PER_S

AHEAD_S = 600.0
NODES = 32
HOURS = 24


@dataclass
class Tally:
    """Counts over fleets."""

    node_days: float = 0.0
    failures: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    in_time: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    lead_s: list[float] = field(default_factory=list)
    false: list[str] = field(default_factory=list)
    forecasts: list[tuple[str, float, float, bool]] = field(default_factory=list)
    """(law, time to the limit / horizon, probability, whether it was reached within the horizon)"""
    detector_s: float = 0.0
    ticks: int = 0


def precursors(seed: int, hours: int) -> tuple[Precursor, ...]:
    """One trend of each of six kinds, on six nodes; a third of them stall before the limit."""
    rng = np.random.default_rng([seed, 77])
    chosen = rng.permutation(sorted(KINDS))[:6].tolist()
    nodes = rng.permutation(NODES)[:6].tolist()
    made = []
    for kind, node in zip(chosen, nodes, strict=True):
        duration_s = math.exp(rng.uniform(math.log(1800), math.log(6 * 3600)))
        onset_s = rng.uniform(3 * 3600, max(3.1 * 3600, hours * 3600 - duration_s - 1800))
        reach = 1.0 if rng.random() < 2 / 3 else float(rng.uniform(0.2, 0.8))
        course = "climb" if rng.random() < 0.5 else "ramp"
        made.append(Precursor(kind, int(node), int(rng.integers(2)), float(onset_s), duration_s, course, reach))
    return tuple(made)


def run_fleet(seed: int, hours: int, tally: Tally, faulty: bool, detector: Detector | None = None) -> None:
    """Add one fleet's day to the tally."""
    trends = precursors(seed, hours) if faulty else ()
    detector = detector or Foretell()
    horizon_s = float(detector.settings.horizon_s)
    said: dict[str, float] = {}
    by_node = {node_name(trend.node): trend for trend in trends}
    for frame in Fleet(NODES, 2, seed, trends).frames(hours * 60):
        start = time.process_time()
        verdicts = detector.update(frame)
        tally.detector_s += time.process_time() - start
        tally.ticks += 1
        for verdict in verdicts:
            if verdict.clears:
                continue
            at_s = (verdict.window_end_ns - START_NS) / NS_PER_S
            trend = by_node.get(verdict.entity.node)
            if trend is None or at_s < trend.onset_s:
                tally.false.append(f"seed {seed} at {at_s / 3600:.2f} h: {verdict.text}")
                continue
            said.setdefault(verdict.entity.node, at_s)
            kind = KINDS[trend.kind]
            watch = watch_of(kind.family, kind.metric)
            law = watch.law if watch else "none"
            tally.forecasts.append(
                (str(law), verdict.value / horizon_s, verdict.confidence, trend.fails_s <= at_s + horizon_s)
            )
    tally.node_days += NODES * hours / 24
    for node, trend in by_node.items():
        if trend.reach >= 1.0 and trend.fails_s < hours * 3600:
            tally.failures[trend.kind] += 1
            lead_s = trend.fails_s - said[node] if node in said else -math.inf
            tally.in_time[trend.kind] += lead_s >= AHEAD_S
            tally.lead_s += [lead_s] if lead_s > 0 else []


def reliability(forecasts: Iterable[tuple[str, float, float, bool]]) -> dict[str, list[tuple[int, float]]]:
    """Per law: (number, share come true) of near, middle and far limits."""
    bins: dict[str, list[list[bool]]] = defaultdict(lambda: [[], [], []])
    for law, share, _, came_true in forecasts:
        bins[law][0 if share < NEAR else 1 if share < FAR else 2].append(came_true)
    return {law: [(len(b), round(float(np.mean(b)), 3) if b else math.nan) for b in rows] for law, rows in bins.items()}


def summary(tally: Tally) -> dict[str, object]:
    """What the run came to."""
    failures, in_time = sum(tally.failures.values()), sum(tally.in_time.values())
    brier = [(p - hit) ** 2 for _, _, p, hit in tally.forecasts]
    base = float(np.mean([hit for *_, hit in tally.forecasts])) if tally.forecasts else math.nan
    leads = np.array(tally.lead_s)
    return {
        "node_days": tally.node_days, "false": len(tally.false),
        "false_per_1000_node_days": round(1000 * len(tally.false) / tally.node_days, 2),
        "failures": failures, "named_10_min_ahead": in_time, "share": round(in_time / failures, 3) if failures else None,
        "by_kind": {kind: f"{tally.in_time[kind]}/{tally.failures[kind]}" for kind in sorted(tally.failures)},
        "lead_min_p50": round(float(np.median(leads)) / 60, 1) if len(leads) else None, "forecasts": len(brier),
        "brier": round(float(np.mean(brier)), 3) if brier else None, "brier_of_base_rate": round(base * (1 - base), 3) if brier else None,
        "reliability": reliability(tally.forecasts), "cpu_ms_per_tick": round(1000 * tally.detector_s / max(1, tally.ticks), 2),
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--faulty", type=int, default=16, help="fleets with precursors, a day of 32 nodes each")
    parser.add_argument("--healthy", type=int, default=32, help="fleets without, a day of 32 nodes each")
    parser.add_argument("--hours", type=int, default=HOURS)
    arguments = parser.parse_args()
    tally = Tally()
    for number in range(arguments.faulty + arguments.healthy):
        run_fleet(arguments.first_seed + number, arguments.hours, tally, faulty=number < arguments.faulty)
    for line in tally.false:
        print("false:", line)
    print(json.dumps(summary(tally)))


if __name__ == "__main__":
    main()
