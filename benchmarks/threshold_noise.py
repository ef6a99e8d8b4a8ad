"""What the lines say when a whole job stops, in health, and under faults of a part: opinions per node and day, of whom.

    python -m benchmarks.threshold_noise [--nodes 32] [--jobs 2x16:ddp] [--minutes 15] [--seeds 1,2] [--faults NAME=PLAN ...]
    python -m benchmarks.threshold_noise --recordings tests/recordings/data

Without ``--recordings`` the cluster simulator plays each plan (see ``trainwarden simulate --list-faults``), and the pipeline's own aligner
makes the frames. Counted are opinions of `dynamic_threshold` and `stale_series`, once however often restated: of nodes that the fault
strikes, of others while it lasts and five minutes after, and at all other times (health). Runs before 300 s are warm-up of the cluster and
count as health too.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from detectors.base import Detector, Frame
from detectors.threshold.dynamic import ThresholdDetector
from detectors.threshold.stale import StaleSeriesDetector
from streams.align import Aligner, AlignSettings
from streams.recordings import real_faults
from streams.replay import replay_records
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.config import Config
from trainwarden.records import Verdict, decode
from trainwarden.topics import CATALOG, TICKS, TOPOLOGY

PLANS = {
    "healthy": "none",
    "job stops, nobody's fault": "code_deadlock@job-000:480+200",
    "job stops, one rank frozen": "rank_frozen@n00003/gpu2:480+180",
    "job stops, one rank killed": "rank_killed@n00003/gpu2:480+60",
    "one GPU weak": "weak_gpu@n00003/gpu2:480+300",
    "one GPU hot": "gpu_thermal@n00003/gpu2:480+300",
    "one port slow": "port_slow@n00003/mlx5_2/1:480+300",
    "one leaf degraded": "leaf_degraded@leaf-000/rail2:480+300",
    "a rail degraded": "rail_degraded@rail2:480+300",
}
NAMES = ("dynamic_threshold", "stale_series")
AFTERMATH_NS = 300 * NS_PER_S


@dataclass
class Count:
    """Opinions of one plan."""

    plan: str
    node_days: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    health: Counter[str] = field(default_factory=Counter)
    series: Counter[str] = field(default_factory=Counter)
    delay_s: list[float] = field(default_factory=list)

    def add(self, verdicts: Iterable[Verdict], faults: Sequence[tuple[int, int, frozenset[str]]]) -> None:
        """Opinions on a run with faults of (start, end, nodes)."""
        first: dict[tuple[str, str, int], Verdict] = {}
        for verdict in verdicts:
            if verdict.detector in NAMES and not verdict.clears:
                first.setdefault((verdict.detector, str(verdict.entity), verdict.onset_at_ns), verdict)
        reached: dict[int, int] = {}
        for verdict in first.values():
            during = [f for f in faults if f[0] <= verdict.window_end_ns <= f[1] + AFTERMATH_NS]
            guilty = [f for f in during if verdict.entity.node in f[2]]
            place = self.struck if guilty else self.others if during else self.health
            place[verdict.detector] += 1
            self.series[f"{verdict.detector} {verdict.entity.name.rpartition('/')[2]}"] += not guilty
            for fault in guilty:
                reached[fault[0]] = min(reached.get(fault[0], verdict.window_end_ns), verdict.window_end_ns)
        self.delay_s += [(reached[f[0]] - f[0]) / NS_PER_S if f[0] in reached else float("inf") for f in faults if f[2]]

    def line(self) -> str:
        """For people."""
        per_day = [sum(c[name] for c in (self.others, self.health)) / self.node_days for name in NAMES]
        counts = "  ".join(f"{sum(c.values()):6d}" for c in (self.struck, self.others, self.health))
        delays = " ".join(f"{delay:.0f}" for delay in self.delay_s)
        return f"{self.plan:30} {self.node_days:6.3f}  {counts}  {per_day[0]:10.1f} {per_day[1]:8.1f}   {delays}"


def simulated(plan: str, faults: str, nodes: int, jobs: str, minutes: float, seeds: Sequence[int]) -> Count:
    """Opinions on simulated runs of one plan."""
    from collectors.simulated.run import build
    from collectors.simulated.spec import Spec
    from collectors.simulated.truth import truth

    count = Count(plan)
    for seed in seeds:
        simulator = build(Spec(nodes=nodes, seed=seed, jobs=jobs), faults, 60 * minutes)
        said = _said(_frames(simulator, round(60 * minutes)))
        rows = truth(simulator, faults, 60 * minutes)["faults"]
        count.add(said, [(row["start_ns"], row["end_ns"], _guilty(row)) for row in rows])
        count.node_days += nodes * minutes / 1440
    return count


def recorded(folder: Path) -> Count:
    """Opinions on all recordings of a folder."""
    count = Count(str(folder))
    for run in real_faults.runs(folder):
        told = replay_records(real_faults.read(folder, run), Config())
        labels = real_faults.labels(folder, run)
        count.add(told.verdicts, [(label.start_ns, label.end_ns, frozenset(label.nodes)) for label in labels])
        count.node_days += told.node_days
    return count


def _guilty(row: dict[str, object]) -> frozenset[str]:
    culprits = row["culprits"]
    assert isinstance(culprits, list)
    return frozenset(node for culprit in culprits if culprit["kind"] != "job" for node in culprit["nodes"])


def _frames(simulator: object, intervals: int) -> Iterator[Frame]:
    """Frames of ticks and topology, cut twice a second of simulated time."""
    from collectors.simulated.encode import Encoder
    from collectors.simulated.engine import Simulator

    assert isinstance(simulator, Simulator)
    encoder, aligner, offset = Encoder(simulator), Aligner(AlignSettings.of(Config())), 0
    for interval in simulator.intervals(intervals):
        for message in encoder.messages(interval):
            if message.topic in (TICKS.name, CATALOG.name, TOPOLOGY.name):
                offset += 1
                aligner.add(message.topic, zlib.crc32(message.key) % 4, offset, decode(message.value))
        frame = aligner.cut(simulator.spec.start_ns + round(interval.at_s * NS_PER_S) + 300 * NS_PER_MS)
        if frame is not None:
            yield frame


def _said(frames: Iterable[Frame]) -> list[Verdict]:
    detectors: list[Detector] = [ThresholdDetector(), StaleSeriesDetector()]
    return [verdict for frame in frames for detector in detectors for verdict in detector.update(frame)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--jobs", default="2x16:ddp")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seeds", default="1")
    parser.add_argument(
        "--faults", nargs="*", default=None, help="NAME=PLAN or the beginning of a name of the built-in plans"
    )
    parser.add_argument("--recordings", type=Path, default=None)
    parser.add_argument("--top", type=int, default=0, help="show so many series that speak most without being struck")
    parser.add_argument("--json", type=Path, default=None)
    chosen = parser.parse_args()
    seeds = [int(seed) for seed in chosen.seeds.split(",")]
    print(
        f"{'plan':30} {'node-d':>6}  struck  others  health   threshold    stale   (not struck, per node-day)  delays s"
    )
    counts = []
    for plan, faults in {"recordings": ""}.items() if chosen.recordings else _chosen(chosen.faults).items():
        count = recorded(chosen.recordings) if chosen.recordings else \
            simulated(plan, faults, chosen.nodes, chosen.jobs, chosen.minutes, seeds)  # fmt: skip
        counts.append(count)
        print(count.line(), flush=True)
        for name, number in count.series.most_common(chosen.top):
            print(f"    {number:5d} {name}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([vars(count) for count in counts], indent=1) + "\n", encoding="utf-8")


def _chosen(words: Sequence[str] | None) -> dict[str, str]:
    if words is None:
        return PLANS
    found: dict[str, str] = {}
    for word in words:
        name, given, plan = word.partition("=")
        found |= {name: plan} if given else {key: value for key, value in PLANS.items() if key.startswith(name)}
    return found


if __name__ == "__main__":
    main()
