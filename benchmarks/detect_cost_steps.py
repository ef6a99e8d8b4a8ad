"""What the step detectors cost on a large job: CPU milliseconds per tick on one core, and against a plain loop over ranks.

`python -m benchmarks.detect_cost_steps [--ranks 10000] [--ticks 60] [--json FILE]`: one job, eight ranks a node, a step and a tick each
second. Making the records is not counted; reading them is.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import process_time

import numpy as np

from detectors.base import AlignedTick, Detector, FamilyMatrix, Frame, registry
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import StepReport, StepRow, TopologyEvent
from trainwarden.topology import Topology

START_NS = 1_700_000_000 * NS_PER_S
GPUS, STAGES, STEP_MS = 8, 8, 1000.0
PROCESS = ("alive", "state", "cpu_cores", "throttled_ratio", "last_step", "step_age_s", "phase")


def detectors() -> list[type[Detector]]:
    """All detectors of the steps family."""
    return [kind for kind in registry().all().values() if kind.__module__.startswith("detectors.steps.")]


def frames(ranks: int, ticks: int, seed: int = 0) -> Iterator[Frame]:
    """A healthy job of `ranks` ranks in eight stages, a save every 50 steps."""
    rng = np.random.default_rng(seed)
    nodes = [f"n{rank // GPUS:04d}" for rank in range(ranks)]
    topology = Topology()
    topology.apply(
        TopologyEvent(
            entity="job:large",
            origin="scheduler",
            valid_from_ns=START_NS,
            attributes={"tp": str(GPUS), "pp": str(STAGES), "dp": str(ranks // GPUS // STAGES)},
            ranks=tuple((rank, node, f"gpu{rank % GPUS}") for rank, node in enumerate(nodes)),
        )
    )
    entities = tuple((node, f"rank{rank}") for rank, node in enumerate(nodes))
    names = tuple(dict.fromkeys(nodes))
    for number in range(ticks):
        at_ns = START_NS + (number + 1) * NS_PER_S
        local = 600.0 + 20.0 * rng.normal(size=ranks) + rng.exponential(10.0, size=ranks)
        saving = number % 50 == 49
        wide = (1.0, 1.0, 0.9, 0.0, float(number), 0.1, 2.0)
        process = FamilyMatrix("process", entities, PROCESS, np.tile(np.array(wide, dtype=np.float32), (ranks, 1)))
        tick = AlignedTick(at_ns, 1000, names, np.ones(len(names), dtype=np.bool_), {"process": process})
        rows = [_row(number, at_ns, own, saving) for own in local.tolist()]
        reports = tuple(
            StepReport(node=nodes[rank], seq=number, observed_at_ns=at_ns, boot_id="b", job="large", rank=rank, world=ranks, rows=(row,))
            for rank, row in enumerate(rows)
        )  # fmt: skip
        yield Frame(at_ns + 300 * NS_PER_MS, (tick,), reports, (), topology)


def _row(number: int, at_ns: int, local_ms: float, saving: bool) -> StepRow:
    return StepRow(step=number, phase="train", started_at_ns=at_ns - NS_PER_S, duration_ms=STEP_MS, data_ms=5.0, forward_ms=0.3 * local_ms,
                   backward_ms=0.6 * local_ms, wait_ms=STEP_MS - local_ms - 20.0 * saving, optimizer_ms=0.1 * local_ms,
                   checkpoint_ms=20.0 if saving else math.nan, loss=2.0, grad_norm_local=0.5, grad_norm=0.4, samples=64,
                   param_checksum=1.0 if number % 5 == 0 else math.nan)  # fmt: skip


class Naive:
    """What one would write first: a loop over ranks, a dictionary for each, the same comparison of local times."""

    def __init__(self) -> None:
        self._ranks: dict[int, dict[str, float]] = {}

    def update(self, frame: Frame) -> int:
        """Ranks far above the median."""
        for report in frame.steps:
            state = self._ranks.setdefault(
                report.rank, {"mean": 0.0, "deviation": 1.0, "last": -1.0, "steps": 0.0, "bad": 0.0}
            )
            for row in report.rows:
                if row.step <= state["last"]:
                    continue
                local = row.duration_ms - row.wait_ms - (row.checkpoint_ms if row.checkpoint_ms > 0 else 0.0)
                away = local - state["mean"]
                state["mean"] += 0.05 * away
                state["deviation"] += 0.05 * (abs(away) - state["deviation"])
                state["last"], state["local"] = row.step, local
                state["steps"] += 1
                state["bad"] += not row.finite
                state["norm"], state["loss"] = row.grad_norm_local, row.loss
        middle = statistics.median(state["local"] for state in self._ranks.values())
        return sum(s["local"] - middle > 8 * s["deviation"] for s in self._ranks.values())


def measure(ranks: int = 10_000, ticks: int = 60, warm_ticks: int = 30) -> dict[str, float]:
    """CPU milliseconds per tick, amortised over `ticks` after `warm_ticks`, of all step detectors, of each, and of the plain loop."""
    fresh, naive = {kind.name: kind() for kind in detectors()}, Naive()
    spent_s = dict.fromkeys((*fresh, "naive"), 0.0)
    runs: dict[str, Callable[[Frame], object]] = {name: detector.update for name, detector in fresh.items()}
    for number, frame in enumerate(frames(ranks, warm_ticks + ticks)):
        for name, update in {**runs, "naive": naive.update}.items():
            started_s = process_time()
            update(frame)
            spent_s[name] += (process_time() - started_s) if number >= warm_ticks else 0.0
    each = {f"{name}_ms": round(1000 * spent / ticks, 3) for name, spent in spent_s.items()}
    total = round(sum(ms for name, ms in each.items() if name != "naive_ms"), 3)
    state_bytes = sum(len(detector.snapshot()) for detector in fresh.values())
    return {"ranks": ranks, "ticks": ticks, "all_ms": total, **each, "naive_over_ours_ratio": round(each["naive_ms"] / total, 2),
            "state_mib": round(state_bytes / 2**20, 2)}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--ticks", type=int, default=60)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    found = measure(chosen.ranks, chosen.ticks)
    print("\n".join(f"{name:28} {value:g}" for name, value in found.items()))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
