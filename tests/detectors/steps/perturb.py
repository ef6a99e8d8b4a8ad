"""The same recorded fault in other circumstances: other nodes and ranks, an earlier onset, a faster or slower machine, lost rows.

A perturbation reads the tables of a run and writes them to another folder, so that everything behind them (adaptor, alignment, detectors,
correlation) is the real thing.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, str]


@dataclass
class Recorded:
    """Tables of a run. Events and labels keep their own form."""

    steps: list[Row]
    nodes: list[Row]
    host: list[Row]
    events: list[dict[str, Any]]
    labels: list[dict[str, Any]]

    @property
    def start_s(self) -> float:
        """When the first step begins."""
        return min(float(row["wall"]) for row in self.steps)

    @property
    def onset_s(self) -> float:
        """When the first fault begins; the end of the run when there is none."""
        last = max(float(row["wall"]) for row in self.steps)
        return min((float(label["start"]) for label in self.labels), default=last)


Perturbation = Callable[[Recorded], Recorded]


def load(folder: Path, run: str) -> Recorded:
    """Tables of a run as they were recorded."""
    events = [json.loads(line) for line in _text(folder, f"{run}.events.jsonl").splitlines() if line.strip()]
    labels = json.loads(_text(folder, f"{run}.labels.json"))["labels"]
    steps, nodes, host = (
        list(csv.DictReader(io.StringIO(_text(folder, name))))
        for name in (f"{run}.csv", f"{run}.nodes.csv", f"{run}.host.csv")
    )
    return Recorded(steps, nodes, host, events, labels)


def save(found: Recorded, folder: Path, run: str) -> None:
    """Write tables where the adaptor finds them."""
    for name, rows in ((f"{run}.csv", found.steps), (f"{run}.nodes.csv", found.nodes), (f"{run}.host.csv", found.host)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    (folder / f"{run}.events.jsonl").write_text("\n".join(json.dumps(event) for event in found.events))
    (folder / f"{run}.labels.json").write_text(json.dumps({"labels": found.labels}))


def as_recorded(found: Recorded) -> Recorded:
    """No change."""
    return found


def on_other_nodes(found: Recorded) -> Recorded:
    """Nodes and ranks change places, each in another way."""
    node_of, rank_of = {i: (3 * i + 2) % 4 for i in range(4)}, {i: (i + 1) % 4 for i in range(4)}
    for row in found.steps:
        row["node"], row["rank"] = str(node_of[int(row["node"])]), str(rank_of[int(row["rank"])])
    for row in found.nodes:
        row["node"] = str(node_of[int(row["node"])])
    for event in found.events:
        if str(event.get("node", "")).isdigit():
            event["node"] = node_of[int(event["node"])]
        if str(event.get("rank", "")).isdigit():
            event["rank"] = rank_of[int(event["rank"])]
    for label in found.labels:
        label["nodes"] = [node_of[int(node)] for node in label["nodes"]]
    found.steps.sort(key=lambda row: float(row["wall"]))
    return found


def attached_late(found: Recorded, healthy_s: float = 18.0) -> Recorded:
    """Only so much health is seen before the fault: the workers came up in the middle of the run."""
    from_s = max(found.start_s, found.onset_s - healthy_s)
    _keep(found, lambda at_s: at_s >= from_s)
    for event in found.events:
        event["t"] = max(float(event["t"]), from_s)
    return found


def earlier(found: Recorded, by_s: float = 10.0) -> Recorded:
    """The fault comes sooner after the start: a stretch of health between is left out."""
    cut_from, cut_to = found.onset_s - 5.0 - by_s, found.onset_s - 5.0
    _keep(found, lambda at_s: not cut_from <= at_s < cut_to)
    _map_times(found, lambda at_s: at_s - by_s if at_s >= cut_to else at_s)
    return found


def slower(found: Recorded, by: float) -> Recorded:
    """A machine on which everything takes `by` times as long."""
    zero = found.start_s
    _map_times(found, lambda at_s: zero + (at_s - zero) * by)
    for row in found.steps:
        for name in [column for column in row if column.endswith("_ms")]:
            row[name] = str(float(row[name]) * by if float(row[name]) > 0 else float(row[name]))
    for row in found.nodes:
        for name in ("cpu_s", "thr_ms"):
            row[name] = str(float(row[name]) * by if float(row[name]) > 0 else float(row[name]))
    return found


def with_loss(found: Recorded, share: float = 0.02) -> Recorded:
    """Rows of steps and of telemetry that never arrived."""
    rng = np.random.default_rng(0)
    found.steps = [row for row in found.steps if rng.random() >= share]
    found.nodes = [row for row in found.nodes if rng.random() >= share]
    return found


PERTURBATIONS: dict[str, Perturbation] = {
    "as recorded": as_recorded,
    "other nodes": on_other_nodes,
    "attached late": attached_late,
    "earlier": earlier,
    "0.7 times the time": lambda found: slower(found, 0.7),
    "1.5 times the time": lambda found: slower(found, 1.5),
    "2 % of rows lost": with_loss,
    "all at once": lambda found: with_loss(slower(on_other_nodes(earlier(found, 6.0)), 1.2), 0.01),
}


def _keep(found: Recorded, wanted: Callable[[float], bool]) -> None:
    found.steps, found.nodes, found.host = (
        [row for row in table if wanted(float(row["wall"]))] for table in (found.steps, found.nodes, found.host)
    )


def _map_times(found: Recorded, change: Callable[[float], float]) -> None:
    for table, columns in ((found.steps, ("wall", "arrive")), (found.nodes, ("wall",)), (found.host, ("wall",))):
        for row in table:
            for name in columns:
                row[name] = f"{change(float(row[name])):.6f}"
    for event in found.events:
        event["t"] = change(float(event["t"]))
    for label in found.labels:
        label["start"], label["end"] = change(float(label["start"])), change(float(label["end"]))


def _text(folder: Path, name: str) -> str:
    packed = folder / f"{name}.gz"
    return gzip.decompress(packed.read_bytes()).decode() if packed.exists() else (folder / name).read_text()
