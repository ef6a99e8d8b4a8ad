"""The recorder writes what the recordings that we were given hold, and a run of it is read as these are."""

from __future__ import annotations

import csv
import fcntl
import gzip
from pathlib import Path

import pytest

from benchmarks.recorder import stage
from benchmarks.recorder.__main__ import main, record
from benchmarks.recorder.stage import CGROUPS, PREFIX
from benchmarks.recorder.trainer import COLUMNS
from benchmarks.recorder.watch import HOST_COLUMNS, NODE_COLUMNS, probe_ms, process
from streams.recordings.real_faults import labels, read, runs
from trainwarden.records import StepReport, Tick

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(
    ("kind", "columns"), [("csv", COLUMNS), ("nodes.csv", NODE_COLUMNS), ("host.csv", HOST_COLUMNS)]
)
def test_the_columns_are_those_of_the_recordings_we_have(kind: str, columns: tuple[str, ...]) -> None:
    with gzip.open(DATA / f"clean1.{kind}.gz", "rt") as file:
        assert tuple(next(csv.reader(file))) == columns


def test_an_unknown_fault_is_refused_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["recorder", str(tmp_path / "out"), "--faults", "cpu_throttle,gremlins"])
    with pytest.raises(SystemExit):
        main()
    assert "no fault is called 'gremlins': known are sigstop" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_process_that_is_not_there_and_an_address_that_answers() -> None:
    assert process(2**22 + 1) == ("-", -1.0)
    assert 0 <= probe_ms("127.0.0.1") < 1000


def test_two_recorders_at_once_do_not_end_each_others_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    monkeypatch.setattr(stage, "LOCK", lock)
    monkeypatch.setattr(
        stage, "require", lambda: None
    )  # what it asks of the machine comes before, and is not the question
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(stage.StageError, match="another recorder is at work"):
            stage.Stage(tmp_path)


@pytest.mark.root
@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_is_read_with_its_fault_and_leaves_nothing_behind(tmp_path: Path) -> None:
    record(tmp_path, "sigstop_1", "sigstop", seed=1, rest_s=5.0)
    assert runs(tmp_path) == ("sigstop_1",)
    (label,) = labels(tmp_path, "sigstop_1")
    records = read(tmp_path, "sigstop_1")
    assert {r.node for r in records if isinstance(r, StepReport)} == {"node0", "node1", "node2", "node3"}
    stopped = [
        r
        for r in records
        if isinstance(r, StepReport)
        for row in r.rows
        if row.started_at_ns + row.duration_ms * 1e6 > label.end_ns > row.started_at_ns
    ]
    assert stopped, "no step was stopped"
    assert max(r.observed_at_ns for r in records if isinstance(r, Tick)) > label.end_ns
    assert label.nodes
    assert label.end_ns - label.start_ns > 3e9
    assert not list(Path("/run/netns").glob(f"{PREFIX}*"))
    assert not list(CGROUPS.glob(f"*/{PREFIX}*"))
    assert {path.name for path in tmp_path.iterdir()} == {
        f"sigstop_1.{kind}" for kind in ("csv", "nodes.csv", "host.csv", "events.jsonl", "labels.json")
    }
