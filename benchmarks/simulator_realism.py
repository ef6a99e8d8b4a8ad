"""How far the simulator is from the real thing: marginals, memory and togetherness of step series, and a classifier that tries to tell.

    python -m benchmarks.simulator_realism [--nodes 400] [--seconds 120]

Real step series: Alibaba PAI (per-worker step times of four jobs, fluctuation of a hundred), ByteDance (computing per stage and
replica of three traces); of whole jobs, MLPerf and Megatron-LM (`whole_jobs.py`). Prints a table, writes
`benchmarks/results/simulator_realism.json` and `.png`. There is no bar to pass: the numbers are for whoever wants to know what a
result on simulated data is worth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import whole_jobs
from benchmarks.whole_jobs import Whole
from collectors.simulated.engine import Simulator
from collectors.simulated.families import columns
from collectors.simulated.marginals import table
from collectors.simulated.noise import F64, Ints
from collectors.simulated.run import build
from collectors.simulated.spec import Spec

DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parent / "results"
LAGS = (1, 2, 5, 10)
WINDOW = 24
MANY = ",".join(
    f"weak_gpu@n0000{node}/gpu0:{start}+{lasting}x{size}"
    for node, start, lasting, size in (
        (0, 1, 39000, 3),
        (5, 1, 39000, 4),
        (7, 1, 39000, 4),
        (8, 100, 150, 2),
        (6, 300, 200, 2.5),
    )
)
"""Stragglers such as the publisher describes for the fourth Alibaba job."""

MARGINALS: dict[str, tuple[str, str, float]] = {
    "gpu_power_w": ("gpu", "power_w", 1.0), "gpu_temp_c": ("gpu", "temp_c", 1.0), "memory_temp_c": ("gpu", "memory_temp_c", 1.0),
    "gpu_util_ratio": ("gpu", "gpu_util_ratio", 1.0), "sm_active_ratio": ("gpu", "sm_active_ratio", 1.0),
    "tensor_active_ratio": ("gpu", "tensor_active_ratio", 1.0), "fb_used_ratio": ("gpu", "fb_used_ratio", 1.0),
    "cpu_busy_ratio": ("host", "cpu_busy_ratio", 1.0), "server_power_w": ("board", "server_power_w", 1.0),
    "ib_tx_mb_per_s": ("nic", "tx_bytes_per_s", 1e-6),
}  # fmt: skip


# --- marginals -------------------------------------------------------------------------------------------------------------


def sampled(simulator: Simulator, seconds: int, every: int = 7) -> dict[str, F64]:
    """Values of the metrics that have a real counterpart, all devices, some moments."""
    found: dict[str, list[F64]] = {name: [] for name in MARGINALS}
    for interval in simulator.intervals(seconds):
        if interval.number % every == every - 1:
            for name, (family, column, scale) in MARGINALS.items():
                values = interval.family(family)
                rows = values[:, : simulator.spec.rails] if family == "nic" else values
                found[name].append(rows[..., columns(family)[column]].ravel().astype(np.float64) * scale)
    return {name: np.concatenate(parts)[~np.isnan(np.concatenate(parts))] for name, parts in found.items()}


def distance(name: str, values: F64) -> float:
    """Kolmogorov-Smirnov distance to the real distribution, with room for rounding: the smaller of the two sides at steps."""
    grid = table()
    low = np.searchsorted(np.sort(values), grid[name] - tolerance(name), side="right") / len(values)
    high = np.searchsorted(np.sort(values), grid[name] + tolerance(name), side="right") / len(values)
    gap = np.maximum(np.maximum(low - grid["quantile"], grid["quantile"] - high), 0.0)
    at_zero = float(np.mean(values <= tolerance(name))) - float(np.mean(grid[name] <= tolerance(name)))
    return float(max(gap[1:-1].max(), at_zero))


def tolerance(name: str) -> float:
    """A hundredth of the usual range: what rounding and sampling may move."""
    column = table()[name]
    return float(0.01 * (column[-2] - column[1]))


# --- step series -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Log step times less each rank's median: [step, rank]; `group` and `stage` say who belongs together."""

    name: str
    residual: F64
    group: Ints
    stage: Ints
    lasting: F64


def series(name: str, times: F64, group: Ints, stage: Ints) -> Series:
    """From times [step, rank]."""
    logs = np.log(np.maximum(times, 1e-6))
    middle = np.median(logs, axis=0)
    of_stage = {s: np.median(middle[stage == s]) for s in set(stage.tolist())}
    return Series(name, logs - middle, group, stage, middle - np.array([of_stage[s] for s in stage.tolist()]))


def alibaba(number: int) -> Series:
    """A job of Alibaba's PAI trace: ten workers, each its own group."""
    rows = pd.read_csv(DATA / "alibaba" / f"job_{number}_norm.csv.gz")
    times = rows.pivot_table(index="time", columns="worker", values="batch_time_norm").dropna().to_numpy()
    return series(f"alibaba job {number}", times, np.arange(times.shape[1]), np.zeros(times.shape[1], dtype=np.int64))


def bytedance(name: str) -> Series:
    """Computing per step of each (replica, stage) of a ByteDance trace."""
    rows = pd.read_parquet(
        DATA / "bytedance" / f"trace-{name}.parquet", columns=["dp_rank", "stage", "step", "optype", "duration"]
    )
    rows = rows[rows.optype.str.contains("compute")]
    cells = rows.groupby(["step", "dp_rank", "stage"]).duration.sum().unstack(["dp_rank", "stage"]).dropna()
    group, stage = (np.array([place[i] for place in cells.columns]) for i in (0, 1))
    return series(f"bytedance {name}", cells.to_numpy(), group, stage)


def simulated(name: str, jobs: str, steps: int, faults: str = "none", seed: int = 5) -> Series:
    """Local times of the first simulated job, one tensor place per (replica, stage), for `steps` training steps."""
    nodes = int(jobs.partition(":")[0])
    spec = Spec(nodes=nodes + 1, seed=seed, jobs=jobs, light_share=0.0, idle_share=0.0)
    simulator = build(spec, faults, 40_000.0)
    found: list[F64] = []
    while len(found) < steps:
        for ended in simulator.advance().steps:
            if ended.past.phase in ("train", "checkpoint"):
                outcome = ended.past.outcome
                found.append((outcome.forward + outcome.backward)[:, :, 0].ravel())
    grid = simulator.placement.grids[0]
    stage, group = np.divmod(np.arange(grid.pp * grid.dp), grid.dp)
    # one rank per machine where ranks stand alone, as in the real jobs
    chosen = slice(0, None, 8) if grid.tp == 1 else slice(0, 64)
    return series(name, np.stack(found[:steps])[:, chosen], group[chosen], stage[chosen])


def described(one: Series) -> dict[str, float]:
    """Spread, tails, memory and togetherness; medians over ranks or pairs, NaN where there is no such pair."""
    r = one.residual
    pairs = np.asarray(np.corrcoef((r + 1e-12 * np.random.default_rng(0).standard_normal(r.shape)).T))
    first, second = np.triu_indices(len(pairs), 1)
    kinds: dict[str, Callable[[], Any]] = {
        "same replica": lambda: (one.group[first] == one.group[second]), "same stage": lambda: (one.stage[first] == one.stage[second]),
    }  # fmt: skip
    found = {
        "spread": float(np.median(r.std(axis=0))), "p99": float(np.median(np.quantile(r, 0.99, axis=0))),
        "lasting spread": float(one.lasting.std()),
        **{f"memory {lag}": float(np.median([_lagged(r[:, k], lag) for k in range(r.shape[1])])) for lag in LAGS},
    }  # fmt: skip
    for name, chosen in kinds.items():
        among = pairs[first, second][chosen()]
        found[f"together, {name}"] = float(np.median(among)) if among.size else float("nan")
    return found


def _lagged(values: F64, lag: int) -> float:
    if len(values) <= lag + 2 or values.std() == 0:
        return float("nan")
    return float(np.corrcoef(values[:-lag], values[lag:])[0, 1])


# --- a classifier that tries to tell -----------------------------------------------------------------------------------------


FEATURES = (
    "spread",
    "skew",
    "tails",
    "largest",
    "smallest",
    "memory 1",
    "memory 2",
    "memory 5",
    "roughness",
    "with the others",
)


def features(one: Series) -> F64:
    """One row per window and rank; scale-free where it can be, so that it must look at shape."""
    rows = []
    for begin in range(0, len(one.residual) - WINDOW + 1, WINDOW):
        part = one.residual[begin : begin + WINDOW]
        shared = np.median(part, axis=1)
        for k in range(part.shape[1]):
            rows.append(_window(part[:, k], shared))
    return np.array(rows)


def _window(values: F64, shared: F64) -> list[float]:
    spread = float(values.std()) + 1e-9
    centred = (values - values.mean()) / spread
    return [
        np.log(spread), float((centred**3).mean()), float((centred**4).mean()), float(centred.max()), float(centred.min()),
        *[np.nan_to_num(_lagged(values, lag)) for lag in (1, 2, 5)], float(np.abs(np.diff(centred)).mean()),
        _with(values, shared),
    ]  # fmt: skip


def _with(values: F64, shared: F64) -> float:
    return float(np.corrcoef(values, shared)[0, 1]) if values.std() > 0 and shared.std() > 0 else 0.0


def told_apart(real: list[Series], made: list[Series], shape_only: bool) -> float:
    """Area under the curve of a random forest that tells windows apart; whole series are held out. 0.5: it cannot, 1: always."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.metrics import roc_auc_score

    aucs = []
    for k in range(min(len(real), len(made))):
        train = [s for i, s in enumerate(real) if i != k], [s for i, s in enumerate(made) if i != k]
        x, y = _table(*train, shape_only)
        xt, yt = _table([real[k]], [made[k]], shape_only)
        forest = RandomForestClassifier(200, min_samples_leaf=3, random_state=0, class_weight="balanced").fit(x, y)
        aucs.append(float(roc_auc_score(yt, forest.predict_proba(xt)[:, 1])))
    return float(np.mean(aucs))


def told_apart_at_random(real: list[Series], made: list[Series]) -> tuple[float, list[str]]:
    """The harder test: windows of the same series on both sides, so that a quirk of one series is enough. With what told them apart."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    x, y = _table(real, made, shape_only=False)
    forest = RandomForestClassifier(200, min_samples_leaf=3, random_state=0, class_weight="balanced")
    scores = cross_val_score(forest, x, y, cv=StratifiedKFold(5, shuffle=True, random_state=0), scoring="roc_auc")
    best = np.argsort(-forest.fit(x, y).feature_importances_)[:3]
    return float(scores.mean()), [FEATURES[i] for i in best]


def _table(real: list[Series], made: list[Series], shape_only: bool) -> tuple[F64, Ints]:
    parts = [(features(s), 0) for s in real] + [(features(s), 1) for s in made]
    x = np.concatenate([p for p, _ in parts])
    y = np.concatenate([np.full(len(p), label) for p, label in parts])
    return (x[:, 1:] if shape_only else x), y


# --- the page ------------------------------------------------------------------------------------------------------------------


def compared() -> list[tuple[Series, Series]]:
    """Real series, each with the simulated one that is meant to be like it."""
    return [
        (alibaba(1), simulated("recsys", "10:recsys", 300)),
        (alibaba(2), simulated("recsys, other seed", "10:recsys", 240, seed=8)),
        (
            alibaba(3),
            simulated("recsys, one slow GPU for a while", "10:recsys", 250, "weak_gpu@n00003/gpu0:60+60x1.3", seed=9),
        ),
        (alibaba(4), simulated("recsys, several slow", "10:recsys", 800, MANY, seed=10)),
        (
            bytedance("AR"),
            simulated("pipeline, one slow", "32:pipeline", 44, "weak_gpu@n00000/gpu0:1+39000x2.35", seed=11),
        ),
        (
            bytedance("SE"),
            simulated("longseq, uneven", "32:longseq", 43, "length_imbalance@job-000:1+39000x0.11", seed=12),
        ),
        (
            bytedance("ST"),
            simulated("pipeline, uneven stages", "16:pipeline", 32, "stage_imbalance@job-000:1+39000x0.6", seed=13),
        ),
    ]


def fluctuation() -> dict[str, list[float]]:
    """Variation over workers at each step: quantiles over a hundred Alibaba jobs and over simulated ones."""
    real = pd.read_csv(DATA / "alibaba" / "coefficient_variation.csv.gz").iloc[:, 1:].to_numpy(dtype=np.float64)
    made = []
    for seed in range(20, 32):
        one = simulated("", "10:recsys" if seed % 2 else "10:ddp", 60, seed=seed)
        times = np.exp(one.residual[:, :10] + one.lasting[:10])
        made.append(times.std(axis=1) / times.mean(axis=1))
    at = [0.05, 0.25, 0.5, 0.75, 0.95]
    return {
        "quantiles": at,
        "alibaba": np.nanquantile(real, at).tolist(),
        "simulated": np.quantile(np.concatenate(made), at).tolist(),
    }


def plot(
    pairs: list[tuple[Series, Series]], jobs: list[tuple[Whole, Whole]], values: dict[str, F64], path: Path
) -> None:
    """One page: marginals above, memory of ranks' step series below, whole jobs last."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 6, figsize=(19, 12.5))
    flat = axes.ravel()
    for axis, (name, sample) in zip(flat, values.items(), strict=False):
        axis.plot(table()[name], table()["quantile"], "k", lw=2, label="real")
        axis.plot(np.sort(sample)[:: max(1, len(sample) // 2000)], np.linspace(0, 1, len(sample))[:: max(1, len(sample) // 2000)], "C1",
                  label="simulated")  # fmt: skip
        axis.set_title(f"{name}, distance {distance(name, sample):.2f}", fontsize=9)
    flat[0].legend(fontsize=8)
    for axis, (one_real, one_made) in zip(flat[len(values) :], pairs, strict=False):
        for one, colour in ((one_real, "k"), (one_made, "C1")):
            lags = range(1, min(20, len(one.residual) // 3))
            memory = [
                np.nanmedian([_lagged(one.residual[:, k], lag) for k in range(one.residual.shape[1])]) for lag in lags
            ]
            axis.plot(list(lags), memory, colour, marker=".", label=one.name)
        axis.set_ylim(-0.5, 1)
        axis.set_title("correlation of a rank's step time with itself", fontsize=9)
        axis.legend(fontsize=7)
    for axis, (real, made) in zip(flat[18:], jobs, strict=True):
        for whole, colour in ((real, "k"), (made, "C1")):
            axis.plot(np.sort(np.abs(whole.residual)), np.linspace(0, 1, len(whole.residual)), colour, label=whole.name)
        axis.set_xscale("log")
        axis.set_title("a whole job's step against its neighbours, log ratio", fontsize=9)
        axis.legend(fontsize=7)
    for axis in flat[len(values) + len(pairs) : 18]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=400)
    parser.add_argument("--seconds", type=int, default=120)
    given = parser.parse_args()
    values = sampled(build(Spec(nodes=given.nodes, seed=1)), given.seconds)
    pairs, jobs = compared(), whole_jobs.compared()
    result = {
        "marginal distances": {name: round(distance(name, sample), 3) for name, sample in values.items()},
        "step series": [
            {"real": r.name, "simulated": m.name, "of real": described(r), "of simulated": described(m)}
            for r, m in pairs
        ],
        "whole jobs": [
            {
                "real": r.name,
                "simulated": m.name,
                "of real": whole_jobs.described(r),
                "of simulated": whole_jobs.described(m),
            }
            for r, m in jobs
        ],
        "variation over workers": fluctuation(),
        "told apart (area under the curve)": {
            name: {"alibaba": told_apart(*_sides(pairs[:4]), shape), "bytedance": told_apart(*_sides(pairs[4:]), shape)}
            for name, shape in (("all features", False), ("shape only", True))
        },
        "told apart, windows at random": {
            "alibaba": told_apart_at_random(*_sides(pairs[:4])),
            "bytedance": told_apart_at_random(*_sides(pairs[4:])),
        },
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "simulator_realism.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(pairs, jobs, values, RESULTS / "simulator_realism.png")
    _print(result)
    return 0


def _sides(pairs: list[tuple[Series, Series]]) -> tuple[list[Series], list[Series]]:
    return [real for real, _ in pairs], [made for _, made in pairs]


def _print(result: dict[str, Any]) -> None:
    for name, far in result["marginal distances"].items():
        print(f"{name:22} distance {far:.3f}")
    for row in [*result["step series"], *result["whole jobs"]]:
        print(f"{row['real']} / {row['simulated']}")
        for name in row["of real"]:
            print(f"    {name:24} {row['of real'][name]:8.3f} {row['of simulated'][name]:8.3f}")
    print("variation over workers", json.dumps(result["variation over workers"]))
    for name in ("told apart (area under the curve)", "told apart, windows at random"):
        print(name, json.dumps(result[name]))


if __name__ == "__main__":
    raise SystemExit(main())
