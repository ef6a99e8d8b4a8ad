"""The ground truth of a simulation: what was wrong, where, when, how much, and what should have been done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from collectors.simulated.engine import Simulator
from collectors.simulated.incidents import Incident
from collectors.simulated.jobs import JobRun
from collectors.simulated.target import SHARED, Scope
from trainwarden.clock import NS_PER_S

SCHEMA = 1
DECISIONS = {"isolate": "isolate", "rebalance": "rebalance", "reroute": "reroute", "restart": "restart", "roll": "restart",
             "stop": "restart", "alert": "alert", "drain": "alert", "clean": "alert", "nothing": "none"}  # fmt: skip


def truth(simulator: Simulator, asked: str, length_s: float) -> dict[str, Any]:
    """The whole answer sheet, ready for JSON. `faults` is empty for a healthy run; `restarts` are planned ones, no faults."""
    spec = simulator.spec
    return {
        "schema": SCHEMA, "seed": spec.seed, "spec": asdict(spec), "asked": asked, "start_ns": spec.start_ns,
        "end_ns": spec.start_ns + round(length_s * NS_PER_S),
        "jobs": [{"name": g.name, "first_node": simulator.layout.names[g.first_node], "nodes": g.nodes, **g.facts(),
                  "step_s": run.nominal_s} for g, run in zip(simulator.placement.grids, simulator.jobs, strict=True)],
        "faults": [fault(simulator, incident, length_s) for incident in simulator.incidents],
        "restarts": [{"job": run.grid.name, "at_ns": spec.start_ns + round(r.from_s * NS_PER_S), "seconds": r.to_s - r.from_s}
                     for run in simulator.jobs for r in run.restarts if r.planned and r.from_s < length_s],
    }  # fmt: skip


def fault(simulator: Simulator, incident: Incident, length_s: float) -> dict[str, Any]:
    """One row of the answer sheet."""
    kind, start_ns = incident.kind, simulator.spec.start_ns
    stops = bool(kind.stop) or kind.stop_at > 0
    return {
        "id": incident.index, "kind": kind.name, "taxonomy": kind.number, "class": str(kind.cls), "scope": str(kind.scope),
        "bad_node": kind.bad_node, "shared": kind.scope in SHARED, "culprits": culprits(simulator, incident),
        "victims": victims(simulator, incident), "start_ns": start_ns + round(incident.start_s * NS_PER_S),
        "end_ns": start_ns + round(min(incident.end_s, length_s) * NS_PER_S),
        "fails_ns": start_ns + round(incident.fails_s * NS_PER_S) if stops else 0, "magnitude": incident.magnitude, "unit": kind.unit,
        "course": str(kind.course), "signals": list(kind.signals), "slowdown": slowdowns(simulator.jobs, incident),
        "action": kind.action, "decision": DECISIONS[kind.action.replace(",", " ").replace(":", " ").replace(";", " ").split()[0]],
    }  # fmt: skip


def culprits(simulator: Simulator, incident: Incident) -> list[dict[str, Any]]:
    """What is to blame: the thing itself, with the nodes below it. A job is named where no machine is at fault."""
    target, names = incident.target, simulator.layout.names
    row: dict[str, Any] = {
        "kind": str(target.scope),
        "name": target.name,
        "nodes": [names[i] for i in target.nodes.tolist()],
    }
    if target.scope in (Scope.GPU, Scope.NIC):
        row |= {"kind": "node", "name": names[int(target.nodes[0])], "device": target.name.partition("/")[2]}
    if target.scope is Scope.GPU and (grid := simulator.placement.job_of(int(target.nodes[0]))) is not None:
        row |= {"job": grid.name, "rank": grid.rank_of(int(target.nodes[0]), int(target.gpus[1][0]))}
    if target.scope is Scope.PAIR:
        row["kind"] = "link"
    return [row]


def victims(simulator: Simulator, incident: Incident) -> list[str]:
    """Jobs that it strikes."""
    return [simulator.placement.grids[index].name for index in incident.target.jobs]


def slowdowns(jobs: Sequence[JobRun], incident: Incident) -> dict[str, float]:
    """Median step while it lasted over the median before, per job struck; absent where there are too few steps of either."""
    found: dict[str, float] = {}
    for index in incident.target.jobs:
        run = jobs[index]
        begun, lasted = (
            (np.array(column) for column in zip(*run.lasted, strict=True)) if run.lasted else (np.empty(0), np.empty(0))
        )
        during = lasted[(begun >= incident.start_s) & (begun < incident.end_s)]
        before = lasted[begun < incident.start_s]
        if len(during) >= 3 and len(before) >= 3:
            found[run.grid.name] = round(float(np.median(during) / np.median(before)), 4)
    return found
