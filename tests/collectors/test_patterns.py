"""The table of known lines against captured lines labelled by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from collectors import patterns
from tests.collectors.kit import FIXTURES
from trainwarden.errors import ConfigError

TABLE = patterns.load()


def labelled() -> list[tuple[str, str, str]]:
    with (FIXTURES / "log-lines" / "labelled.tsv").open(encoding="utf-8", newline="") as file:
        return [
            (code, severity, line) for code, severity, line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]


def test_every_labelled_line_gets_its_code_and_severity() -> None:
    wrong = []
    for code, severity, line in labelled():
        hit = TABLE.match(line)
        found = (hit.code, hit.severity) if hit else ("-", "-")
        if found != (code, severity):
            wrong.append((found, (code, severity), line))
    assert not wrong
    assert len(labelled()) > 350


@pytest.mark.parametrize(
    ("line", "code", "attributes"),
    [
        ("NVRM: Xid (PCI:0000:3B:00): 79, pid=4711, name=python3, GPU has fallen off the bus.", "xid:79",
         {"pci": "0000:3b:00.0", "xid": "79", "pid": "4711", "process": "python3", "text": "GPU has fallen off the bus."}),
        ("<3>[12.5] NVRM: Xid (PCI:00000000:5E:00.0): 48, pid='<unknown>', name=<unknown>, DBE", "xid:48",
         {"pci": "0000:5e:00.0", "xid": "48", "text": "DBE"}),
        ("6,3973,227996636,-;NVRM: Xid (PCI:0000:9b:00): 119, pid=1, name=a b, Timeout", "xid:119",
         {"pci": "0000:9b:00.0", "xid": "119", "pid": "1", "process": "a b", "text": "Timeout"}),
        ("[rank5]:[E105 10:11:12.345678901 ProcessGroupNCCL.cpp:629] [Rank 5] Watchdog caught collective operation timeout: "
         "WorkNCCL(SeqNum=4711, OpType=ALLREDUCE, NumelIn=1) ran for 600021 milliseconds", "nccl_timeout",
         {"rank": "5", "seq_num": "4711", "op": "ALLREDUCE"}),
        ("Memory cgroup out of memory: Killed process 4321 (python) total-vm:1kB", "oom_kill",
         {"scope": "Memory cgroup out", "pid": "4321", "process": "python"}),
        ("mlx5_core 0000:3b:00.0 ib0: Link down", "link_down", {"interface": "ib0"}),
        ("igb 0000:01:00.0 eth1: igb: eth1 NIC Link is Down", "link_down", {"interface": "eth1"}),
        ("mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: be00000000800400", "mce",
         {"text": "CPU 3: Machine Check Exception: 5 Bank 4: be00000000800400"}),
    ],
)  # fmt: skip
def test_attributes(line: str, code: str, attributes: dict[str, str]) -> None:
    hit = TABLE.match(line)
    assert hit is not None
    assert (hit.code, hit.attributes) == (code, attributes)


@pytest.mark.parametrize(
    "line", ["", "ata1: SATA link down (SStatus 0 SControl 300)", "step 12 loss 2.3", "NCCL INFO Link Width 16"]
)
def test_harmless_lines(line: str) -> None:
    assert TABLE.match(line) is None


def test_the_same_message_at_another_time_folds() -> None:
    lines = [
        "<4>[  10.1] INFO: task nfsd:12 blocked for more than 120 seconds.",
        "Oct 16 20:47:19 host kernel: INFO: task nfsd:12 blocked for more than 120 seconds.",
        "4,99,1234567,-;INFO: task nfsd:12 blocked for more than 120 seconds.",
        "[Sun Jan  5 20:25:34 2025] INFO: task nfsd:12 blocked for more than 120 seconds.",
        "kern  :warn  : 2025-01-21T04:41:44,285060+00:00 INFO: task nfsd:12 blocked for more than 120 seconds.",
    ]
    assert len({hit.fold_key for hit in map(TABLE.match, lines) if hit}) == 1


def test_a_fatal_line_has_another_key_than_a_harmless_one_of_its_code() -> None:
    mild = TABLE.match("NVRM: Xid (PCI:0000:04:00): 144, SAW_MVB Nonfatal XC0 i0 Link 00")
    fatal = TABLE.match("NVRM: Xid (PCI:0000:04:00): 144, SAW_MVB Fatal XC0 i0 Link 00")
    assert mild is not None
    assert fatal is not None
    assert mild.fold_key != fatal.fold_key


def test_two_lines_make_one_event() -> None:
    memory = patterns.PairMemory(TABLE)
    assert memory.feed("[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0") is None
    assert memory.feed("               NVRM: (PCI ID: 10de:2330) installed in this system has") is None
    hit = memory.feed("               NVRM: fallen off the bus and is not responding to commands.")
    assert hit is not None
    assert (hit.code, hit.severity, hit.attributes["pci"]) == ("xid:79", "critical", "0000:b3:00.0")
    assert memory.feed("               NVRM: fallen off the bus and is not responding to commands.") is None


def test_the_second_line_must_come_soon() -> None:
    memory = patterns.PairMemory(TABLE)
    memory.feed("NVRM: The NVIDIA GPU 0000:b3:00.0")
    for _ in range(4):
        assert memory.feed("something else") is None
    assert memory.feed("NVRM: fallen off the bus and is not responding to commands.") is None


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ('[[pattern]]\nname="a"\ncontains="x"\nregex="("\ncode="c"\nseverity="info"', "no regular expression"),
        ('[[pattern]]\nname="a"\ncontains="x"\nregex="x"\ncode="c"\nseverity="fatal"', "expected one of info, warning"),
        ('[[pattern]]\nname="a"\nregex="x"\ncode="c"\nseverity="info"', "has no 'contains'"),
        ("[[pattern", "log patterns"),
    ],
)
def test_a_wrong_table_is_one_sentence(tmp_path: Path, table: str, sentence: str) -> None:
    path = tmp_path / "patterns.toml"
    path.write_text(table)
    with pytest.raises(ConfigError, match=sentence):
        patterns.load(path)
