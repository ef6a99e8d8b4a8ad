"""Link escape under a real DDP job: three nodes in network namespaces, two rails, wardens, launchers, gloo.

`python -m benchmarks.training.links --trials 100` takes the first rail of one node after the other away, in turns by `ip link set down` on
the node and at the switch, once with routes alone and once with MPTCP, and prints what the job felt. Other faults (no carrier lost, one
direction, loss) come after, a few trials each. Needs root. Writes benchmarks/results/links_ddp.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwarden_hook.escape import AFTER_CHANGE_S

from benchmarks.training.bars import Bar
from benchmarks.training.bars import rows as bar_rows
from benchmarks.training.rail_cluster import RailCluster, wait_for
from benchmarks.training.rail_ring import RailRing
from benchmarks.training.rail_stage import Stage, stage

RESULTS = Path(__file__).parents[1] / "results" / "links.json"
DOWN_S, CALM_S = 0.7, 0.4
"""A fault of a rail that has been well for so long is a first one: what a flapping rail is made to wait is no part of the figures."""
NAMED_BAR_MS, BACK_BAR_MS = 20.0, 150.0
GAP_BAR_MS = {"routes": 500.0, "mptcp": 100.0}
CALM_MACHINE_MS = 25.0
Nodes = RailCluster | RailRing
Row = dict[str, Any]


class Probe:
    """How long the machine let a process of our priority wait: what the job feels of that is no matter of links."""

    def __init__(self) -> None:
        self._waits: list[tuple[int, int]] = []
        threading.Thread(target=self._run, name="probe", daemon=True).start()

    def _run(self) -> None:
        while True:
            began_ns = time.time_ns()
            time.sleep(0.005)
            if time.time_ns() - began_ns > 10e6:
                self._waits.append((began_ns, time.time_ns()))

    def longest_ms(self, since_ns: int, until_ns: int) -> float:
        """Within a window."""
        return max((b - a for a, b in list(self._waits) if b > since_ns and a < until_ns), default=0) / 1e6


PROBE = Probe()


def one_trial(nodes: Nodes, number: int, kind: str) -> Row:
    """Take rail a of a node away and give it back; times in milliseconds from the moment that the command was handed over."""
    at, fault = nodes.stage, FAULTS[kind]
    events = nodes.collectors.events
    events.clear()
    quiet_ns = time.time_ns() - int(0.3e9)
    began_ns = fault(at, number, True)
    name = at.names[number]
    wait_for("the move", lambda: [e for e in list(events) if e["event"] == "moved" and e["node"] == name], 10.0)
    time.sleep(DOWN_S)
    moved = list(events)
    repaired_ns = fault(at, number, False)
    # of a lossy rail a node may come back before the repair
    newest = {event["node"]: event for event in moved}
    away = {node for node, event in newest.items() if not event.get("settled")}
    wait_for("the return", lambda: away <= {e["node"] for e in returns(nodes, repaired_ns) if e["settled"]}, 90.0)
    time.sleep(CALM_S + 0.2)
    ended_ns = time.time_ns()
    returned = returns(nodes, repaired_ns)
    own = [event for event in moved if event["event"] == "moved" and event["node"] == name]
    return {
        "kind": kind, "node": name, "cause": own[0]["cause"],
        "named_ms": (own[0]["at_ns"] - began_ns) / 1e6,
        "peers_ms": max((event["at_ns"] - began_ns) / 1e6 for event in moved if event["event"] == "moved"),
        "gap_ms": nodes.gap_ms(began_ns, repaired_ns),
        "back_ms": max(((event["at_ns"] - repaired_ns) / 1e6 for event in returned), default=0.0),
        "back_gap_ms": nodes.gap_ms(repaired_ns, ended_ns),
        "quiet_gap_ms": nodes.gap_ms(quiet_ns, began_ns),
        "machine_ms": PROBE.longest_ms(quiet_ns, repaired_ns),
    }  # fmt: skip


def returns(nodes: Nodes, since_ns: int) -> list[Row]:
    """Moves back; one before the repair was a bad rail that seemed well for a moment."""
    return [
        event for event in list(nodes.collectors.events) if event["event"] == "returned" and event["at_ns"] >= since_ns
    ]


def _link(at: Stage, number: int, bad: bool) -> int:
    return at.set_link(number, "a", "down" if bad else "up")


def _port(at: Stage, number: int, bad: bool) -> int:
    return at.set_port(number, "a", "down" if bad else "up")


def _silent(at: Stage, number: int, bad: bool) -> int:
    return at.block(number, "a", bad)


def _one_way(at: Stage, number: int, bad: bool) -> int:
    return at.lose(number, "a", 1.0 if bad else 0.0)


def _loss(at: Stage, number: int, bad: bool) -> int:
    return at.lose(number, "a", 0.1 if bad else 0.0)


FAULTS: dict[str, Callable[[Stage, int, bool], int]] = {
    "link down": _link,
    "port down": _port,
    "silent": _silent,
    "one way": _one_way,
    "loss 10 %": _loss,
}
CARRIER = ("link down", "port down")


def run_mode(mode: str, at: Stage, root: Path, trials: int, others: int, ring: bool) -> Row:
    """All trials of one mode over one job that is started once."""
    settings: dict[str, object] = {"mptcp": mode == "mptcp", "calm_s": CALM_S}
    made: Nodes = RailRing(root, at, **settings) if ring else RailCluster(root, at, settings)
    with made as nodes:
        nodes.wait_steps(50, 600.0)
        before = nodes.pids()
        count = len(at.names)
        rows = []
        for trial in range(trials):
            rows.append(one_trial(nodes, trial % count, CARRIER[trial // count % 2]))
            show_progress(mode, trial + 1, trials)
        told = [nodes.status(number) for number in range(count)] if isinstance(nodes, RailCluster) else []
        generations = {status["generation"] for status in told} or {1}
        for kind in ("silent", "one way", "loss 10 %"):
            for trial in range(others):
                # heartbeats come at their usual pace again: a fault that no carrier tells of finds the watch at rest
                time.sleep(AFTER_CHANGE_S + 0.5)
                rows.append(one_trial(nodes, trial % count, kind))
        return {"mode": mode, "rows": rows, "restarts": int(nodes.pids() != before or generations != {1})}


def show_progress(mode: str, done: int, trials: int) -> None:
    if sys.stderr.isatty() or done % 25 == 0:
        print(f"{mode}: {done} of {trials}", file=sys.stderr, flush=True)


def quantile(values: list[float], share: float) -> float:
    """Of the sorted values, none is made up in between."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(result: Row) -> list[Row]:
    """p50, p99 and the longest, by kind of fault."""
    found = []
    groups = {"carrier lost": [r for r in result["rows"] if r["kind"] in CARRIER]}
    groups |= {kind: [r for r in result["rows"] if r["kind"] == kind] for kind in FAULTS if kind not in CARRIER}
    for kind, rows in groups.items():
        if rows:
            numbers = {
                key: [quantile([r[key] for r in rows], share) for share in (0.5, 0.99)]
                for key in ("named_ms", "gap_ms", "back_ms", "back_gap_ms", "quiet_gap_ms")
            }
            found.append({"mode": result["mode"], "kind": kind, "trials": len(rows), **numbers})
    return found


def bars_of(results: list[Row]) -> list[Bar]:
    """The promises: p99 where a carrier was lost, the longest return after every other fault."""
    made = []
    for result in results:
        mode = result["mode"]
        rows = [row for row in result["rows"] if row["kind"] in CARRIER]
        others = [row["back_ms"] for row in result["rows"] if row["kind"] in ("silent", "one way")]
        for name, bar in {"named": NAMED_BAR_MS, "gap": GAP_BAR_MS[mode], "back": BACK_BAR_MS}.items():
            made.append(Bar(f"{mode}: {name}, p99, ms", quantile([row[f"{name}_ms"] for row in rows], 0.99), bar))
        if others:
            made.append(Bar(f"{mode}: back after a silent or one-way rail, longest, ms", max(others), BACK_BAR_MS))
        made.append(Bar(f"{mode}: restarts", result["restarts"], 0))
    return made


def verdicts(results: list[Row]) -> list[str]:
    """One line per bar: met or missed, in how many trials; and the same for trials in which the machine let nobody wait long."""
    lines = []
    for result in results:
        rows = [r for r in result["rows"] if r["kind"] in CARRIER]
        calm = [r for r in rows if r["machine_ms"] < CALM_MACHINE_MS]
        bars = {"named": NAMED_BAR_MS, "gap": GAP_BAR_MS[result["mode"]], "back": BACK_BAR_MS}
        for name, bar in bars.items():
            cells = "; calm machine ".join(_against([r[f"{name}_ms"] for r in some], bar) for some in (rows, calm))
            lines.append(f"{result['mode']:7s} {name:6s} bar {bar:4.0f} ms: {cells}")
        lines.append(f"{result['mode']:7s} restarts {result['restarts']}")
    return lines


def _against(values: list[float], bar: float) -> str:
    if not values:
        return "no trial"
    p99 = quantile(values, 0.99)
    return (
        f"p99 {p99:.1f} ms {'met' if p99 < bar else 'MISSED'}, {sum(value < bar for value in values)} of {len(values)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="per mode; about 2 s each")
    parser.add_argument("--others", type=int, default=3, help="trials per mode and fault that loses no carrier")
    parser.add_argument("--modes", default="routes,mptcp")
    parser.add_argument(
        "--ring", action="store_true", help="a ring over plain sockets instead of torch: starts at once"
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--json", type=Path, help="default: links_ddp.json or links_ring.json of the results")
    given = parser.parse_args()
    if os.geteuid() != 0:
        print("the link benchmark needs root: it makes network namespaces", file=sys.stderr)
        if given.json is not None and not given.json.exists():
            given.json.write_text(json.dumps({"bars": [], "notes": ["not measured: it needs root"], "failed": True}))
        return 2
    results = []
    with tempfile.TemporaryDirectory(prefix="twl") as folder, stage(given.nodes) as at:
        for mode in given.modes.split(","):
            results.append(run_mode(mode, at, Path(folder) / mode, given.trials, given.others, given.ring))
    table = [row for result in results for row in summary(result)]
    print(
        f"{'mode':7s} {'fault':13s} {'n':>4s}"
        + "".join(f"{key:>20s}" for key in ("named", "gap", "back", "gap then", "quiet gap"))
    )
    for row in table:
        cells = (row[key] for key in ("named_ms", "gap_ms", "back_ms", "back_gap_ms", "quiet_gap_ms"))
        print(
            f"{row['mode']:7s} {row['kind']:13s} {row['trials']:4d}"
            + "".join(f"{p50:10.1f} /{p99:8.1f}" for p50, p99 in cells)
        )
    print(
        "milliseconds, p50 / p99; `quiet gap`: the longest between two steps in 0.3 s before the fault, for comparison"
    )
    print("\n".join(verdicts(results)))
    load = statistics.fmean(os.getloadavg())
    job = "ring" if given.ring else "ddp"
    kept = {
        "job": job,
        "machine": platform.platform(),
        "load": load,
        "nodes": given.nodes,
        "summary": table,
        "bars": bar_rows(bars_of(results)),
        "notes": [],
        "results": results,
    }
    (given.json or RESULTS.with_name(f"links_{job}.json")).write_text(json.dumps(kept, indent=1) + "\n")
    return int(any(result["restarts"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
