"""Faults of links, rails, leaves and ranks on jobs of several parallel plans, simulated, through the scorer of `trainwarden evaluate`.

    python -m benchmarks.plans OUT [--seeds 101 102] [--only PLAN ...] [--fault NAME ...] [--page]

One recording per plan, fault and seed goes to OUT (kept, and used again when it is there); a line per recording, a table and a summary are
printed. `--page` puts the table into benchmarks/detect/plans.md, from where `benchmarks.detect` takes it into docs/benchmark-detectors.md.
A recording takes a quarter of a minute of processor time, one of tp8-dp40 a minute. Exit code 1 when a node was accused that has nothing.
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
PAGE = Path(__file__).parent / "detect" / "plans.md"
TABLE = "<!-- table -->"
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


def table(scores: Sequence[Score]) -> str:
    """Markdown, a row per plan and fault."""
    rows = [
        "| plan | fault | recordings | named after, s | said | would have acted on | accused wrongly |",
        "| --- " * 7 + "|",
    ]
    groups: dict[tuple[str, str], list[Score]] = {}
    for one in scores:
        plan, fault, _ = one.run.split(".")
        groups.setdefault((plan, fault), []).append(one)
    for (plan, fault), members in groups.items():
        delays = ", ".join(f"{found.delay_s:.1f}" for one in members for found in one.found)
        missed = sum(len(one.missed) for one in members)
        said = sorted({f"{s.kind} {s.node or 'nobody'}" for one in members for s in one.incidents if s.told and s.fits})
        acts = sorted({s.node for one in members for s in one.incidents if s.acts and s.fits})
        wrong = sorted(
            {f"{s.kind} {s.node}" for one in members for s in one.incidents if s.told and not s.fits and s.node}
        )
        named = (delays or "-") + (f"; {missed} missed" if missed else "")
        cells = (plan, fault, str(len(members)), named, ", ".join(said), ", ".join(acts), ", ".join(wrong))
        rows.append("| " + " | ".join(cell or "-" for cell in cells) + " |")
    return "\n".join(rows)


def write_page(scores: Sequence[Score], seeds: Sequence[int]) -> None:
    """The table of the page, between its two marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(TABLE)
    _, _, after = rest.partition(TABLE)
    told = f"Seeds {', '.join(map(str, seeds))}. {summary_line(summarise(scores))}."
    PAGE.write_text(f"{before}{TABLE}\n{told}\n\n{table(scores)}\n{TABLE}{after}", encoding="utf-8")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101])
    parser.add_argument("--only", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--fault", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--page", action="store_true", help="put the table into benchmarks/detect/plans.md")
    chosen = parser.parse_args()
    config, scores = load(None), []
    for seed in chosen.seeds:
        for case in cases(seed, chosen.only, chosen.fault):
            record(case, chosen.out / case.name)
            scores.append(judge(find_runs(chosen.out, (case.name,))[0], config))
            print(scores[-1].line(), flush=True)
    print(table(scores), summary_line(summarise(scores)), sep="\n")
    if chosen.page:
        write_page(scores, chosen.seeds)
    return int(any(one.accused_wrongly or one.false_actions for one in scores))


if __name__ == "__main__":
    sys.exit(main())
