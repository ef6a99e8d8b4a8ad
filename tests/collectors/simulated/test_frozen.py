"""The simulator is frozen: what detectors were trained and measured on must not change unnoticed.

`frozen.json` holds a fingerprint of small runs: mean and spread of every column, of the step reports' parts, counts of log codes, and
the answer sheet. Numbers and not bytes, because numpy's vector forms of exp and log differ in the last bit between processors.
`python -m tests.collectors.simulated.test_frozen` takes them anew, after `collectors.simulated.spec.VERSION` was raised.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectors.simulated.families import FAMILIES, columns
from collectors.simulated.noise import F32, F64
from collectors.simulated.run import build
from collectors.simulated.spec import VERSION, Spec
from collectors.simulated.state import Interval
from collectors.simulated.truth import truth

FROZEN = Path(__file__).with_name("frozen.json")
LENGTH_S = 60
RUNS: dict[str, tuple[Spec, str]] = {
    "healthy ddp and moe": (Spec(nodes=12, seed=11, jobs="4:ddp,4:moe", light_share=0.2), "none"),
    "slow gpu, slow port": (Spec(nodes=12, seed=12, jobs="8:pipeline"), "weak_gpu@n00003/gpu2:20+40x1.3,port_slow@n00005/mlx5_1/1:20+40x4"),
    "cooling, leaf": (Spec(nodes=40, seed=13, jobs="40:longseq"), "zone_cooling@zone-00:10+50x0.1,leaf_degraded@leaf-000/rail2:20+40x0.6"),
    "killed, late, stuck": (
        Spec(nodes=12, seed=14, jobs="4:ddp,4:recsys", rails=2),
        "rank_killed@n00001/gpu0:20+10,messages_late@n00005:10+30x7,collector_stuck@n00006:15+30",
    ),
    "work by design": (
        Spec(nodes=16, seed=15, jobs="8:pipeline,8:moe"),
        "stage_imbalance@job-000/stage7:20+40x0.35,expert_imbalance@job-001:20+40",
    ),
}  # fmt: skip
PARTS = ("data", "forward", "backward", "own", "arrived", "wait", "optimizer")


def fingerprint(spec: Spec, faults: str) -> dict[str, Any]:
    """What a run is like, as plain numbers."""
    simulator = build(spec, faults, LENGTH_S)
    intervals = list(simulator.intervals(LENGTH_S))
    sheet = truth(simulator, faults, LENGTH_S)
    return {
        "columns": {name: _columns(name, [i.family(name) for i in intervals]) for name in FAMILIES},
        "steps": _steps(intervals),
        "codes": dict(sorted(Counter(log.event.code or "plain" for i in intervals for log in i.logs).items())),
        "heard": int(sum(i.heard.sum() for i in intervals)),
        "answers": {"jobs": sheet["jobs"], "faults": sheet["faults"], "restarts": sheet["restarts"]},
    }


def _columns(family: str, values: list[F32]) -> dict[str, list[float]]:
    whole = np.stack(values).astype(np.float64)
    return {name: _moments(whole[..., at]) for name, at in columns(family).items()}


def _moments(values: F64) -> list[float]:
    known = values[np.isfinite(values)]
    return [float(known.size), float(known.mean()), float(known.std())] if known.size else [0.0, 0.0, 0.0]


def _steps(intervals: list[Interval]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for step in (s for interval in intervals for s in interval.steps):
        row = found.setdefault(
            step.grid.name, {"count": 0, "phases": Counter(), "seconds": 0.0, "loss": 0.0, **dict.fromkeys(PARTS, 0.0)}
        )
        row["count"] += 1
        row["phases"][step.past.phase] += 1
        row["seconds"] += step.past.end - step.past.begin
        row["loss"] += step.loss
        for part in PARTS:
            row[part] += float(getattr(step.past.outcome, part).sum())
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def differences(found: Any, frozen: Any, where: str = "") -> list[str]:
    """Places at which two fingerprints differ by more than rounding."""
    if isinstance(found, dict) and isinstance(frozen, dict) and found.keys() == frozen.keys():
        return [line for key in found for line in differences(found[key], frozen[key], f"{where}/{key}")]
    if isinstance(found, list) and isinstance(frozen, list) and len(found) == len(frozen):
        return [
            line
            for i, pair in enumerate(zip(found, frozen, strict=True))
            for line in differences(*pair, f"{where}[{i}]")
        ]
    if isinstance(found, int | float) and isinstance(frozen, int | float) and not isinstance(found, bool):
        return (
            []
            if math.isclose(found, frozen, rel_tol=1e-3, abs_tol=1e-6)
            else [f"{where}: {found} now, {frozen} frozen"]
        )
    return [] if found == frozen else [f"{where}: {found!r} now, {frozen!r} frozen"]


@pytest.mark.parametrize("name", RUNS)
def test_the_simulator_is_as_it_was_frozen(name: str) -> None:
    kept = json.loads(FROZEN.read_text(encoding="utf-8"))
    assert kept["version"] == VERSION, "the version was raised: take the fingerprints anew, see the top of this file"
    found = json.loads(json.dumps(fingerprint(*RUNS[name])))
    changed = differences(found, kept["runs"][name])
    assert not changed, (
        f"the simulator changed in {len(changed)} places, first {changed[0]}: if that is meant, raise VERSION in "
        "collectors/simulated/spec.py, take the fingerprints anew and train and measure again"
    )


def test_a_changed_number_is_found() -> None:
    kept = json.loads(FROZEN.read_text(encoding="utf-8"))["runs"]["slow gpu, slow port"]
    other = json.loads(json.dumps(kept))
    other["columns"]["gpu"]["power_w"][1] *= 1.002
    other["answers"]["faults"][0]["culprits"][0]["name"] = "n00004"
    assert [line.partition(":")[0] for line in differences(other, kept)] == [
        "/columns/gpu/power_w[1]",
        "/answers/faults[0]/culprits[0]/name",
    ]


def freeze() -> None:
    """Write the fingerprints of the present simulator."""
    runs = {name: fingerprint(*run) for name, run in RUNS.items()}
    FROZEN.write_text(json.dumps({"version": VERSION, "runs": runs}, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    freeze()
