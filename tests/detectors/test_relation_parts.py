"""Parts of the relation benchmark: what a seed gave comes back as it was, adds up, and belongs to the code that made it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.relation import cost, parts
from benchmarks.relation.__main__ import Bench, _arguments
from benchmarks.relation.episodes import Played
from benchmarks.relation.scenarios import Scenario, Slot, scenario
from benchmarks.relation.score import Marked, Sheet
from models.relation import weights


def sheet(seed: int) -> Sheet:
    slot = Slot(0, "node", ("weak_node",), 1.1, 200.0, 320.0, (("node", "n00005"),))
    marks = [Marked(seed, 128, slot, 1, 0, 0, True, [20.0])]
    return Sheet("ours", marks, 1, 5.1, 0.5, 172, [(0.9, True)])


def test_a_part_comes_back_as_it_was_and_adds_up(tmp_path: Path) -> None:
    path = parts.path_of(tmp_path, scenario("test", 128, 501), "0")
    assert parts.kept(path) == {}
    parts.keep(path, {("ours", 128): sheet(1)})
    whole = parts.kept(path)
    assert whole == {("ours", 128): sheet(1)}
    parts.add(whole, {("ours", 128): sheet(2), ("minder@0", 128): sheet(2)})
    assert [mark.seed for mark in whole["ours", 128].slots] == [1, 2]
    assert whole["ours", 128].node_days == pytest.approx(10.2)
    assert whole["ours", 128].false_isolations == 2


def test_a_part_of_other_code_or_other_lines_is_not_taken() -> None:
    assert parts.code_sum(weights.SHIPPED, "2") == parts.code_sum(weights.SHIPPED, "2")
    assert parts.code_sum(weights.SHIPPED, "2") != parts.code_sum(weights.SHIPPED, "3")
    assert parts.code_sum(weights.SHIPPED, "2") != parts.code_sum(Path(parts.__file__), "2")


def test_what_is_kept_is_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = _arguments(["--parts", str(tmp_path), "--only", "507", "--sizes", "128"])
    bench, run = Bench(args, {}), scenario("test", 128, 507)
    played: list[str] = []

    def play(run: Scenario, cache: Path | None) -> tuple[Played, ...]:
        del cache
        played.append(run.name)
        return ()

    monkeypatch.setattr("benchmarks.relation.__main__.play", play)
    assert bench.of(run, ["ours"]) == {}
    parts.keep(parts.path_of(tmp_path, run, bench.code), {("ours", 128): sheet(507)})
    assert bench.of(run, ["ours"]) == {("ours", 128): sheet(507)}
    assert len(played) == 1


def test_a_seed_that_is_not_of_the_split_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _arguments(["--only", "2001"])
    assert "expected seeds of the split test" in capsys.readouterr().err


def test_a_round_above_its_bar_is_told() -> None:
    row = {"round, health": 0.1, "round, faults": 0.14, "attribution, most": 1.0}
    assert not cost.above(1250, row)
    assert cost.above(1250, row | {"round, faults": 0.16})
    assert cost.above(4096, row | {"attribution, most": 2.1})
    assert not cost.above(77, row | {"round, faults": 9.0})
