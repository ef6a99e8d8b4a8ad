"""Scoring of labelled recordings: one line a run, a summary last.

Two formats are read: the tables of `streams.recordings.real_faults`, several runs in a folder, and our own recordings with a
``labels.json`` beside the segments, in the folder itself or in folders below it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from detectors.base import registry
from streams import recording
from streams.recordings import real_faults
from streams.recordings.real_faults import Label
from streams.replay import replay
from streams.scoring import Found, Score, score
from trainwarden.clock import NS_PER_S
from trainwarden.config import Config
from trainwarden.errors import UsageError

LABELS = "labels.json"


@dataclass(frozen=True)
class Run:
    """One labelled recording: its name, what `replay` takes, and the ground truth."""

    name: str
    path: Path
    labels: tuple[Label, ...]


def evaluate(
    directory: Path, config: Config, say: Callable[[str], None], names: Sequence[str] = (), as_json: bool = False
) -> bool:
    """Replay each run under `directory` and score it; the last line is the summary. True when all runs are right.

    Raises
    ------
    UsageError
        There is no labelled recording in the directory, or none of a name.
    """
    able = frozenset(
        kind for name, d in registry().all().items() if config.enabled("detectors", name) for kind in d.kinds
    )
    scores = []
    for run in find_runs(directory, names):
        told = replay(run.path, config)
        scores.append(score(run.name, told.newest(), run.labels, able, told.node_days))
        say(json.dumps(as_row(scores[-1])) if as_json else scores[-1].line())
    summary = summarise(scores)
    say(json.dumps({"summary": summary}) if as_json else summary_line(summary))
    return all(one.right for one in scores)


def find_runs(directory: Path, names: Sequence[str] = ()) -> tuple[Run, ...]:
    """Labelled recordings of either format, sorted by name; only those in `names` unless it is empty."""
    found = {run.name: run for run in (*_own(directory), *_tables(directory, names))}
    if unknown := [name for name in names if name not in found]:
        known = ", ".join(sorted(found)) or "none"
        raise UsageError(f"{directory}: no labelled run is called {unknown[0]!r}: there are {known}")
    if not found:
        raise UsageError(
            f"{directory}: no recordings with labels: expected tables such as clean1.nodes.csv and clean1.labels.json, "
            f"or folders with segment-*.twr and {LABELS}"
        )
    return tuple(found[name] for name in sorted(names or found))


def summarise(scores: Sequence[Score]) -> dict[str, Any]:
    """Figures over all runs. Ratios are ``None`` where nothing can be divided."""
    found = [fault for one in scores for fault in one.found]
    missed = sum(len(one.missed) for one in scores)
    told, fitting = sum(one.told for one in scores), sum(s.told and s.fits for one in scores for s in one.incidents)
    stray = sum(len(one.false_incidents) for one in scores)
    node_days = sum(one.node_days for one in scores)
    return {
        "runs": len(scores),
        "runs_right": sum(one.right for one in scores),
        "faults": len(found) + missed,
        "faults_named": len(found),
        "without_detector": sum(len(one.skipped) for one in scores),
        "incidents": told,
        "event_precision": _ratio(fitting, told),
        "event_recall": _ratio(len(found), len(found) + missed),
        "culprit_first_right": _ratio(sum(one.first_accused_right for one in scores), len(found) + missed),
        **_delays(found),
        "false_actions": sum(len(one.false_actions) for one in scores),
        "false_incidents": stray,
        "false_incidents_per_node_day": _ratio(stray, node_days),
        "node_days": round(node_days, 5),
    }


def summary_line(summary: dict[str, Any]) -> str:
    """The summary for a person."""
    delays = (
        f", delay p50 {summary['delay_p50_s']} s, p95 {summary['delay_p95_s']} s" if summary["faults_named"] else ""
    )
    return (
        f"{summary['runs_right']} of {summary['runs']} runs right: {summary['faults_named']} of {summary['faults']} faults named{delays}, "
        f"event precision {summary['event_precision']}, recall {summary['event_recall']}, "
        f"first culprit right {summary['culprit_first_right']}, {summary['false_actions']} false actions, "
        f"{summary['false_incidents']} false incidents in {summary['node_days']} node-days, "
        f"{summary['without_detector']} faults without a detector"
    )


def as_row(one: Score) -> dict[str, Any]:
    """A run as plain data."""
    return {"run": one.run, "right": one.right, **{k: v for k, v in asdict(one).items() if k != "run"}}


def _delays(found: Sequence[Found]) -> dict[str, float | None]:
    delays = sorted(fault.delay_s for fault in found if fault.delay_s > 0)
    if not delays:
        return {"delay_p50_s": None, "delay_p95_s": None, "delay_max_s": None}
    middle, late = delays[len(delays) // 2], delays[min(len(delays) - 1, int(0.95 * len(delays)))]
    return {"delay_p50_s": round(middle, 1), "delay_p95_s": round(late, 1), "delay_max_s": round(delays[-1], 1)}


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None


def _tables(directory: Path, names: Sequence[str]) -> list[Run]:
    if not directory.is_dir():
        return []
    chosen = [run for run in real_faults.runs(directory) if not names or run in names]
    return [Run(run, directory / run, real_faults.labels(directory, run)) for run in chosen]


def _own(directory: Path) -> list[Run]:
    if not directory.is_dir():
        return []
    folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    labelled = [folder for folder in folders if (folder / LABELS).is_file() and recording.segments(folder)]
    return [Run(folder.name, folder, _own_labels(folder / LABELS)) for folder in labelled]


def _own_labels(path: Path) -> tuple[Label, ...]:
    """Labels of our own recordings: as in the tables, with node names in place of numbers."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["labels"]
        return tuple(
            Label(str(e["kind"]), tuple(map(str, e["nodes"])), int(e["start"] * NS_PER_S), int(e["end"] * NS_PER_S))
            for e in entries
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: {error!r}: expected {{'labels': [{{'kind', 'nodes': [names], 'start', 'end' (unix seconds)}}]}}"
        ) from None
