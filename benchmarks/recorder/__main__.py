"""Record a real 4-node PyTorch job under real faults, in the format of `tests/recordings/data`, on one machine.

    python -m benchmarks.recorder OUT [--seed 1] [--faults cpu_throttle,net_loss | all] [--rest-s 15]
    trainwarden evaluate OUT

Each fault named is a run of its own: a torchrun job of four nodes (PyTorch on the processor, gloo), every node in its own network
namespace and cgroups (version 1), 15 to 20 steps a second. The node, the onset (10 to 90 s after the first step), the magnitude and the
length are drawn from `--seed`; `--rest-s` is how long the job goes on afterwards. `a+b` are two faults at the same time, on two nodes,
`a:2` is one that comes twice on the same node. A run takes one and a half to two and a half minutes. Needs root, iproute2 and
iptables. What other programs do on the machine meanwhile is part of the recording (`*.host.csv`).

The kinds are those of the recordings that we were given, and some of which these have none: `exits`, `oom_kill`, `slow_compute`,
`slow_save`, `memory_pressure`, `fabric_loss`, `fabric_delay`, `bigger_batch` (every rank slower: nobody is bad), `pauses` (too little to
act on). Delays need no netem: packets wait in a queue in user space (`benchmarks.recorder.delay`).
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.recorder.faults import FAULTS, SEVERAL, Orders, Plan, Scene, perform
from benchmarks.recorder.stage import NODES, Stage, StageError
from benchmarks.recorder.trainer import COLUMNS
from benchmarks.recorder.watch import Watch

BEFORE_S, ONSET_S = 10.0, (10.0, 90.0)
START_S, END_S, AFTER_S = 90.0, 60.0, 2.0
KEPT = ("csv", "nodes.csv", "host.csv", "events.jsonl", "labels.json")


def record(
    target: Path, name: str, plan: Plan, seed: int, rest_s: float, onset_s: tuple[float, float] = ONSET_S
) -> None:
    """One run, from the start of the watch to the end of the job."""
    rng = random.Random(f"{seed}/{plan.spec}")
    with tempfile.TemporaryDirectory(prefix="recorder-", dir=target) as folder:
        work = Path(folder)
        with ExitStack() as stack:
            stage = Stage(work)
            stack.callback(stage.close)
            watch = Watch(stage, work, name)
            stack.callback(watch.close)
            time.sleep(BEFORE_S)
            scene = Scene(stage, work, name, stage.nodes[0], rng, Orders(work / "orders.json"))
            for node in stage.nodes:
                node.launch(work, name, seed)
            begun, what = lambda: _count(work, name, "first_step") >= NODES, "the first step of every rank"
            _wait_for(begun, START_S, what, stage, running=True)
            time.sleep(rng.uniform(*onset_s))
            perform(plan, scene)
            time.sleep(rest_s)
            (work / "stop").touch()
            _wait_for(lambda: _ended(stage, all), END_S, "the end of the job", stage)
            time.sleep(AFTER_S)  # the watch goes on so long beyond the job
            told = {"run": name, "seed": seed, "labels": scene.close()}
        _steps(work, name)
        (work / f"{name}.labels.json").write_text(json.dumps(told, indent=1) + "\n")
        for kind in KEPT:
            shutil.move(work / f"{name}.{kind}", target / f"{name}.{kind}")


def _ended(stage: Stage, of: Callable[[Iterable[bool]], bool]) -> bool:
    return of(node.launcher is not None and node.launcher.poll() is not None for node in stage.nodes)


def _steps(work: Path, name: str) -> None:
    """The rows of all ranks in one table, by time."""
    rows: list[list[str]] = []
    for path in work.glob(f"{name}.rank*.csv"):
        with path.open(newline="") as file:
            rows += list(csv.reader(file))
    rows.sort(key=lambda row: float(row[0]))
    with (work / f"{name}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        table.writerows(rows)


def _count(work: Path, name: str, kind: str) -> int:
    path = work / f"{name}.events.jsonl"
    return path.read_text().count(f'"kind": "{kind}"') if path.exists() else 0


def _wait_for(holds: Callable[[], bool], seconds: float, what: str, stage: Stage, *, running: bool = False) -> None:
    """Raises when it takes too long or, where the job is to be `running` meanwhile, when a launcher ended before."""
    deadline_s = time.monotonic() + seconds
    while not holds():
        ended = running and _ended(stage, any)
        if ended or time.monotonic() > deadline_s:
            said = "\n".join(path.read_text()[-600:] for path in sorted(stage.folder.glob("n*/log.txt")))
            found = "did not come before a launcher ended" if ended else f"did not come within {seconds:g} s"
            raise StageError(f"{what} {found}; the nodes said:\n{said}")
        time.sleep(0.1)


def main() -> int:
    """Record what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--faults", default="all", help=f"names with commas between, or all: {', '.join((*FAULTS, *SEVERAL))}"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rest-s", type=float, default=15.0)
    chosen = parser.parse_args()
    try:
        plans = [
            Plan.read(spec) for spec in ((*FAULTS, *SEVERAL) if chosen.faults == "all" else chosen.faults.split(","))
        ]
    except ValueError as error:
        parser.error(str(error))
    # also where a shell in the background had it ignored: what was set up is taken down
    for wish in (signal.SIGTERM, signal.SIGINT):
        signal.signal(wish, lambda number, _: sys.exit(128 + number))
    chosen.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for plan in plans:
        name = f"{plan.name}_{chosen.seed}"
        try:
            record(chosen.out, name, plan, chosen.seed, chosen.rest_s)
            print(f"{name}: recorded", flush=True)
        except StageError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
