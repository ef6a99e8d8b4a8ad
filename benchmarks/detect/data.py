"""Loads the labelled sets as plain arrays. Rows and labels are two objects, so that a method can be handed one without the other.

A file that is missing or has another shape than its publisher's stops the run with one sentence; nothing is skipped.
"""

from __future__ import annotations

import csv
import gzip
import json
import tomllib
import zlib
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.detect.methods.base import F64

HERE = Path(__file__).parent
DATA = HERE.parent / "data"
SETS = ("smd", "asd", "nab")
SMD_STEP_S = 60.0
ASD_STEP_S = 300.0
PROBATION_RATIO = 0.15
PROBATION_MOST_ROWS = 750
DAY_S = 86_400.0

Spans = tuple[tuple[int, int], ...]


class DataError(ValueError):
    """A data file that is missing or not as expected."""


@dataclass(frozen=True)
class Series:
    """One series without labels: `train` [T, F] comes directly before `test` [T, F]; samples are `step_s` seconds apart."""

    set: str
    name: str
    step_s: float
    train: F64
    test: F64

    @property
    def key(self) -> str:
        return f"{self.set}/{self.name}"

    @property
    def test_days(self) -> float:
        return len(self.test) * self.step_s / DAY_S

    def fingerprint(self) -> str:
        """Eight hex digits of the values, so that cached results are never taken for other data."""
        return f"{zlib.crc32(self.test.tobytes(), zlib.crc32(self.train.tobytes())):08x}"


@dataclass(frozen=True)
class Labels:
    """Truth about the test rows of one series: anomalous rows as inclusive [start, end] spans, and the class of each where known."""

    rows: int
    spans: Spans
    kinds: tuple[str, ...] = ()

    def flags(self) -> NDArray[np.bool_]:
        """Anomalous or not, for each test row."""
        out = np.zeros(self.rows, bool)
        for start, end in self.spans:
            out[start : end + 1] = True
        return out


@dataclass(frozen=True)
class Labelled:
    """A series and, apart from it, its labels."""

    series: Series
    labels: Labels


def names(set_name: str, root: Path = DATA) -> list[str]:
    """Series of a set, in a fixed order."""
    if set_name not in SETS:
        raise DataError(f"no set is called {set_name!r}: known are {', '.join(SETS)}")
    if set_name == "nab":
        return sorted(key.removesuffix(".csv") for key in nab_windows(root))
    pattern = {"smd": "machine-*_test.csv.gz", "asd": "omi-*_test.csv.gz"}[set_name]
    found = sorted((path.name.removesuffix("_test.csv.gz") for path in (root / set_name).glob(pattern)), key=natural)
    if not found:
        raise DataError(f"no {pattern} in {root / set_name}: give the folder that holds {set_name}/ with --data")
    return found


def natural(name: str) -> list[int]:
    """Numbers in a name, so that omi-10 comes after omi-9."""
    return [int(part) for part in name.split("-")[1:]]


def split_names(set_name: str, split: str, root: Path = DATA) -> list[str]:
    """Series of one split: `tune`, `test` or `all`."""
    known = names(set_name, root)
    tune = tomllib.loads((HERE / "splits.toml").read_text())[set_name]["tune"]
    if absent := sorted(set(tune) - set(known)):
        raise DataError(f"splits.toml names {absent[0]!r}, which set {set_name!r} in {root} does not have")
    if split == "all":
        return known
    if split not in ("tune", "test"):
        raise DataError(f"no split is called {split!r}: known are tune, test, all")
    return [name for name in known if (name in tune) == (split == "tune")]


def load(set_name: str, name: str, root: Path = DATA) -> Labelled:
    """One series with its labels."""
    if set_name == "nab":
        return load_nab(name, root)
    step_s = {"smd": SMD_STEP_S, "asd": ASD_STEP_S}.get(set_name)
    if step_s is None:
        raise DataError(f"no set is called {set_name!r}: known are {', '.join(SETS)}")
    base = root / set_name
    train, test = matrix(base / f"{name}_train.csv.gz"), matrix(base / f"{name}_test.csv.gz")
    flags = matrix(base / f"{name}_test_label.csv.gz")[:, 0] > 0
    if train.shape[1] != test.shape[1] or len(flags) != len(test):
        raise DataError(
            f"{base}/{name}: train {train.shape}, test {test.shape} and {len(flags)} labels do not fit each other"
        )
    spans = spans_of(flags)
    kinds = asd_kinds(base, name, spans) if set_name == "asd" else ()
    return Labelled(Series(set_name, name, step_s, train, test), Labels(len(test), spans, kinds))


def matrix(path: Path) -> F64:
    """Numbers of a gzipped CSV file without header, as [rows, columns]."""
    with gzip.open(existing(path), "rt") as lines:
        values = np.loadtxt(lines, delimiter=",", dtype=np.float64, ndmin=2)
    if not len(values) or not np.isfinite(values).all():
        raise DataError(
            f"{path} is empty or holds values that are no numbers: copy it again from its source (SOURCE.md)"
        )
    return values


def existing(path: Path) -> Path:
    """The path itself, when there is such a file."""
    if not path.is_file():
        raise DataError(
            f"{path} is missing: give the folder that holds the sets with --data, or restore benchmarks/data"
        )
    return path


def spans_of(flags: NDArray[np.bool_]) -> Spans:
    """Inclusive [start, end] of each run of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return tuple((int(start), int(end) - 1) for start, end in zip(edges[::2], edges[1::2], strict=True))


def asd_kinds(base: Path, name: str, spans: Spans) -> tuple[str, ...]:
    """Class of each labelled span of an ASD server: `metric`, `temporal` or `metric-temporal`."""
    with existing(base / "anomaly_type.txt").open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["dataset"] == name]
    found = {int(row["anomaly_segment"].split("-")[0]): row["anomaly_type"] for row in rows}
    return tuple(next((kind for at, kind in found.items() if start <= at <= end), "unknown") for start, end in spans)


def nab_windows(root: Path) -> dict[str, list[list[str]]]:
    """Labelled windows of every NAB file, as time stamps."""
    windows: dict[str, list[list[str]]] = json.loads(
        existing(root / "nab" / "labels" / "combined_windows.json").read_text()
    )
    return windows


def load_nab(name: str, root: Path = DATA) -> Labelled:
    """One NAB file: its probation (15 %, at most 750 rows) is the training part, the rest is to be scored."""
    windows = nab_windows(root).get(f"{name}.csv")
    if windows is None:
        raise DataError(f"NAB has no file {name!r}")
    with gzip.open(existing(root / "nab" / "data" / f"{name}.csv.gz"), "rt") as lines:
        rows = list(csv.reader(lines))[1:]
    stamps = [datetime.fromisoformat(row[0]) for row in rows]
    values = np.array([[float(row[1])] for row in rows])
    cut = probation_rows(len(values))
    spans = tuple(span_between(stamps, start, end, cut) for start, end in windows)
    series = Series("nab", name, median_step_s(stamps), values[:cut], values[cut:])
    return Labelled(series, Labels(len(values) - cut, spans))


def probation_rows(rows: int) -> int:
    """Rows at the start of a NAB file on which no detection counts."""
    return int(min(np.floor(PROBATION_RATIO * rows), PROBATION_RATIO * 5000))


def span_between(stamps: list[datetime], start: str, end: str, cut: int) -> tuple[int, int]:
    """Rows from one time stamp to another, counted from row `cut`."""
    first, last = datetime.fromisoformat(start), datetime.fromisoformat(end)
    inside = [row for row, stamp in enumerate(stamps) if first <= stamp <= last]
    return inside[0] - cut, inside[-1] - cut


def median_step_s(stamps: list[datetime]) -> float:
    """Usual distance of two samples."""
    return float(np.median([(after - before).total_seconds() for before, after in pairwise(stamps)]))


def alibaba_cov(root: Path = DATA) -> dict[str, F64]:
    """Spread of the ten workers' step times (standard deviation / mean) at each step, for 100 jobs."""
    with gzip.open(existing(root / "alibaba" / "coefficient_variation.csv.gz"), "rt") as lines:
        rows = list(csv.reader(lines))[1:]
    return {row[0]: np.array([float(cell) for cell in row[1:] if cell]) for row in rows}


def alibaba_steps(job: int, root: Path = DATA) -> F64:
    """Step time (0..1000) of each worker of job 1 to 4, [steps, workers]; NaN where a worker has no entry for a step."""
    with gzip.open(existing(root / "alibaba" / f"job_{job}_norm.csv.gz"), "rt") as lines:
        rows = list(csv.DictReader(lines))
    workers = sorted({int(row["worker"]) for row in rows})
    steps = sorted({int(row["time"]) for row in rows})
    out = np.full((len(steps), len(workers)), np.nan)
    for row in rows:
        out[steps.index(int(row["time"])), workers.index(int(row["worker"]))] = float(row["batch_time_norm"])
    return out


def bytedance_trace(job: str, root: Path = DATA) -> dict[str, NDArray[np.generic]]:
    """Columns of one straggler trace (`AR`, `SE` or `ST`), one row an operation; needs pyarrow."""
    from pyarrow import parquet

    table = parquet.read_table(existing(root / "bytedance" / f"trace-{job}.parquet"))
    return {name: table.column(name).to_numpy() for name in table.column_names}


def bytedance_meta(job: str, root: Path = DATA) -> dict[str, int]:
    """Sizes of the parallel groups of one straggler trace."""
    lines = existing(root / "bytedance" / f"meta-{job}.yaml").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): int(value) for key, value in pairs if value.strip().isdigit()}
