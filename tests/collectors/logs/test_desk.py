"""The desk: searching blocks finds what looking at each line finds; limits; expressions that cannot run away."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors import patterns
from collectors.logs import cri, flight, prefix, ras, steplines, threads, traceback
from collectors.logs.desk import Channel, Desk, refused
from collectors.logs.folding import Folder
from tests.collectors.kit import FIXTURES, Kept, bench
from tests.collectors.logs.steps_of_regex import nested_quantifiers

TABLE = patterns.load()
PLAIN = ["step 1 loss 2.3", "", "INFO: all is well", "[rank1]: GPU util 97%", "Wrote NVRM-free text", "x" * 300]
FAILURE = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "ValueError: no"]
PAIR = ["NVRM: The NVIDIA GPU 0000:b3:00.0", "NVRM: fallen off the bus and is not responding to commands."]


def known() -> list[str]:
    with (FIXTURES / "log-lines" / "patterns.tsv").open(encoding="utf-8", newline="") as file:
        return [row[2] for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]


def codes(tmp_path: Path, blocks: list[list[str]], whole: bool) -> list[str]:
    board = bench(tmp_path)
    desk, channel = Desk(board.context, TABLE, Folder(0.0, 1e9, 1e9, refused(board.context)), "logfile"), Channel("log")
    for lines in blocks:
        if whole:
            desk.block(channel, "".join(f"{line}\n" for line in lines).encode())
        else:
            for line in lines:
                desk.raw(channel, line.encode())
    desk.settle([channel], last=True)
    outlet = board.outlet
    assert isinstance(outlet, Kept)
    return outlet.codes


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.lists(
        st.lists(st.sampled_from([*PLAIN * 20, *known(), *FAILURE * 8, *PAIR * 8]), max_size=25), max_size=4
    )
)
def test_a_block_gives_what_its_lines_give(tmp_path_factory: pytest.TempPathFactory, blocks: list[list[str]]) -> None:
    folder = tmp_path_factory.mktemp("desk")
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    assert codes(folder / "a", blocks, whole=True) == codes(folder / "b", blocks, whole=False)


@settings(max_examples=60, deadline=None)
@given(block=st.binary(max_size=400))
def test_no_bytes_raise_or_become_dead_letters(tmp_path_factory: pytest.TempPathFactory, block: bytes) -> None:
    board = bench(tmp_path_factory.mktemp("desk"))
    desk = Desk(board.context, TABLE, Folder(0.0, 1e9, 1e9, refused(board.context)), "logfile")
    desk.block(Channel("log", holds=lambda _: True), b"NVRM: Xid " + block + b"\n")
    assert board.outlet.letters == []


def test_a_flood_of_known_lines_is_limited_and_counted(tmp_path: Path) -> None:
    board = bench(tmp_path)
    desk = Desk(board.context, TABLE, Folder(5.0, 10.0, 1.0, refused(board.context)), "logfile")
    flood = b"".join(b"INFO: task worker:%d blocked for more than 120 seconds.\n" % n for n in range(10_000))
    desk.block(Channel("kernel"), flood + b"NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, x\n")
    assert board.outlet.codes == ["hung_task"] * 10 + ["xid:79"]
    assert board.context.metrics.value("tw_log_lines_dropped_total", file="kernel") == 9990


@pytest.mark.parametrize(
    "module", [cri, flight, prefix, ras, steplines, threads, traceback], ids=lambda m: m.__name__.rpartition(".")[2]
)
def test_no_expression_of_a_parser_can_run_away(module: ModuleType) -> None:
    found = [value for value in vars(module).values() if isinstance(value, re.Pattern)]
    texts = [v.pattern.decode() if isinstance(v.pattern, bytes) else v.pattern for v in found]
    plain = [re.sub(r"#.*", "", text) if "\n" in text else text for text in texts]
    assert [text for text in plain if nested_quantifiers(text)] == []
