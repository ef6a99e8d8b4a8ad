"""`make bench-relation`: our relation model and the floors on held-out simulations of 128, 1,024 and 4,096 nodes.

`python -m benchmarks.relation [--sizes 128,1024] [--seeds 6] [--methods ours,minder] [--cache DIR] [--parts DIR] [--json FILE]
[--slowdown 1.1]`

Floors get three lines each from the tuning split: what none, one in 10,000 and one in 1,000 of the scores of the blameless exceed there,
two rounds running (`mahalanobis@0.0001`). At the end ours is held against each floor at the line at which it is hardest to beat, seed by
seed, with an exact test and Holm's correction over all floors and groups (`benchmarks.relation.paired`). Ours gets its prices from
`trainwarden train`, which saw no fault at all; `ours` is what it names, `ours_isolates` what it would isolate. `ours_with_net` needs
`trainwarden train --net`. `--quick` is 128 nodes, four seeds and all floors, without ablations: minutes on a quiet machine, and too few
seeds for anything to survive a correction.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.relation import ours, parts, report, scenarios
from benchmarks.relation.episodes import Played, play
from benchmarks.relation.parts import Sheets
from benchmarks.relation.scenarios import SPLITS, Scenario, scenario
from benchmarks.relation.score import Sheet, answers_at, calm_scores
from detectors.relation.floors.base import Floor, registry
from models.relation import weights

LINES = (0.0, 1e-4, 1e-3)
"""Shares of blameless node-rounds of the tuning split that lie above a floor's line: 0 is the highest of them."""
HEALTHY_SEEDS = (301, 302, 303, 304, 305, 306)
ISOLATES = "ours_isolates"
ABLATIONS = {
    "edges": ("dp", "pp", "ep", "tp", "rack", "pdu", "leaf", "zone", "job"), "dp": ("dp",), "pp": ("pp",), "ep": ("ep",),
    "places": ("rack", "pdu", "zone"), "leaf": ("leaf",), "job": ("job",), "past": ("past",),
}  # fmt: skip
"""What `ours_without_X` leaves out."""
RESULTS = Path(__file__).resolve().parent.parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    wanted = _wanted(args)
    bench = Bench(args, {name: registry().get(name)() for name in wanted if not name.startswith("ours")})
    slowdowns = tuple(float(word) for word in args.slowdown.split(",")) if args.slowdown else scenarios.SLOWDOWNS
    sheets: Sheets = {}
    setting = {
        "slowdowns": slowdowns,
        "held_out_kinds": SPLITS["held_out_kinds"],
        "card": weights.load(args.model).card,
        "split": args.split,
        "groups": args.groups or list(scenarios.GROUPS),
        "tune_seeds": args.tune_seeds,
    }
    found: dict[str, Any] = {}
    done: dict[str, list[int]] = {}
    for size in (int(word) for word in args.sizes.split(",")):
        for number, seed in enumerate(args.seeds):
            chosen = [name for name in wanted if number < args.ablation_seeds or name in ("ours", *bench.floors)]
            parts.add(sheets, bench.of(scenario(args.split, size, seed, slowdowns, args.groups), chosen))
            done.setdefault(str(size), []).append(seed)
            found = report.tables(sheets) | {"setting": {**setting, "seeds": done}}
            report.keep(found, args.json)
            print(f"{size} nodes, seed {seed}", file=sys.stderr, flush=True)
    print(report.text(found))
    report.pictures(found, args.json.with_suffix(".png"))
    return 0


@dataclass
class Bench:
    """Floors, fitted once somebody asks them, and where parts are kept."""

    args: argparse.Namespace
    floors: dict[str, Floor]
    lines: dict[str, float] = field(default_factory=dict)
    code: str = ""

    def of(self, run: Scenario, chosen: Sequence[str]) -> Sheets:
        """The sheets of a run: those that are kept, and what they lack."""
        self.code = self.code or parts.code_sum(self.args.model, f"{self.args.tune_seeds} {HEALTHY_SEEDS} {LINES}")
        path = parts.path_of(self.args.parts, run, self.code) if self.args.parts else None
        sheets = parts.kept(path) if path else {}
        there = {method.partition("@")[0] for method, _ in sheets}
        left = [name for name in chosen if name not in there]
        if any(name in self.floors for name in left) and not self.lines:
            self.lines = _lines(self.floors, self.args.cache, self.args.tune_seeds)
        for played in play(run, self.args.cache) if left else ():
            _judge(played, left, self.floors, self.lines, self.args.model, sheets)
        if left and path:
            parts.keep(path, sheets)
        wanted = {ISOLATES, *chosen}
        return {key: sheet for key, sheet in sheets.items() if key[0].partition("@")[0] in wanted}


def _wanted(args: argparse.Namespace) -> list[str]:
    """Methods, ours first: all there are unless said otherwise."""
    if args.methods:
        return list(args.methods.split(","))
    floors = list(registry().all())
    more = [] if args.quick else [f"ours_without_{name}" for name in ABLATIONS]
    return ["ours", *(["ours_with_net"] if weights.WITH_NET.exists() else []), *floors, *more]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.relation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small and without ablations")
    parser.add_argument("--sizes", default="", help="job sizes; default 128,1024,4096")
    parser.add_argument("--seeds", type=int, default=0, help="how many test seeds; default all of the split")
    parser.add_argument("--only", default="", help="these seeds of the split, comma-separated, and no others")
    parser.add_argument("--tune-seeds", type=int, default=0, help="how many tuning seeds; default all six")
    parser.add_argument("--ablation-seeds", type=int, default=12, help="how many of them for variants of ours")
    parser.add_argument(
        "--split", default="test", choices=("test", "tune", "train"), help="test once, after all tuning"
    )
    parser.add_argument("--slowdown", default="", help="slowdowns to draw from, default 1.02,1.05,1.1,1.2,1.5,2")
    parser.add_argument("--groups", default="", help=f"only slots of these: {', '.join(scenarios.GROUPS)}")
    parser.add_argument("--methods", default="", help="comma-separated; default all")
    parser.add_argument("--cache", type=Path, default=None, help="directory in which played scenarios are kept")
    parser.add_argument(
        "--parts",
        type=Path,
        default=None,
        help="directory in which each seed's answers are kept: a later run goes on behind them",
    )
    parser.add_argument("--model", type=Path, default=weights.SHIPPED, help="weights")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / "relation.json", help="where the figures go; pictures beside it"
    )
    args = parser.parse_args(arguments)
    args.sizes = args.sizes or ("128" if args.quick else "128,1024,4096")
    every = SPLITS[args.split]["seeds"]
    args.seeds = every[: args.seeds or (4 if args.quick else len(every))]
    if args.only:
        args.seeds = [int(word) for word in args.only.split(",")]
        if not set(args.seeds) <= set(every):
            parser.error(f"--only {args.only}: expected seeds of the split {args.split}, which are {every}")
    args.groups = [word for word in args.groups.split(",") if word]
    if not set(args.groups) <= set(scenarios.GROUPS):
        parser.error(f"--groups {','.join(args.groups)}: expected some of {', '.join(scenarios.GROUPS)}")
    args.tune_seeds = args.tune_seeds or (2 if args.quick else len(SPLITS["tune"]["seeds"]))
    return args


def _lines(floors: dict[str, Floor], cache: Path | None, seeds: int) -> dict[str, float]:
    """Fit the floors on health, then find their lines on the tuning split."""
    if not floors:
        return {}
    healthy = [p.episode for seed in HEALTHY_SEEDS for p in play(_healthy(seed), cache)]
    for floor in floors.values():
        floor.fit(healthy)
    tuned = list(_tuned(cache, seeds))
    found: dict[str, float] = {}
    for name, floor in floors.items():
        calm = np.concatenate([calm_scores(floor.score(p.episode), p) for p in tuned])
        found |= {f"{name}@{share:g}": float(np.quantile(calm, 1.0 - share)) for share in LINES}
    return found


def _healthy(seed: int) -> Scenario:
    profile = scenarios.NAMES[seed % len(scenarios.NAMES)]
    return Scenario("healthy", seed, 128, 128, f"128:{profile}", (profile,), "none", (), 400.0)


def _tuned(cache: Path | None, seeds: int) -> Iterator[Played]:
    for seed in SPLITS["tune"]["seeds"][:seeds]:
        yield from play(scenario("tune", 128, seed), cache)


def _judge(
    played: Played,
    wanted: Sequence[str],
    floors: dict[str, Floor],
    lines: dict[str, float],
    model: Path,
    sheets: Sheets,
) -> None:
    for name in wanted:
        if name in floors:
            _judge_floor(played, name, floors[name], lines, sheets)
        else:
            _judge_ours(played, name, model, sheets)


def _judge_ours(played: Played, name: str, model: Path, sheets: Sheets) -> None:
    """Ours or an ablation of it: what it names, and of ours what it would isolate."""
    sheet = sheets.setdefault((name, played.scenario.size), Sheet(name))
    net = name == "ours_with_net"
    without = ABLATIONS.get(name.removeprefix("ours_without_"), ())
    answers = ours.run(played, weights.WITH_NET if net else model, net, without)
    sheet.take(played, [(number, kind, thing) for number, kind, thing, _ in answers.said])
    sheet.take_probabilities(played, answers.said)
    sheet.seconds += float(np.sum(answers.round_s) + np.sum(answers.attribution_s))
    sheet.rounds += len(played.rounds)
    if name == "ours":
        sheets.setdefault((ISOLATES, played.scenario.size), Sheet(ISOLATES)).take(played, answers.isolated)


def _judge_floor(played: Played, name: str, floor: Floor, lines: dict[str, float], sheets: Sheets) -> None:
    """One floor, held against each of its lines."""
    begun = time.process_time()
    scores = floor.score(played.episode)
    spent_s = time.process_time() - begun
    for key in (f"{name}@{share:g}" for share in LINES):
        sheet = sheets.setdefault((key, played.scenario.size), Sheet(key))
        sheet.take(played, answers_at(scores, played, lines[key]))
        sheet.seconds += spent_s
        sheet.rounds += len(played.rounds)


if __name__ == "__main__":
    sys.exit(main())
