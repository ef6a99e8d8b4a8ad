"""Faults of links, rails, leaves and ranks on jobs of several parallel plans, simulated, through the scorer of `trainwarden evaluate`.

    python -m benchmarks.plans OUT [--seeds 101 102] [--only PLAN ...] [--fault NAME ...]

One recording per plan, fault and seed goes to OUT (kept, and used again when it is there); the table and a summary are printed.
Exit code 1 when a node was accused that has nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from collectors.simulated.profiles import PROFILES
from collectors.simulated.run import Pace, build
from collectors.simulated.run import run as simulate
from collectors.simulated.spec import Spec
from collectors.simulated.truth import truth
from detectors.base import registry
from streams.evaluate import Run, find_runs, summarise, summary_line
from streams.replay import replay
from streams.scoring import Score, score
from trainwarden.clock import NS_PER_S, SystemClock
from trainwarden.commands.simulate import _Folder
from trainwarden.config import Config, load

WARM_S, FAULT_S, AFTER_S = 180, 120, 10
PLANS = {
    "tp8-dp8": (12, "8:dense"),
    "tp8-pp4-dp2": (12, "8:pp4"),
    "tp4-pp2-ep8": (12, "8:moe"),
    "tp8-dp40": (48, "40:dense"),
}
"""Nodes and job of each plan; the groups follow from the profile (`docs/simulator.md`). The last lies below two groups of leaves."""
PROFILES.setdefault("pp4", replace(PROFILES["pipeline"], name="pp4", pp=4))
FAULTS: dict[str, tuple[str, str]] = {
    "rail": ("rail_degraded@rail2", "x0.5"),
    "port_slow": ("port_slow@n00002/mlx5_3/1", "x4"),
    "port_lossy": ("packet_loss@n00003/mlx5_1/1", "x0.02"),
    "port_down": ("nic_down@n00001/mlx5_2/1", ""),
    "receiver_slow": ("slow_receiver@n00002/mlx5_5/1", "x0.7"),
    "frozen": ("rank_frozen@n00001/gpu3", ""),
    "leaf_congested": ("leaf_congestion@leaf-000", "x0.6"),
    "leaf_switch_congested": ("leaf_congestion@leaf-000/rail4", "x0.6"),
    "ecmp": ("ecmp_collision@n00003-n00004", "x1.5"),
    "none": ("none", ""),
}
LARGE = ("leaf_congested", "leaf_switch_congested", "ecmp", "none")
"""Faults of the plan with two groups of leaves; the others have the others."""
"""Kind, target and magnitude (the usual one of the kind)."""
LABEL_OF = {"rank_frozen": "sigstop", "rank_killed": "kill9"}


@dataclass(frozen=True)
class Case:
    """One recording."""

    plan: str
    fault: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.plan}.{self.fault}.{self.seed}"


def cases(seed: int, plans: Sequence[str], faults: Sequence[str]) -> Iterator[Case]:
    """Which faults strike which plans."""
    for plan in plans:
        mine = LARGE if PLANS[plan][0] > 32 else [fault for fault in FAULTS if fault == "none" or fault not in LARGE]
        yield from (Case(plan, fault, seed) for fault in mine if fault in faults)


def record(case: Case, folder: Path) -> None:
    """Simulate a case into `folder`, labels beside it; nothing is done when it is there."""
    if (folder / "labels.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    (nodes, jobs), (kind, size) = PLANS[case.plan], FAULTS[case.fault]
    asked = kind if kind == "none" else f"{kind}:{WARM_S}+{FAULT_S}{size}"
    length_s = WARM_S + FAULT_S + AFTER_S
    spec = Spec(nodes=nodes, seed=case.seed, jobs=jobs)
    simulator = build(spec, asked, length_s)
    sink = _Folder(folder, spec.start_ns)
    simulate(simulator, length_s, sink.deliver, Pace(SystemClock(), 0.0))
    sink.close()
    labels = list(_labels(truth(simulator, asked, length_s)["faults"]))
    (folder / "labels.json").write_text(json.dumps({"labels": labels}), encoding="utf-8")


def _labels(faults: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Labels of an answer sheet: a fault of a shared part has no node."""
    for fault in faults:
        nodes = sorted({node for culprit in fault["culprits"] for node in culprit["nodes"]})
        yield {
            "kind": LABEL_OF.get(fault["kind"], fault["kind"]),
            "nodes": [] if fault["shared"] else nodes,
            "start": fault["start_ns"] / NS_PER_S,
            "end": fault["end_ns"] / NS_PER_S,
        }


def judge(run: Run, config: Config) -> Score:
    """What `trainwarden evaluate` says of one recording."""
    able = frozenset(
        kind for name, d in registry().all().items() if config.enabled("detectors", name) for kind in d.kinds
    )
    told = replay(run.path, config)
    return score(run.name, told.newest(), run.labels, able, told.node_days)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101])
    parser.add_argument("--only", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--fault", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    chosen = parser.parse_args()
    config, scores = load(None), []
    for seed in chosen.seeds:
        for case in cases(seed, chosen.only, chosen.fault):
            record(case, chosen.out / case.name)
            scores.append(judge(find_runs(chosen.out, (case.name,))[0], config))
            print(scores[-1].line(), flush=True)
    print(summary_line(summarise(scores)))
    return int(any(one.accused_wrongly or one.false_actions for one in scores))


if __name__ == "__main__":
    sys.exit(main())
