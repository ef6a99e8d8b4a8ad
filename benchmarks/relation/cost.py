"""What one round of the served model costs on one core, and its attribution: `python -m benchmarks.relation.cost [--nodes 1250,4096]`.

A job of each size is simulated, healthy at first, then with a slow node, a degraded leaf and a warm rack at once, and judged as the
detector does it. Shown is processor time of a round (past, peers, evidence) and of its attribution (causes, opinions, conviction):
the middle and the largest, in health and under faults, beside the bars of 150 ms at 1,250 nodes, 500 ms at 4,096 and two seconds for
attribution. Reading the metrics into rounds is not in it: that is `benchmarks.linear`. Exit code 1 above a bar.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.relation import ours
from benchmarks.relation.episodes import play
from benchmarks.relation.scenarios import Scenario
from collectors.simulated.layout import Layout, leaf_name, rack_name
from collectors.simulated.spec import Spec
from detectors.relation.features import ROUND_S, WARM_ROUNDS

ROUND_BARS_S = {1250: 0.15, 4096: 0.5}
ATTRIBUTION_BAR_S = 2.0
FAULTS_AT, ROUNDS = 30, 60
PROFILE = "dense"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.relation.cost", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", default="1250,4096", help="sizes of the job, comma-separated")
    parser.add_argument("--profile", default=PROFILE, help="kind of job")
    parser.add_argument("--json", type=Path, default=None, help="where the figures go")
    args = parser.parse_args(arguments)
    found = {}
    for nodes in (int(word) for word in args.nodes.split(",")):
        row = found[str(nodes)] = measured(nodes, args.profile)
        print(
            f"{nodes} nodes: " + ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in row.items()), flush=True
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(above(int(nodes), row) for nodes, row in found.items()))


def above(nodes: int, row: dict[str, float]) -> bool:
    """Whether a size is above its bars; only where there is a bar for rounds of its size."""
    middles = (row["round, health"], row["round, faults"])
    return max(middles) > ROUND_BARS_S.get(nodes, np.inf) or row["attribution, most"] > ATTRIBUTION_BAR_S


def measured(nodes: int, profile: str) -> dict[str, float]:
    """Seconds of processor time: middle over rounds, and the largest."""
    layout = Layout(Spec(nodes=nodes, seed=nodes))
    begins = f"{FAULTS_AT * ROUND_S:g}+{ROUNDS * ROUND_S:g}"
    faults = ",".join(
        f"{kind}@{target}:{begins}x{much}"
        for kind, target, much in (
            ("weak_node", layout.names[nodes // 3], 1.2),
            ("leaf_degraded", leaf_name(int(layout.pod[nodes // 2]), 3), 0.3),
            ("rack_cooling", rack_name(int(layout.rack[nodes - 1])), 0.15),
        )
    )
    run = Scenario("cost", nodes, nodes, nodes, f"{nodes}:{profile}", (profile,), faults, (), ROUNDS * ROUND_S)
    answers = ours.run(next(play(run, None)))
    seconds = {"round": np.array(answers.round_s), "attribution": np.array(answers.attribution_s)}
    found = {}
    for name, each in seconds.items():
        found[f"{name}, health"] = float(np.median(each[WARM_ROUNDS:FAULTS_AT]))
        found[f"{name}, faults"] = float(np.median(each[FAULTS_AT:]))
        found[f"{name}, most"] = float(each[WARM_ROUNDS:].max())
    return found


if __name__ == "__main__":
    sys.exit(main())
