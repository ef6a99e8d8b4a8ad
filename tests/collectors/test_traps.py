"""The table of traps in README.md: every test that it names exists. And those traps that had no test elsewhere."""

from __future__ import annotations

import ast
import errno
import os
import re
from pathlib import Path

import pytest

from collectors import files
from collectors.machine.mounts import parse_mountstats
from collectors.sources.host import HostSource
from collectors.sources.process import ProcessSource
from tests.collectors.kit import bench, values
from tests.collectors.test_mounts import STATISTICS

HERE = Path(__file__).parent
ROW = re.compile(r"\| [^|]+ \| [^|]+ \|")
NAMED = re.compile(r"`([a-z0-9_/]+)::(\w+)`")


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name.removeprefix("test_") for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_trap_has_a_test_that_exists() -> None:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if ROW.match(line) and not line.startswith(("| trap ", "| --- "))]
    named = {(file, name) for row in rows for file, name in NAMED.findall(row)}
    assert len(rows) > 80
    assert [row for row in rows if not NAMED.search(row) and "python -m" not in row] == []
    known = {
        file: names_in(HERE / folder / f"test_{name}.py")
        for file in {file for file, _ in named}
        for folder, _, name in (file.rpartition("/"),)
    }
    assert sorted(f"{file}::{name}" for file, name in named if name not in known[file]) == []


def test_the_call_that_sleeps_is_never_made() -> None:
    """It measures for 20 ms, for each direction: a third of a second for eight GPUs. Bytes come from counters instead."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8")) for path in (HERE.parents[1] / "collectors/nvidia").glob("*.py")
    ]
    called = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert "DeviceGetUtilizationRates" in called
    assert not [name for name in called if isinstance(name, str) and "PcieThroughput" in name and len(name) < 60]


def test_pressure_that_the_kernel_does_not_support_costs_its_columns_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Booted with psi=0 the files can be opened, and reading them is refused."""
    board = bench(tmp_path, "node")
    read = files._read_all

    def refusing(descriptor: int) -> bytes:
        if "/pressure/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return read(descriptor)

    monkeypatch.setattr(files, "_read_all", refusing)
    source = board.build(HostSource)
    source.sample(0)
    sample = board.second(source)
    row = values(source, sample, "host", "host")
    assert sample.gaps == ()
    assert {"load1", "tcp_retrans_per_s"} <= set(row)
    assert not [name for name in row if name.startswith("psi_")]


def test_pages_may_be_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = bench(tmp_path, "node")
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 65536 if name == "SC_PAGE_SIZE" else real(name))
    source = board.build(ProcessSource)
    board.context.ranks.seen("job", 1, 2, pid=26231)
    assert values(source, source.sample(0), "process", "rank2")["rss_bytes"] == 1981 * 65536


def test_operations_of_nfs_may_have_a_column_less() -> None:
    """Statistics of version 1.0 do not count errors, which is the last column."""
    operation = re.compile(r"^(\s*[A-Z_]+:(?: \d+){8}) \d+$", re.MULTILINE)
    with_errors = re.sub(r"^(\s*[A-Z_]+:(?: \d+){8})$", r"\1 7", STATISTICS, flags=re.MULTILINE)
    assert operation.search(with_errors)
    assert (
        parse_mountstats(with_errors)
        == parse_mountstats(operation.sub(r"\1", with_errors))
        == parse_mountstats(STATISTICS)
    )
