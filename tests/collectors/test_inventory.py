"""The operator's table: what it says, what is wrong with it, and that a wrong one changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collectors.sources.inventory import InventorySource
from collectors.topology.inventory import InventoryError, attributes_of
from tests.collectors.kit import FIXTURES, Bench, bench
from tests.collectors.test_slurm import facts, settle
from trainwarden.clock import NS_PER_S

CSV = (FIXTURES / "topology/nodes.csv").read_text(encoding="utf-8")


def inventory(board: Bench, **keys: Any) -> InventorySource:
    source = board.build(InventorySource, **keys)
    assert isinstance(source, InventorySource)
    return source


def test_the_operator_is_believed_and_a_table_that_breaks_changes_nothing(tmp_path: Path) -> None:
    board, table = bench(tmp_path), tmp_path / "nodes.csv"
    table.write_text("node,rack,leaf\nn0,r1,leaf1\n")
    board.context.facts.board.tell("node", "slurm", "scheduler", {"leaf": "s0"}, 1)
    source = inventory(board, path=str(table))
    settle(board, source)
    assert facts(board) == {"rack": "r1", "leaf": "leaf1"}
    table.write_text("node,rack,leaf\nn0,r1\n")
    board.clock.advance_ns(61 * NS_PER_S)
    settle(board, source)
    board.clock.advance_ns(61 * NS_PER_S)
    settle(board, source)
    assert facts(board) == {"rack": "r1", "leaf": "leaf1"}
    assert [gap.reason for gap in source.sample(0).gaps] == ["malformed"]
    assert board.outlet.codes == ["inventory_malformed"]
    assert "line 2: 2 cells, expected 3" in board.outlet.logs[0][0].line
    table.unlink()
    board.clock.advance_ns(61 * NS_PER_S)
    settle(board, source)
    assert [gap.reason for gap in source.sample(0).gaps] == ["missing"]
    table.write_text("node,rack\nn0,r9\n")
    board.clock.advance_ns(61 * NS_PER_S)
    settle(board, source)
    assert (facts(board), source.sample(0).gaps) == ({"rack": "r9", "leaf": "s0"}, ())


def test_without_a_table_nothing_is_asked(tmp_path: Path) -> None:
    board = bench(tmp_path)
    source = inventory(board)
    settle(board, source)
    assert (source.sample(0).gaps, source._answer.count) == ((), 0)
    assert "no table given" in source.explain()


def test_a_node_is_found_by_its_short_name_too(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text('[nodes."n[0-9]"]\nrack = "r1"\nrail = 3\n')
    board = bench(tmp_path)
    object.__setattr__(board.context, "node", "n0.example.org")
    source = inventory(board, path=str(tmp_path / "t.toml"))
    settle(board, source)
    assert facts(board) == {"rack": "r1", "rail": "3"}


@pytest.mark.parametrize(
    ("text", "toml", "sentence"),
    [
        ("", False, "line 1: columns are none"),
        ("rack,leaf\n", False, "expected node and each of the others once"),
        ("node,rack,rack\n", False, "each of the others once"),
        ("node,rack\nn0\n", False, "line 2: 1 cells, expected 2"),
        ("node,Rack Name\nn0,x\n", False, "'Rack Name' is no name for an attribute"),
        ("node,probe_address\nn0,1.2.3.4:1\n", False, "'probe_address' is no name"),
        ('node,rack\n"n[1-",r\n', False, "line 2: host list"),
        ('node,rack\n"other[9-1]",r\n', False, "runs backwards"),
        (f"node,rack\nn0,{'x' * 300}\n", False, "300 characters, expected at most 200"),
        ("[nodes", True, "not TOML"),
        ("x = 1", True, "no table"),
        ("[nodes]\nn0 = 3", True, "nodes.n0: expected a table of strings"),
        ("[nodes.n0]\nrack = [1]", True, "nodes.n0: expected a table of strings"),
    ],
)
def test_what_is_wrong_is_one_sentence(text: str, toml: bool, sentence: str) -> None:
    with pytest.raises(InventoryError) as problem:
        attributes_of(text, "n0", toml)
    assert sentence in str(problem.value)


def test_a_later_row_adds_to_an_earlier_one_and_odd_files_are_read() -> None:
    assert attributes_of(CSV, "gpu017", toml=False)["leaf"] == "leaf9"
    assert attributes_of('\ufeffnode, rack\r\nn0, "r, 1"\r\n\r\n', "n0", toml=False) == {"rack": "r, 1"}
    assert attributes_of(CSV, "nobody", toml=False) == {}
