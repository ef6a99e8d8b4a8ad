"""Foretelling on simulated fleets: what is named in time, what is named falsely, and whether the probabilities are right.

    python -m benchmarks.foretell [--first-seed 1000] [--faulty 16] [--healthy 32] [--nodes 32]
    python -m benchmarks.foretell --fit --first-seed 100 --faulty 9 --trends 20 --healthy 0

The first form runs seeds that were not used in development and prints false foretellings as they come, a reliability table and one JSON
line. Seeds below 1000 are for development; ``--fit`` fits the weights of `detectors.series.reliability` to what they give and writes its
table. A false foretelling counts as one that did not come true. The Brier score is shown beside that of two forecasters who know nothing of
a trend: one that always says the share of the fitted seeds, and one that knows this run's own share beforehand.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import detectors.series.reliability as law
from detectors.base import Detector
from detectors.risk import brier, calibration_error, reliability
from detectors.series.foretell import Foretell
from detectors.series.laws import Finding
from detectors.series.panel import Panel
from detectors.series.scenes import KINDS, START_NS, Fleet, Precursor
from detectors.synthetic import node_name
from trainwarden.clock import NS_PER_S
from trainwarden.records import Verdict

AHEAD_S = 600.0
NODES = 32
HOURS = 24
TRENDS = 6
FITTED_SHARE = 0.72
"""Share of the foretellings of the fitted seeds that came true; ``--fit`` prints it."""


@dataclass(frozen=True)
class Forecast:
    """One foretelling and whether it came true."""

    signs: law.Signs
    probability: float
    came_true: bool


@dataclass
class Tally:
    """Counts over fleets."""

    node_days: float = 0.0
    failures: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    in_time: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    lead_s: list[float] = field(default_factory=list)
    false: list[str] = field(default_factory=list)
    forecasts: list[Forecast] = field(default_factory=list)
    detector_s: float = 0.0
    ticks: int = 0


class Noting(Foretell):
    """Remembers what each probability was made of."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.signs: list[law.Signs] = []

    def signs_of(self, panel: Panel, finding: Finding) -> law.Signs:
        self.signs.append(super().signs_of(panel, finding))
        return self.signs[-1]


def precursors(seed: int, hours: int, count: int = TRENDS, fleet_nodes: int = NODES) -> tuple[Precursor, ...]:
    """Trends of different kinds on different nodes; a third of them stall before the limit."""
    rng = np.random.default_rng([seed, 77])
    chosen: list[str] = []
    while len(chosen) < count:
        chosen += rng.permutation(sorted(KINDS)).tolist()
    nodes = rng.permutation(fleet_nodes)[:count].tolist()
    made = []
    for kind, node in zip(chosen[:count], nodes, strict=True):
        duration_s = math.exp(rng.uniform(math.log(1800), math.log(6 * 3600)))
        onset_s = rng.uniform(3 * 3600, max(3.1 * 3600, hours * 3600 - duration_s - 1800))
        reach = 1.0 if rng.random() < 2 / 3 else float(rng.uniform(0.2, 0.8))
        course = "climb" if rng.random() < 0.5 else "ramp"
        made.append(Precursor(kind, int(node), int(rng.integers(2)), float(onset_s), duration_s, course, reach))
    return tuple(made)


def run_fleet(seed: int, hours: int, tally: Tally, trends: Sequence[Precursor], nodes: int = NODES) -> None:
    """Add one fleet's hours to the tally."""
    detector = Noting()
    horizon_s = float(detector.settings.horizon_s)
    by_node = {node_name(trend.node): trend for trend in trends}
    said: dict[str, float] = {}
    for number, verdict in enumerate(_foretellings(detector, Fleet(nodes, 2, seed, tuple(trends)), hours, tally)):
        at_s = (verdict.window_end_ns - START_NS) / NS_PER_S
        trend = by_node.get(verdict.entity.node)
        true_trend = trend is not None and at_s >= trend.onset_s
        if true_trend:
            said.setdefault(verdict.entity.node, at_s)
        else:
            tally.false.append(f"seed {seed} at {at_s / 3600:.2f} h: {verdict.text}")
            print("false:", tally.false[-1], flush=True)
        came_true = trend is not None and true_trend and trend.fails_s <= at_s + horizon_s
        tally.forecasts.append(Forecast(detector.signs[number], verdict.confidence, came_true))
    tally.node_days += nodes * hours / 24
    for node, trend in by_node.items():
        if trend.reach >= 1.0 and trend.fails_s < hours * 3600:
            tally.failures[trend.kind] += 1
            lead_s = trend.fails_s - said[node] if node in said else -math.inf
            tally.in_time[trend.kind] += lead_s >= AHEAD_S
            tally.lead_s += [lead_s] if lead_s > 0 else []


def _foretellings(detector: Detector, fleet: Fleet, hours: int, tally: Tally) -> Iterator[Verdict]:
    for frame in fleet.frames(hours * 60):
        start = time.process_time()
        verdicts = detector.update(frame)
        tally.detector_s += time.process_time() - start
        tally.ticks += 1
        yield from (verdict for verdict in verdicts if not verdict.clears)


def summary(tally: Tally) -> dict[str, object]:
    """What the run came to."""
    failures, in_time = sum(tally.failures.values()), sum(tally.in_time.values())
    sure, right = [f.probability for f in tally.forecasts], [f.came_true for f in tally.forecasts]
    leads = np.array(tally.lead_s)
    share = float(np.mean(right)) if right else math.nan
    return {
        "node_days": tally.node_days, "false": len(tally.false),
        "false_per_1000_node_days": round(1000 * len(tally.false) / tally.node_days, 2),
        "failures": failures, "named_10_min_ahead": in_time, "share": round(in_time / failures, 3) if failures else None,
        "by_kind": {kind: f"{tally.in_time[kind]}/{tally.failures[kind]}" for kind in sorted(tally.failures)},
        "lead_min_p50": round(float(np.median(leads)) / 60, 1) if len(leads) else None, "forecasts": len(right),
        "came_true": round(share, 3), "brier": round(brier(sure, right), 3),
        "brier_of_fitted_share": round(brier([FITTED_SHARE] * len(right), right), 3), "brier_of_own_share": round(share * (1 - share), 3),
        "calibration_error": round(calibration_error(reliability(sure, right, bins=5)), 3),
        "cpu_ms_per_tick": round(1000 * tally.detector_s / max(1, tally.ticks), 2),
    }  # fmt: skip


def table(tally: Tally) -> str:
    """Reliability of the probabilities."""
    lines = [f"{'probability':>12} {'foretold':>9} {'said':>6} {'came true':>10}  95 % interval"]
    rows = reliability([f.probability for f in tally.forecasts], [f.came_true for f in tally.forecasts], bins=5)
    return "\n".join(lines + [
        f"{b.low:5.1f} - {b.high:4.1f} {b.count:9d} {b.confidence:6.2f} {b.right:10.2f}  {b.right_low:.2f} - {b.right_high:.2f}"
        for b in rows
    ])  # fmt: skip


def fitted(forecasts: Sequence[Forecast], ridge: float = 1.0, rounds: int = 50) -> dict[str, float]:
    """Weights of a ridge logistic regression (Newton's method), of each term in its own standard deviations."""
    rows = [forecast.signs.terms() for forecast in forecasts]
    names = [name for name in rows[0] if name != "one"]
    terms = np.array([[row[name] for name in names] for row in rows])
    true = np.array([float(forecast.came_true) for forecast in forecasts])
    middle, scale = terms.mean(axis=0), np.maximum(terms.std(axis=0), 1e-9)
    design = np.column_stack([np.ones(len(rows)), (terms - middle) / scale])
    penalty = np.diag([0.0] + [ridge] * len(names))
    weight = np.zeros(len(names) + 1)
    for _ in range(rounds):
        chance = 1.0 / (1.0 + np.exp(-design @ weight))
        curve = design.T @ (design * (chance * (1.0 - chance))[:, None]) + penalty
        weight += np.linalg.solve(curve, design.T @ (true - chance) - penalty @ weight)
    slopes = weight[1:] / scale
    return {"one": float(weight[0] - slopes @ middle), **dict(zip(names, slopes.tolist(), strict=True))}


def write_table(weights: dict[str, float], path: Path, origin: str) -> None:
    """Write the weights as `detectors.series.reliability` reads them."""
    lines = [f"# {origin}", "term,weight", *(f"{name},{value:.4f}" for name, value in weights.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--faulty", type=int, default=16, help="fleets with precursors")
    parser.add_argument("--healthy", type=int, default=32, help="fleets without")
    parser.add_argument("--hours", type=int, default=HOURS)
    parser.add_argument("--nodes", type=int, default=NODES, help="machines of a fleet")
    parser.add_argument("--trends", type=int, default=TRENDS, help="precursors in a faulty fleet")
    parser.add_argument("--fit", action="store_true", help="write the table of weights from this run")
    chosen = parser.parse_args()
    tally = Tally()
    for number in range(chosen.faulty + chosen.healthy):
        seed = chosen.first_seed + number
        trends = precursors(seed, chosen.hours, chosen.trends, chosen.nodes) if number < chosen.faulty else ()
        run_fleet(seed, chosen.hours, tally, trends, chosen.nodes)
    print(table(tally))
    print(json.dumps(summary(tally)))
    if chosen.fit:
        origin = f"python -m benchmarks.foretell --fit --first-seed {chosen.first_seed} --faulty {chosen.faulty}"
        origin += f" --trends {chosen.trends} --healthy {chosen.healthy}: {len(tally.forecasts)} foretellings"
        write_table(fitted(tally.forecasts), Path(law.__file__).parent / law.TABLE, origin)


if __name__ == "__main__":
    main()
