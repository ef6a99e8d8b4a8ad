"""Runs methods over series, resuming where an earlier run stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.detect import data
from benchmarks.detect.data import Labelled
from benchmarks.detect.evaluate import RISKS, Record, evaluate, on_common_scale
from benchmarks.detect.isolate import CPU_LIMIT_S, Outcome, Task, outcomes
from benchmarks.detect.methods.base import Method
from benchmarks.detect.metrics import nab
from benchmarks.detect.store import MethodResults, NabFigures, Store, record_key

FAMILIES = {"smd": ("multi", "any"), "asd": ("multi", "any"), "nab": ("uni", "any")}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to run: the series of one split, the seeds, and where results lie."""

    split: str
    sets: tuple[str, ...]
    seeds: int
    root: Path
    store: Store
    fresh: bool = False
    cpu_limit_s: int = CPU_LIMIT_S

    def series(self) -> list[Labelled]:
        """All series of the split, loaded; a missing file stops the run here."""
        return [
            data.load(name, one, self.root)
            for name in self.sets
            for one in data.split_names(name, self.split, self.root)
        ]


def run_method(method: type[Method], plan: Plan, series: list[Labelled], say: Say) -> MethodResults:
    """Figures of one method on all series that fit its family; only what is not known yet is run."""
    results = plan.store.load(method)
    fitting = [one for one in series if method.family in FAMILIES[one.series.set]]
    wanted = [(one, seed) for one in fitting for seed in range(plan.seeds if method.seeded else 1)]
    to_run = [pair for pair in wanted if plan.fresh or not known(plan.store, results, *pair)]
    say(f"{method.name}: {len(wanted)} runs, {len(wanted) - len(to_run)} known")
    by_task = {(one.series.key, seed): one for one, seed in to_run}
    tasks = [Task(one.series, seed) for one, seed in to_run]
    for number, (task, outcome) in enumerate(outcomes(method, tasks, plan.cpu_limit_s) if tasks else (), 1):
        labelled = by_task[task.series.key, task.seed]
        record = take(plan.store, results, labelled, task.seed, outcome)
        say(f"  {number}/{len(tasks)} {method.name} {record_key(task.series, task.seed)}: {in_words(record)}")
    note_nab(plan.store, results, fitting, method, plan.split)
    plan.store.save(results)
    return results


def known(store: Store, results: MethodResults, labelled: Labelled, seed: int) -> bool:
    """True when the figures are there, or can be made from kept scores (then they are)."""
    series = labelled.series
    record = results.records.get(record_key(series, seed))
    if record and not record.error and record.fingerprint == series.fingerprint():
        return True
    kept = store.kept(results, series, seed)
    if kept is None:
        return False
    results.records[record_key(series, seed)] = evaluate(labelled, seed, kept)
    return True


def take(store: Store, results: MethodResults, labelled: Labelled, seed: int, outcome: Outcome) -> Record:
    """Evaluate one fresh outcome and write it down."""
    record = evaluate(labelled, seed, outcome)
    results.records[record_key(labelled.series, seed)] = record
    if not outcome.error:
        store.keep_scores(results, labelled.series, seed, outcome)
    store.save(results)
    return record


def in_words(record: Record) -> str:
    """One run in a line."""
    if record.error:
        return f"FAILED: {record.error.strip().splitlines()[-1]}"
    surface = "no anomaly in it" if record.vus_pr is None else f"VUS-PR {record.vus_pr:.3f}"
    thinned = f", fitted on every {record.thinned}th training row" if record.thinned > 1 else ""
    return f"{surface}, {record.cpu_s:.2f} s CPU, {record.peak_mb:.0f} MB{thinned}"


def note_nab(store: Store, results: MethodResults, fitting: list[Labelled], method: type[Method], split: str) -> None:
    """NAB standard score of a split, where the scores of every file are at hand."""
    files = [one for one in fitting if one.series.set == "nab"]
    kept = [store.kept(results, one.series, 0) for one in files]
    outcome = [one for one in kept if one is not None]
    if not files or len(outcome) < len(files):
        return
    shapes = [nab.nab_file(len(one.labels.flags()), one.labels.spans) for one in files]
    scores = [on_common_scale(one.scores, one.calibration, method.calibrated) for one in outcome]
    best = nab.best_score(shapes, scores)
    windows = sum(shape.windows for shape in shapes)
    records = [results.records[record_key(one.series, 0)] for one in files]
    results.nab[split] = NabFigures(
        files=len(files),
        windows=windows,
        best=best.score,
        best_threshold=float(np.nan_to_num(best.threshold, posinf=1e300)),
        label_free={
            f"{risk:g}": nab.scaled(sum(one.lines[f"{risk:g}"].nab_gain for one in records), windows) for risk in RISKS
        },
    )


def note_whole_nab(
    store: Store, known_methods: dict[str, type[Method]], results: list[MethodResults], root: Path
) -> None:
    """NAB standard score over the whole corpus, as the published leader board has it, where both splits have been run."""
    corpus = [data.load("nab", name, root) for name in data.names("nab", root)]
    keys = {record_key(one.series, 0) for one in corpus}
    for one in results:
        if keys <= set(one.records):
            note_nab(store, one, corpus, known_methods[one.method], "all")
            store.save(one)
