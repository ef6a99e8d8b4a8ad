"""Figures as tables, and pictures of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.relation.paired import against
from benchmarks.relation.score import Marked, Sheet, figures

COLUMNS = (
    "node_f1",
    "node_exact",
    "subnet_exact",
    "two_exact",
    "unequal_exact",
    "nobody_isolated",
    "per_1000_node_days",
    "delay_p50_s",
    "delay_p95_s",
    "round_ms",
)
BINS = (0.0, 0.5, 0.7, 0.9, 0.97, 0.995, 1.01)


def tables(sheets: dict[tuple[str, int], Sheet]) -> dict[str, Any]:
    """Everything that goes into the JSON."""
    overall, by_kind, by_slowdown = {}, {}, {}
    for (method, size), sheet in sheets.items():
        key = f"{method}|{size}"
        overall[key] = figures(sheet.slots) | {
            "false_isolations": sheet.false_isolations, "node_days": sheet.node_days,
            "per_1000_node_days": 1000 * sheet.false_isolations / max(sheet.node_days, 1e-9),
            "round_ms": 1000 * sheet.seconds / max(sheet.rounds, 1),
        }  # fmt: skip
        by_kind[key] = _split(sheet.slots, _kind)
        by_slowdown[key] = _split([m for m in sheet.slots if m.slot.truth], lambda m: f"{m.slot.slowdown:g}")
    return {"overall": overall, "by_kind": by_kind, "by_slowdown": by_slowdown, "against": against(sheets),
            "reliability": {f"{m}|{size}": reliability(sheet.stated) for (m, size), sheet in sheets.items() if sheet.stated}}  # fmt: skip


def reliability(stated: list[tuple[float, bool]]) -> list[dict[str, float]]:
    """By stated probability: how many answers, their mean probability, and the share that was right."""
    found = []
    for low, high in pairwise(BINS):
        mine = [(p, right) for p, right in stated if low <= p < high]
        if mine:
            mean, share = np.mean(mine, axis=0).tolist()
            found.append({"answers": len(mine), "stated": mean, "right": share})
    return found


def keep(found: dict[str, Any], path: Path) -> None:
    """Write the JSON: after every seed, so that an interrupted run is worth what it has done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _kind(mark: Marked) -> str:
    return {"two": "two at once", "unequal": f"unequal groups, {mark.slot.kinds[-1]}"}.get(
        mark.slot.group, "+".join(mark.slot.kinds)
    )


def _split(marks: list[Marked], key: Any) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name in sorted({key(m) for m in marks}):
        mine = [m for m in marks if key(m) == name]
        delays = [d for m in mine for d in m.delay_s]
        found[name] = {
            "slots": len(mine),
            "exact": float(np.mean([m.exact for m in mine])),
            "wrong_nodes": sum(m.wrong_nodes for m in mine),
        }
        found[name]["delay_p50_s"] = float(np.median(delays)) if delays else float("nan")
    return found


def text(found: dict[str, Any]) -> str:
    """Tables for a terminal."""
    lines = [f"{'method':24} {'nodes':>5} " + " ".join(f"{name:>18}" for name in COLUMNS)]
    for key, row in sorted(found["overall"].items(), key=lambda item: (int(item[0].split("|")[1]), item[0])):
        method, size = key.split("|")
        lines.append(f"{method:24} {size:>5} " + " ".join(f"{row[name]:18.3f}" for name in COLUMNS))
    lines.append("")
    for key, rows in found["by_kind"].items():
        if key.startswith("ours|"):
            lines += [
                f"{key} {kind:20} " + " ".join(f"{name} {value:.3g}" for name, value in row.items())
                for kind, row in rows.items()
            ]
    lines.append("")
    for key, rows in found["by_slowdown"].items():
        if key.startswith("ours|"):
            lines += [
                f"{key} {slow:>5}x " + " ".join(f"{name} {value:.3g}" for name, value in row.items())
                for slow, row in rows.items()
            ]
    lines.append("")
    lines += [_compared(key, row) for key, row in sorted(found["against"].items())]
    return "\n".join(lines)


def _compared(key: str, row: dict[str, Any]) -> str:
    group = key.partition("|")[2]
    return (
        f"ours against {row['line']:26} {group:7} {row['slots']:3d} slots on {row['seeds']:2d} seeds: {row['more_right']:+3d} right, "
        f"better on {row['better']}, worse on {row['worse']}, p {row['p']:.4f}, corrected (Holm) {row['p_holm']:.4f}"
    )


def pictures(found: dict[str, Any], path: Path) -> None:
    """Localisation against slowdown and cost against nodes; left out where matplotlib is missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        print(f"{path}: not drawn, matplotlib is not installed")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right, last) = plt.subplots(1, 3, figsize=(15, 4))
    for key, rows in found["by_slowdown"].items():
        method, size = key.split("|")
        if method in ("ours", "in_group_mad_past@0.0001"):
            steps = sorted(rows, key=float)
            left.plot(
                [float(s) for s in steps],
                [rows[s]["exact"] for s in steps],
                "o-" if method == "ours" else "x--",
                label=f"{method}, {size}",
            )
    left.set(xlabel="slowdown asked for", ylabel="exact localisation", ylim=(0, 1.02), xscale="log")
    left.legend(fontsize=7)
    for method in sorted({key.split("|")[0] for key in found["overall"]}):
        sizes = sorted(int(key.split("|")[1]) for key in found["overall"] if key.startswith(f"{method}|"))
        right.plot(sizes, [found["overall"][f"{method}|{size}"]["round_ms"] for size in sizes], "o-", label=method)
    right.set(xlabel="nodes", ylabel="ms a round", xscale="log", yscale="log")
    right.legend(fontsize=6)
    for key, rows in found["reliability"].items():
        if key.startswith("ours|"):
            last.plot([row["stated"] for row in rows], [row["right"] for row in rows], "o-", label=key)
            for row in rows:
                last.annotate(f"{row['answers']}", (row["stated"], row["right"]), fontsize=7)
    last.plot([0, 1], [0, 1], "k:", lw=0.8)
    last.set(xlabel="probability stated", ylabel="share right", xlim=(0, 1.02), ylim=(0, 1.05))
    last.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
