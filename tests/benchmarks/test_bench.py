"""The whole benchmark on a tiny made-up set: table, JSON, page, resuming, and every way to fail said aloud."""

from __future__ import annotations

import gzip
import json
import os
import signal
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from benchmarks.detect import bench, data, report
from benchmarks.detect.bench import Options, benchmark
from benchmarks.detect.isolate import Task, outcomes
from benchmarks.detect.methods.base import F64, Method
from benchmarks.detect.methods.random_score import RandomScore
from benchmarks.detect.methods.static_rule import StaticRule

NOW = datetime(2026, 11, 30, tzinfo=UTC)
START = datetime(2020, 1, 1)
FILES = {"kind/one": [(250, 259)], "kind/two": [(300, 309)], "kind/quiet": []}


class Broken(Method):
    """Cannot score."""

    name = "broken"
    family = "uni"
    paper = "a method that fails"

    def fit(self, train: F64, seed: int) -> None: ...

    def score(self, test: F64) -> F64:
        raise RuntimeError("no scores today")


class Dying(Broken):
    """Its process is killed."""

    name = "dying"

    def score(self, test: F64) -> F64:
        os.kill(os.getpid(), signal.SIGTERM)
        return test[:, 0]


class Short(Broken):
    """Gives too few scores."""

    name = "short"

    def score(self, test: F64) -> F64:
        return test[:-1, 0]


class Unprepared(Broken):
    """Cannot even be prepared."""

    name = "unprepared"

    @classmethod
    def prepare(cls) -> None:
        raise ImportError("half installed")


class Spinning(Broken):
    """Never ends."""

    name = "spinning"

    def score(self, test: F64) -> F64:
        while True:
            test = test + 1


class Memory(Broken):
    """Needs 80 MB for a moment, then gives the rows' own values."""

    name = "memory"

    def score(self, test: F64) -> F64:
        np.ones(10_000_000).sum()
        return np.asarray(test[:, 0], np.float64)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data folder in NAB's form: flat noise with a jump in the labelled window."""
    folder = tmp_path / "data" / "nab"
    (folder / "labels").mkdir(parents=True)
    tune = tomllib.loads((data.HERE / "splits.toml").read_text())["nab"]["tune"]
    files = FILES | {name: [(200, 209)] for name in tune}
    for number, (name, windows) in enumerate(files.items()):
        values = np.random.default_rng(number).normal(size=400)
        for start, end in windows:
            values[start : end + 1] += 50
        path = folder / "data" / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as lines:
            lines.write("timestamp,value\n" + "".join(f"{stamp(at)},{value}\n" for at, value in enumerate(values)))
    windows_text = {f"{name}.csv": [[str(stamp(a)), str(stamp(b))] for a, b in some] for name, some in files.items()}
    (folder / "labels" / "combined_windows.json").write_text(json.dumps(windows_text))
    return tmp_path / "data"


def stamp(row: int) -> datetime:
    return START + timedelta(minutes=5 * row)


def options(
    root: Path, split: str = "test", methods: tuple[str, ...] = (), fresh: bool = False, seeds: int = 2
) -> Options:
    results = root.parent / "results"
    return Options(split, ("nab",), methods, seeds, root, results, root.parent / "page.md", results / "out.json", fresh)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, root: Path) -> list[str]:
    """Lines printed; two methods are known."""
    (root.parent / "results").mkdir()
    monkeypatch.setattr(bench, "discover", lambda: {"random": RandomScore, "static-rule": StaticRule})
    return []


def test_a_run_says_and_writes_the_figures_of_every_method(root: Path, said: list[str]) -> None:
    assert benchmark(options(root), NOW, said.append) == 0
    whole = json.loads((root.parent / "results" / "out.json").read_text())
    (nab,) = whole["sets"]
    best, last = nab["rows"]
    assert (best["method"], best["series"], best["seeds"]) == ("static-rule", 3, 1)
    assert (last["method"], last["seeds"]) == ("random", 2)
    assert best["vus_pr"] > 0.6 > last["vus_pr"]
    assert best["found"]["0.0001"] == 1.0
    assert best["delay_p50_s"] == 0.0
    assert best["peak_mb"] >= 0.0
    figures = whole["nab"]["static-rule"]["test"]
    assert (figures["files"], figures["windows"]) == (3, 2)
    assert figures["best"] > 99
    assert [line.split()[0] for line in said if " · " in line and line[0] in "rs"] == ["static-rule", "random"]
    assert any(line.startswith("NAB score static-rule") for line in said)


def test_a_second_run_measures_nothing_again(root: Path, said: list[str]) -> None:
    benchmark(options(root), NOW, said.append)
    first = (root.parent / "results" / "out.json").read_text()
    said.clear()
    assert benchmark(options(root), NOW, said.append) == 0
    assert "static-rule: 3 runs, 3 known" in said
    assert "random: 6 runs, 6 known" in said
    assert (root.parent / "results" / "out.json").read_text() == first
    said.clear()
    benchmark(options(root, fresh=True), NOW, said.append)
    assert "static-rule: 3 runs, 0 known" in said


def test_figures_without_kept_scores_are_known_too(root: Path, said: list[str]) -> None:
    benchmark(options(root), NOW, said.append)
    for path in (root.parent / "results" / "tmp").rglob("*.npz"):
        path.unlink()
    said.clear()
    assert benchmark(options(root), NOW, said.append) == 0
    assert "static-rule: 3 runs, 3 known" in said
    assert json.loads((root.parent / "results" / "out.json").read_text())["nab"]["static-rule"]["test"]["best"] > 99


def test_other_data_is_run_again(root: Path, said: list[str]) -> None:
    benchmark(options(root), NOW, said.append)
    path = root / "nab" / "data" / "kind" / "one.csv.gz"
    with gzip.open(path, "rt") as lines:
        text = lines.read()
    with gzip.open(path, "wt") as lines:
        lines.write(text.replace("\n", "1\n", 3))
    said.clear()
    benchmark(options(root), NOW, said.append)
    assert "static-rule: 3 runs, 2 known" in said


def test_the_test_split_says_when_it_was_last_run_and_tuning_does_not(root: Path, said: list[str]) -> None:
    benchmark(options(root, "tune"), NOW, said.append)
    benchmark(options(root), NOW, said.append)
    benchmark(options(root), NOW, said.append)
    lines = [line for line in said if line.startswith("test series:")]
    assert lines == [
        "test series: never run before (0 runs so far)",
        "test series: last run 2026-11-30 00:00 UTC: random static-rule (1 runs so far)",
    ]


def test_the_whole_corpus_gets_its_nab_score_once_both_splits_are_run(root: Path, said: list[str]) -> None:
    benchmark(options(root, "tune"), NOW, said.append)
    benchmark(options(root), NOW, said.append)
    figures = json.loads((root.parent / "results" / "detect" / "static-rule.json").read_text())["nab"]
    assert {split: one["files"] for split, one in figures.items()} == {"tune": 7, "test": 3, "all": 10}


def test_ours_is_held_against_the_best_peer(root: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StaticRule, "ours", True)
    benchmark(options(root), NOW, said.append)
    assert any(line.startswith("static-rule against the best peer random: +0.") for line in said)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Broken, "RuntimeError: no scores today"),
        (Unprepared, "ended with code 1 while preparing"),
        (Dying, "ended with code -15"),
        (Short, "short gave scores of shape (29,)"),
    ],
)
def test_a_method_that_fails_fails_the_run_and_not_the_others(
    root: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, method: type[Method], reason: str
) -> None:
    monkeypatch.setattr(bench, "discover", lambda: {method.name: method, "static-rule": StaticRule})
    assert benchmark(options(root), NOW, said.append) == 1
    failures = [line for line in said if line.startswith("FAILED:")]
    assert len(failures) == 3
    assert all(reason in line for line in failures)
    assert any(line.startswith("static-rule ") for line in said)


def test_a_method_that_does_not_end_is_stopped() -> None:
    (only,) = outcomes(Spinning, [Task(a_series(), 0)], cpu_limit_s=1)
    assert only[1].error == "used more than 1 s of processor time"


def test_memory_is_that_of_the_run_alone() -> None:
    first, second = outcomes(Memory, [Task(a_series(), 0), Task(a_series(), 1)])
    assert 80e6 < first[1].peak_bytes < 120e6
    assert abs(first[1].peak_bytes - second[1].peak_bytes) < 10e6
    np.testing.assert_array_equal(first[1].scores, a_series().test[:, 0])
    assert len(first[1].calibration) == 30


def a_series() -> data.Series:
    return data.Series("nab", "made up", 300.0, np.zeros((60, 1)), np.arange(40.0)[:, None])


def test_a_method_without_its_package_is_listed_with_the_reason(
    root: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RandomScore, "needs", ("no_such_package",))
    assert benchmark(options(root), NOW, said.append) == 0
    assert sum(line.startswith("NOT RUN: random: needs no_such_package, which is not installed") for line in said) == 2


def test_a_missing_file_stops_the_run(root: Path, said: list[str]) -> None:
    (root / "nab" / "data" / "kind" / "two.csv.gz").unlink()
    with pytest.raises(data.DataError, match=r"two\.csv\.gz is missing"):
        benchmark(options(root), NOW, said.append)


def test_the_page_is_made_from_the_summaries_of_the_splits(root: Path, said: list[str], tmp_path: Path) -> None:
    for split in ("tune", "test"):
        benchmark(options(root, split), NOW, said.append)
        (root.parent / "results" / "out.json").rename(root.parent / "results" / f"detect-{split}.json")
    page = tmp_path / "docs" / "page.md"
    report.write_page(page, root.parent / "results")
    text = page.read_text()
    assert text.index("## Test series (2026-11-30") < text.index("## Tuning series")
    assert "| static-rule |" in text
    assert "uniform random numbers" in text
    assert "TSB-AD: TranAD 0.474" in text
