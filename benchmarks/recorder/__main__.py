"""Record a real 4-node PyTorch job under real faults, in the format of `tests/recordings/data`, on one machine.

    python -m benchmarks.recorder OUT [--seed 1] [--faults cpu_throttle,net_loss | all] [--rest-s 15]
    trainwarden evaluate OUT

Each fault named is a run of its own: a torchrun job of four nodes (PyTorch on the processor, gloo), every node in its own network
namespace and cgroups (version 1), 15 to 20 steps a second. The node, the onset (20 to 50 s after the first step), the magnitude and the
length are drawn from `--seed`; `--rest-s` is how long the job goes on afterwards. A run takes one and a half to two minutes. Needs root,
iproute2 and iptables. What other programs do on the machine meanwhile is part of the recording (`*.host.csv`).

The kinds are those of the recordings that we were given, and some of which these have none: `exits`, `slow_compute`, `slow_save`,
`fabric_loss`, `bigger_batch` (every rank slower: nobody is bad), `pauses` (too little to act on). Not written yet: `net_delay`, which
without netem takes a queue in user space.
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

from benchmarks.recorder.faults import FAULTS, Scene
from benchmarks.recorder.stage import NODES, Stage, StageError
from benchmarks.recorder.trainer import COLUMNS
from benchmarks.recorder.watch import Watch

BEFORE_S, ONSET_S = 10.0, (20.0, 50.0)
START_S, END_S, AFTER_S = 90.0, 60.0, 2.0
KEPT = ("csv", "nodes.csv", "host.csv", "events.jsonl", "labels.json")


def record(target: Path, name: str, fault: str, seed: int, rest_s: float) -> None:
    """One run, from the start of the watch to the end of the job."""
    rng = random.Random(f"{seed}/{fault}")
    with tempfile.TemporaryDirectory(prefix="recorder-", dir=target) as folder:
        work = Path(folder)
        with ExitStack() as stack:
            stage = Stage(work)
            stack.callback(stage.close)
            watch = Watch(stage, work, name)
            stack.callback(watch.close)
            time.sleep(BEFORE_S)
            scene = Scene(stage, work, name, stage.nodes[rng.randrange(NODES)], rng)
            for node in stage.nodes:
                node.launch(work, name, seed)
            _wait_for(lambda: _count(work, name, "first_step") >= NODES, START_S, "the first step of every rank", stage)
            time.sleep(rng.uniform(*ONSET_S))
            FAULTS[fault](scene)
            time.sleep(rest_s)
            (work / "stop").touch()
            _wait_for(lambda: _ended(stage, all), END_S, "the end of the job", stage)
            time.sleep(AFTER_S)
        _steps(work, name)
        (work / f"{name}.labels.json").write_text(
            json.dumps({"run": name, "seed": seed, "labels": scene.labels}, indent=1) + "\n"
        )
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


def _wait_for(holds: Callable[[], bool], seconds: float, what: str, stage: Stage) -> None:
    """Raises when it takes too long, or when a launcher ended before."""
    deadline_s = time.monotonic() + seconds
    while not holds():
        ended = "first" in what and _ended(stage, any)
        if ended or time.monotonic() > deadline_s:
            said = "\n".join(path.read_text()[-600:] for path in sorted(stage.folder.glob("n*/log.txt")))
            found = "did not come before a launcher ended" if ended else f"did not come within {seconds:g} s"
            raise StageError(f"{what} {found}; the nodes said:\n{said}")
        time.sleep(0.1)


def main() -> int:
    """Record what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--faults", default="all", help=f"names with commas between, or all: {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rest-s", type=float, default=15.0)
    chosen = parser.parse_args()
    faults = list(FAULTS) if chosen.faults == "all" else chosen.faults.split(",")
    if unknown := sorted(set(faults) - set(FAULTS)):
        parser.error(f"no fault is called {unknown[0]!r}: known are {', '.join(FAULTS)}")
    # also where a shell in the background had it ignored: what was set up is taken down
    for wish in (signal.SIGTERM, signal.SIGINT):
        signal.signal(wish, lambda number, _: sys.exit(128 + number))
    chosen.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for fault in faults:
        name = f"{fault}_{chosen.seed}"
        try:
            record(chosen.out, name, fault, chosen.seed, chosen.rest_s)
            print(f"{name}: recorded", flush=True)
        except StageError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
