"""Pictures for the page: what each method reaches, and what it costs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.detect.summary import Row, SetSummary, Whole

OURS, PEER = "#d95f02", "#8a98a8"


def draw(whole: Whole, folder: Path) -> list[Path]:
    """Write the pictures of one split; none where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return [path for path in paths(whole, folder) if path.is_file()]
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "trainwarden"
    folder.mkdir(parents=True, exist_ok=True)
    bars, costs = paths(whole, folder)
    save(whole, bars, bar_panel)
    save(whole, costs, cost_panel)
    return [bars, costs]


def paths(whole: Whole, folder: Path) -> list[Path]:
    """Files of one split."""
    return [folder / f"detectors-{whole.split}-{what}.svg" for what in ("reach", "cost")]


def save(whole: Whole, path: Path, panel: Any) -> None:
    """One picture with a panel for each set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(whole.sets), 6), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(whole.sets), squeeze=False)[0], whole.sets, strict=True):
        panel(axes, one)
        axes.set_title(f"{one.set.upper()}, {whole.split}")
    figure.savefig(path, metadata={"Date": None})


def bar_panel(axes: Any, one: SetSummary) -> None:
    """Mean VUS-PR of each method, best on top."""
    rows = scored(one)[::-1]
    axes.barh([row.method for row in rows], [row.vus_pr for row in rows], color=[colour(row) for row in rows])
    axes.set_xlabel("mean VUS-PR")


def cost_panel(axes: Any, one: SetSummary) -> None:
    """Mean VUS-PR against processor time."""
    for row in scored(one):
        axes.scatter(max(row.cpu_s_per_day, 1e-4), row.vus_pr, color=colour(row))
        axes.annotate(
            row.method,
            (max(row.cpu_s_per_day, 1e-4), row.vus_pr),
            fontsize=7,
            xytext=(4, 2),
            textcoords="offset points",
        )
    axes.set_xscale("log")
    axes.set_xlabel("CPU seconds a series-day")
    axes.set_ylabel("mean VUS-PR")


def scored(one: SetSummary) -> list[Row]:
    """Rows that have a VUS-PR."""
    return [row for row in one.rows if row.vus_pr is not None]


def colour(row: Row) -> str:
    """Ours stand out."""
    return OURS if row.ours else PEER
