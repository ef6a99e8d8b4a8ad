"""Results on disk: figures of every run in one JSON file a method (kept), its scores in compressed arrays (local, for a second look)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

import benchmarks.detect.metrics as metrics_folder
from benchmarks.detect import data, evaluate, isolate
from benchmarks.detect.data import Series
from benchmarks.detect.evaluate import Record
from benchmarks.detect.isolate import Outcome
from benchmarks.detect.methods.base import F64, Method
from benchmarks.detect.methods.registry import meaning, version

RESULTS = Path(__file__).parents[1] / "results"


class StoreError(ValueError):
    """A results file that cannot be read."""


@dataclass
class NabFigures:
    """NAB standard score of a split: at the best threshold by the labels, and at the label-free lines (by risk)."""

    files: int
    windows: int
    best: float
    best_threshold: float
    label_free: dict[str, float]


@dataclass
class MethodResults:
    """All that is known of one method in its present version."""

    method: str
    version: str
    protocol: str
    ours: bool
    online: bool
    paper: str
    family: str
    records: dict[str, Record] = field(default_factory=dict)
    nab: dict[str, NabFigures] = field(default_factory=dict)


def protocol() -> str:
    """Twelve hex digits that change when a metric, a loader, the evaluation or the way of running changes."""
    files = sorted(Path(metrics_folder.__path__[0]).glob("*.py"))
    return digest_of([*files, *(Path(str(part.__file__)) for part in (data, evaluate, isolate))])


def digest_of(files: list[Path]) -> str:
    """Twelve hex digits of what some source files do."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(meaning(path))
    return digest.hexdigest()[:12]


class Store:
    """Results under one folder; figures of another version of a method or of the metrics count as absent."""

    def __init__(self, root: Path = RESULTS) -> None:
        self.figures = root / "detect"
        self.scores = root / "tmp" / "detect"
        self.protocol = protocol()
        self.running = digest_of([Path(str(part.__file__)) for part in (data, isolate)])

    def load(self, method: type[Method]) -> MethodResults:
        """What is known of the method as it is now; empty when nothing is."""
        empty = MethodResults(
            method.name, version(method), self.protocol, method.ours, method.online, method.paper, method.family
        )
        path = self.path(method.name)
        if not path.is_file():
            return empty
        try:
            known = msgspec.json.decode(path.read_bytes(), type=MethodResults)
        except msgspec.MsgspecError as wrong:
            raise StoreError(f"{path} is no results file ({wrong}): delete it and run again") from wrong
        return known if (known.version, known.protocol) == (empty.version, self.protocol) else empty

    def save(self, results: MethodResults) -> None:
        """Write one method's figures, whole or not at all."""
        self.figures.mkdir(parents=True, exist_ok=True)
        path = self.path(results.method)
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
        partial.replace(path)

    def path(self, name: str) -> Path:
        return self.figures / f"{name}.json"

    def score_path(self, results: MethodResults, series: Series, seed: int) -> Path:
        """Where the scores of one run lie."""
        name = f"{series.key.replace('/', '+')}@{seed}-{series.fingerprint()}.npz"
        return self.scores / f"{results.method}-{results.version}-{self.running}" / name

    def keep_scores(self, results: MethodResults, series: Series, seed: int, outcome: Outcome) -> None:
        """Write the scores of one run, so that a new metric needs no new run."""
        path = self.score_path(results, series, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        cost = np.array([outcome.cpu_s, outcome.peak_bytes, outcome.thinned])
        np.savez_compressed(path, scores=outcome.scores, calibration=outcome.calibration, cost=cost)

    def kept(self, results: MethodResults, series: Series, seed: int) -> Outcome | None:
        """Scores of an earlier run of this version on this data, or None."""
        path = self.score_path(results, series, seed)
        if not path.is_file():
            return None
        with np.load(path) as found:
            scores: F64 = found["scores"]
            cpu_s, peak_bytes, thinned = found["cost"].tolist()
            return Outcome(scores, found["calibration"], cpu_s, int(peak_bytes), int(thinned))


def record_key(series: Series, seed: int) -> str:
    """Key of one run in a method's figures."""
    return f"{series.key}@{seed}"
