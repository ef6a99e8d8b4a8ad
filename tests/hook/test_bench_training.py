"""The table of `make bench-training`: what is missed or not measured is said, and is no success."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.training import __main__ as everything
from benchmarks.training import peers
from benchmarks.training.bars import Bar, read, rows

MET, MISSED = Bar("stall", 0.08, 0.1), Bar("step rate", 1.2, 1.4, at_least=True)


def test_bars_come_back_from_a_file_as_they_were() -> None:
    kept = rows([MET, MISSED])
    assert [row["met"] for row in kept] == [True, False]
    assert read(json.loads(json.dumps(kept))) == [MET, MISSED]


@pytest.mark.parametrize(
    ("part", "well"),
    [
        ({"bars": rows([MET])}, True),
        ({"bars": rows([MET, MISSED])}, False),
        ({"bars": [], "notes": ["not measured: it needs root"], "failed": True}, False),
        ({"notes": ["not part of a quick look"]}, True),
    ],
)
def test_the_table_is_a_success_only_if_every_bar_is_met(part: dict[str, object], well: bool) -> None:
    lines, found = everything.table({"saves": {"bars": rows([MET])}, "links": part})
    assert found is well
    assert any("MISS step rate: 1.200 >= 1.4" in line for line in lines) == (MISSED.row() in part.get("bars", []))  # type: ignore[operator]
    assert all(any(note in line for line in lines) for note in part.get("notes", []))  # type: ignore[attr-defined]


def test_a_part_that_ends_without_figures_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    out = tmp_path / "old.json"
    out.write_text(json.dumps({"bars": rows([MET])}))
    found = everything.run("saves", (), out)
    assert found["failed"]
    assert "ended with code 1 and no figures" in found["notes"][0], "figures of an earlier run are no figures"


def test_what_there_is_no_time_for_is_said_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], float]] = []

    def run_within(command: list[str], limit_s: float) -> int | None:
        asked.append((command, limit_s))
        if "benchmarks.training.saves" in command:
            return None
        Path(command[-1]).write_text(json.dumps({"pace": {"bars": rows([MET])}}))
        return 0

    monkeypatch.setattr(everything, "_run_within", run_within)
    found = everything.measure(["saves", "rebalance"], quick=True, minutes=1.0, folder=tmp_path)
    kept = everything.summary(found, {}, 1.0)
    assert "did not end within" in kept["parts"]["saves"]["notes"][0]
    assert (kept["parts"]["rebalance"]["bars"], kept["met"]) == (rows([MET]), False)
    assert all(limit_s <= 60.0 - everything.END_S for _, limit_s in asked), "all parts together end in time"
    late = everything.measure(["rebalance"], quick=True, minutes=0.0, folder=tmp_path)
    assert late["rebalance"]["failed"]
    assert len(asked) == 2, "nothing was begun that could not end in time"


def test_a_part_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    begun, mark = tmp_path / "begun", tmp_path / "cleaned"
    script = (
        f"import pathlib, time\ntry:\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(600)\n"
        f"finally:\n    pathlib.Path({str(mark)!r}).touch()"
    )
    assert everything._run_within([sys.executable, "-c", script], 1.0) is None
    assert mark.exists() or not begun.exists(), "as by Ctrl-C: it takes its own children along"


def test_a_peer_that_cannot_be_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWARDEN_BENCH_PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    python, why_not = peers.interpreter("torchft")
    assert (python, why_not.startswith("torchft could not be installed here"), "\n" in why_not) == ("", True, False)
