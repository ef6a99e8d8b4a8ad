"""What the lines of all series cost: one tick of `dynamic_threshold` and `stale_series` on nodes × metrics, against a loop over series.

Run ``python -m benchmarks.detect_cost_threshold [--nodes 1250] [--metrics 430] [--ticks 60]``; prints one JSON object. Times are CPU
time of this process (one thread), after the warm-up of all series and of all tails' first fits.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable

import numpy as np

from detectors.base import AlignedTick, FamilyMatrix, Frame
from detectors.threshold.dynamic import ThresholdDetector
from detectors.threshold.lines import Lines
from detectors.threshold.places import PHASES
from detectors.threshold.stale import StaleSeriesDetector
from trainwarden.clock import NS_PER_S
from trainwarden.records import TopologyEvent
from trainwarden.topology import Topology

WARM_TICKS = 50
NAIVE_SERIES, NAIVE_TICKS = 400, 20
PATTERNS = 16
SILENT_RATIO = 0.02
"""Share of metrics that no node reports."""
START_NS = 1_700_000_000 * NS_PER_S
SUFFIXES = ("_ratio", "_celsius", "_per_s", "_bytes", "_ms", "_watts")


def measure(nodes: int = 1250, metrics: int = 430, ticks: int = 60, seed: int = 0) -> dict[str, float]:
    """CPU milliseconds per tick, memory and the ratio to a per-series Python loop.

    Returns
    -------
    dict
        `threshold_ms` (median) and `threshold_p95_ms` of the detector's whole update, `stale_ms`, `lines_ms` of the scorer alone,
        `state_mb` of both detectors' arrays, `peak_mb` of the process, `naive_ms` (a loop over all series, from a sample) and
        `naive_ratio` = naive_ms / lines_ms.
    """
    frames = _frames(nodes, metrics, seed)
    detector, stale = ThresholdDetector(), StaleSeriesDetector()
    both = [_times(one.update, frames, ticks) for one in (detector, stale)]
    lines_ms = _lines_ms(nodes, metrics, ticks, seed)
    naive_ms = _naive_ms(seed) * nodes * metrics
    state = sum(table.lines.state_bytes for table in detector._tables.values())
    state += sum(watch.still.nbytes for watch in stale._watches.values())
    return {
        "nodes": nodes, "metrics": metrics, "series": nodes * metrics, "ticks": ticks,
        "threshold_ms": float(np.median(both[0])), "threshold_p95_ms": float(np.quantile(both[0], 0.95)),
        "stale_ms": float(np.median(both[1])), "lines_ms": lines_ms, "state_mb": state / 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, "naive_ms": naive_ms, "naive_ratio": naive_ms / lines_ms,
    }  # fmt: skip


def _times(update: Callable[[Frame], object], frames: list[Frame], ticks: int) -> list[float]:
    """Milliseconds of each tick after the warm-up."""
    times = []
    for number in range(WARM_TICKS + ticks):
        frame = frames[number % len(frames)]
        started = time.process_time()
        update(frame)
        times.append(1e3 * (time.process_time() - started))
    return times[WARM_TICKS:]


def _values(nodes: int, metrics: int, rng: np.random.Generator) -> np.ndarray:
    """Skewed, heavy-tailed values around a place of their metric."""
    silent = np.arange(metrics) % int(1 / SILENT_RATIO) == 1
    place = np.linspace(1.0, 50.0, metrics, dtype=np.float32)
    return np.where(silent, np.nan, place * (1 + 0.1 * rng.standard_t(4, (nodes, metrics)))).astype(np.float32)


def _frames(nodes: int, metrics: int, seed: int) -> list[Frame]:
    rng = np.random.default_rng(seed)
    names = tuple(f"m{number}{SUFFIXES[number % len(SUFFIXES)]}" for number in range(metrics - 1))
    entities = tuple((f"node{number:05d}", "host") for number in range(nodes))
    topology = _topology([node for node, _ in entities])
    present, frames = np.ones(nodes, np.bool_), []
    for number in range(PATTERNS):
        values = _values(nodes, metrics, rng)
        values[:, 0] = rng.uniform(0.4, 0.6, nodes)
        matrix = FamilyMatrix("host", entities, ("cpu_busy_ratio", *names), values)
        at_ns = START_NS + number * NS_PER_S
        tick = AlignedTick(at_ns, 1000, tuple(node for node, _ in entities), present, {"host": matrix})
        frames.append(Frame(at_ns, (tick,), (), (), topology))
    return frames


def _topology(nodes: list[str]) -> Topology:
    topology = Topology()
    ranks = tuple((rank, node, "gpu0") for rank, node in enumerate(nodes))
    topology.apply(
        TopologyEvent(entity="job:bench", origin="scheduler", valid_from_ns=START_NS, attempt=0, ranks=ranks)
    )
    return topology


def _lines_ms(nodes: int, metrics: int, ticks: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    patterns = [_values(nodes, metrics, rng) for _ in range(PATTERNS)]
    load, phase = rng.random(nodes).astype(np.float32), np.ones(nodes, np.int64)
    common = np.zeros((nodes, metrics), np.float32)
    lines = Lines(nodes, metrics, phases=PHASES, alike=True, floor=0.01)
    times = []
    for number in range(WARM_TICKS + ticks):
        started = time.process_time()
        lines.step(patterns[number % PATTERNS], load, phase, common)
        times.append(1e3 * (time.process_time() - started))
    return float(np.median(times[WARM_TICKS:]))


def _naive_ms(seed: int) -> float:
    """Milliseconds per series and tick of the plainest loop: one `Lines`' worth of arithmetic in Python floats."""
    rng = np.random.default_rng(seed)
    ticks = (1 + 0.1 * rng.standard_t(4, (NAIVE_TICKS, NAIVE_SERIES))).tolist()
    series = [_Naive() for _ in range(NAIVE_SERIES)]
    started = time.process_time()
    for values in ticks:
        for one, value in zip(series, values, strict=True):
            one.step(value, 0.5)
    return 1e3 * (time.process_time() - started) / (NAIVE_TICKS * NAIVE_SERIES)


class _Naive:
    """A line for one series: place, spread, slope on load, level of both tails, CUSUM."""

    def __init__(self) -> None:
        self.place, self.spread, self.cov, self.var, self.mean_load = 1.0, 0.1, 0.0, 0.01, 0.5
        self.level, self.walk, self.usual_walk = [3.0, 3.0], [0.0, 0.0], 1.0
        self.excesses: list[float] = []

    def step(self, value: float, load: float) -> bool:
        residual = value - self.place - self.cov / self.var * (load - self.mean_load)
        height = residual / max(self.spread, 0.01)
        side = int(height < 0)
        out = abs(height) > self.level[side]
        for number in (0, 1):
            self.level[number] = max(1.0, self.level[number] * (1.02 if out and number == side else 0.9996))
        if out:
            self.excesses = [*self.excesses[-15:], abs(height) - self.level[side]]
        clipped = max(-3.0, min(3.0, height)) * self.spread
        self.place += 0.01 * clipped
        self.spread += 0.01 * (1.2533 * abs(clipped) - self.spread)
        self.cov += 0.01 * ((load - self.mean_load) * clipped - 0.1 * self.cov)
        self.walk = [max(0.0, self.walk[0] + height - 0.5), max(0.0, self.walk[1] - height - 0.5)]
        self.usual_walk += 0.004 * (max(self.walk) - self.usual_walk)
        return max(self.walk) > 18.0 * self.usual_walk or (out and abs(height) > 10.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("nodes", 1250), ("metrics", 430), ("ticks", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print(
        json.dumps(
            {key: round(value, 3) for key, value in measure(args.nodes, args.metrics, args.ticks).items()}, indent=1
        )
    )


if __name__ == "__main__":
    main()
