"""One of four ranks at half speed: the step rate before, with the fault, after the rebalance, after the repair.

Real wardens, launchers, DDP over gloo; the `rebalance` verb as the action service uses it: costs are read from the wardens, shares
are proposed, told to all ranks, in force on one step everywhere. Bar: at least 1.4 times the step rate with the fault in place.

    python -m benchmarks.training.rebalance              # accelerator-like: a micro-batch sleeps 20 ms, the slow rank's 40 ms
    python -m benchmarks.training.rebalance --quota 20   # processor: every rank has 40 % of a core, the slow one 20 % (root, cgroup v1)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from actions import shares
from actions.backends.base import Order
from actions.backends.warden import WardenBackend, WardenSettings
from actions.world import JobState
from benchmarks.training.bars import Bar
from tests.hook.cluster import Cluster, wait_for
from trainwarden.clock import SystemClock

BAR, FELT = 1.4, 1.5
WORLD = 4
SLOW = "n2"
USUAL_MS = 20.0
HEALTHY_PERCENT = 40
RESULTS = Path(__file__).parents[1] / "results" / "training_rebalance.json"
CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000


class Bench:
    """The job, its wardens and the backend that commands them."""

    def __init__(self, folder: Path, steps: int, quota: int) -> None:
        self.steps, self.quota, self.folder = steps, quota, folder
        work = ["--rounds", "40"] if quota else ["--pace-ms", str(USUAL_MS)]
        script = str(Path(__file__).with_name("rebalance_job.py"))
        self.cluster = Cluster(folder, WORLD, ["--folder", str(folder), *work], ["--nnodes", "4:4"], script)
        self.changes = 0
        self.backend: WardenBackend | None = None

    def start(self) -> None:
        """All ranks stepping, on equal terms."""
        for name in self.cluster.names:
            self.cluster.start_warden(name)
        self.cluster.wait_rows(1, 5, WORLD, 180)
        nodes = {name: f"http://127.0.0.1:{port}" for name, port in self.cluster.ports.items()}
        settings = WardenSettings(nodes, secret_file=self.folder / "secret", status_timeout_ms=5000)
        self.backend = WardenBackend(settings, SystemClock())
        for name in self.cluster.names:
            self.set_speed(name, 1.0)

    def set_speed(self, node: str, ratio: float) -> None:
        """How fast a node computes from now on."""
        if not self.quota:
            (self.folder / f"pace.{node}").write_text(str(USUAL_MS / ratio))
            return
        percent = HEALTHY_PERCENT if ratio == 1.0 else self.quota
        group = CGROUPS / f"tw-bench-{self.cluster.job}-{node}"
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(PERIOD_US * percent // 100))
        pid = self.cluster.pid_of(self.cluster.names.index(node), 1)
        (group / "cgroup.procs").write_text(str(pid))

    def step_ms(self) -> float:
        """Median length of the coming steps, from the rows of rank 0."""
        first = max(row["step"] for row in self.cluster.rows()) + 3
        rows = wait_for("steps", lambda: self._rows(first), 300)
        return float(statistics.median(1e3 * (b["at"] - a["at"]) for a, b in pairwise(rows)))

    def _rows(self, first: int) -> list[dict[str, Any]] | None:
        rows = [row for row in self.cluster.rows() if row["rank"] == 0 and row["step"] >= first]
        return rows if len(rows) > self.steps else None

    def state(self) -> JobState:
        """The job as its wardens describe it."""
        assert self.backend is not None
        return JobState(self.cluster.job, self.backend.cluster())

    def rebalance(
        self, choose: Callable[[dict[int, shares.RankShare]], tuple[int, ...]]
    ) -> tuple[tuple[int, ...], float]:
        """Change the shares; seconds from the order to the first step with them on every rank."""
        ranks = wait_for("settled costs", self._settled, 300)
        wanted = choose(ranks)
        if not wanted:
            return (), 0.0
        self.changes += 1
        began = time.monotonic()
        order = Order(f"bench{self.changes}", self.cluster.job, 1, "benchmark")
        assert self.backend is not None
        outcome = self.backend.rebalance(order, wanted)
        if outcome.status != "done":
            raise RuntimeError(outcome.reason)
        wait_for("the new shares", lambda: self._shares_now() == list(wanted), 60)
        return wanted, time.monotonic() - began

    def _settled(self) -> dict[int, shares.RankShare] | None:
        ranks = self.state().shares
        return ranks if len(ranks) == WORLD and all(r.recent_steps >= 8 for r in ranks.values()) else None

    def _shares_now(self) -> list[int]:
        newest = {row["rank"]: row for row in self.cluster.rows()}
        return [newest[rank]["share"] for rank in range(WORLD)]

    def first_steps(self) -> list[int]:
        """The first step of the newest shares, by rank: they must be one."""
        rows = self.cluster.rows()
        return [
            max(r["step"] for r in rows if r["rank"] == rank and r["share"] != now) + 1
            for rank, now in enumerate(self._shares_now())
            if any(r["rank"] == rank and r["share"] != now for r in rows)
        ]

    def close(self) -> None:
        """End everything."""
        if self.backend is not None:
            self.backend.close()
        self.cluster.close()
        for group in CGROUPS.glob(f"tw-bench-{self.cluster.job}-*"):
            empty(group)
            group.rmdir()


def empty(group: Path) -> None:
    """Wait until the processes of a cgroup are gone."""
    wait_for("an empty cgroup", lambda: not (group / "cgroup.procs").read_text(), 30)


def measure(steps: int, quota: int) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory(prefix="tw-rebalance-") as name:
        bench = Bench(Path(name), steps, quota)
        try:
            bench.start()
            found: dict[str, Any] = {"healthy_ms": bench.step_ms()}
            bench.set_speed(SLOW, 0.5)
            time.sleep(1.0)
            found["slow_ms"] = bench.step_ms()
            found["changes"] = []
            for _ in range(3):
                wanted, took_s = bench.rebalance(lambda ranks: shares.propose(ranks, WORLD).shares)
                if not wanted:
                    break
                found["changes"].append(
                    {"shares": shares.text_of(wanted), "took_s": took_s, "first_steps": bench.first_steps()}
                )
            found["balanced_ms"] = bench.step_ms()
            bench.set_speed(SLOW, 1.0)
            wait_for("alike ranks", lambda: (r := bench._settled()) and shares.alike(r), 300)
            even, took_s = bench.rebalance(shares.even)
            found["returned"] = {"shares": shares.text_of(even), "took_s": took_s, "first_steps": bench.first_steps()}
            found["repaired_ms"] = bench.step_ms()
            return found
        finally:
            bench.close()


def main() -> int:
    """Measure, print, write; 1 below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps per measurement")
    parser.add_argument("--quota", type=int, default=0, help="slow by this share of a core in percent, not by a sleep")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = measure(given.steps, given.quota)
    found["speedup"] = found["slow_ms"] / found["balanced_ms"]
    found |= {"bar": BAR, "mode": f"quota {given.quota} %" if given.quota else "pace", "load": os.getloadavg()[0]}
    bar = Bar("step rate with shares / without, one of four at half speed", found["speedup"], BAR, at_least=True)
    steps = ", ".join(f"{name} {found[name + '_ms']:.0f}" for name in ("healthy", "slow", "balanced", "repaired"))
    notes = [f"a step, ms: {steps}"]
    if found["slow_ms"] < FELT * found["healthy_ms"]:
        notes.append(
            f"the fault itself made a step less than {FELT:g} times as long: a loaded machine, and nothing to gain"
        )
    found |= {"bars": [bar.row()], "notes": notes}
    print(json.dumps(found, indent=1))
    known = json.loads(given.json.read_text()) if given.json.exists() else {}
    given.json.parent.mkdir(exist_ok=True)
    given.json.write_text(json.dumps({**known, "quota" if given.quota else "pace": found}, indent=1) + "\n")
    return 0 if bar.met else 1


if __name__ == "__main__":
    sys.exit(main())
