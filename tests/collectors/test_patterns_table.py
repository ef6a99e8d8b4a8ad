"""Every pattern: a line that it matches, a near miss, a rule for its code, a source, and no way to run away."""

from __future__ import annotations

import csv
import re
from functools import cache

import pytest

from collectors import patterns
from detectors.rules.table import table
from tests.collectors.kit import FIXTURES
from tests.collectors.logs.steps_of_regex import nested_quantifiers, wide_repeats

TABLE = patterns.load()
MOST_WIDE = 6


@cache
def lines() -> list[tuple[str, bool, str]]:
    with (FIXTURES / "log-lines" / "patterns.tsv").open(encoding="utf-8", newline="") as file:
        return [
            (name, sign == "+", line) for name, sign, line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]


def expressions() -> list[str]:
    single = [regex for p in TABLE.patterns for regex in (p.regex, *(w.regex for w in p.when))]
    return [regex.pattern for regex in [*single, *(r for pair in TABLE.pairs for r in (pair.opens, pair.closes))]]


def test_every_pattern_matches_a_line_and_misses_a_near_one() -> None:
    by_name = {pattern.name: pattern for pattern in TABLE.patterns}
    assert len(by_name) == len(TABLE.patterns)
    wrong = [
        (name, expected, line)
        for name, expected, line in lines()
        if (by_name[name].match(line) is not None) != expected
    ]
    assert not wrong
    assert {(name, sign) for name, sign, _ in lines()} == {(name, sign) for name in by_name for sign in (True, False)}


def test_the_table_as_a_whole_gives_each_line_to_its_pattern() -> None:
    def found(line: str) -> str:
        hit = TABLE.match(line)
        return hit.name if hit else "-"

    stolen = [(name, found(line), line) for name, expected, line in lines() if expected and found(line) != name]
    # one line, two facts: the graver or older pattern comes first
    assert {(name, by) for name, by, _ in stolen} <= {("nccl_progress", "nccl_peer_closed")}


def test_every_code_has_a_rule_of_its_own_and_every_pattern_a_source() -> None:
    missing = []
    for name, expected, line in lines():
        hit = next(p for p in TABLE.patterns if p.name == name).match(line) if expected else None
        rule = table().find(hit.code, hit.severity) if hit else None
        if hit and (rule is None or rule.code == "*") and not (rule is None and hit.severity == "info"):
            missing.append((name, hit.code, hit.severity))
    assert not missing
    assert [pattern.name for pattern in TABLE.patterns if not pattern.source] == []


def test_the_gate_lets_every_known_line_through() -> None:
    gate = TABLE.gate()
    assert [literal for literal in TABLE.gates() if literal[0] not in patterns.RARE] == []
    assert [line for _, expected, line in lines() if expected and not gate.search(line.encode())] == []
    assert gate.search(b"step 120 loss 2.31 grad_norm 0.43 lr 1.5e-4 tokens per second 8123\n") is None


def test_no_expression_repeats_within_a_repetition() -> None:
    assert nested_quantifiers(r"(a+)+b")
    assert nested_quantifiers(r"(?:x|(?:a*)c){2,}")
    assert not nested_quantifiers(r"(?:a{1,3}-){0,8}b*")
    assert [regex for regex in expressions() if nested_quantifiers(regex)] == []


def test_the_worst_case_is_a_small_power_of_the_length() -> None:
    assert wide_repeats(r".*a.*b\d+") == 3
    assert [(wide_repeats(regex), regex) for regex in expressions() if wide_repeats(regex) > MOST_WIDE] == []


@pytest.mark.parametrize(
    "filler", ["NVRM: Xid (PCI:0000:3b:00): ", "NCCL WARN NET/IB : ", "mlx5_core ", "XFS (x): ", "a " * 40]
)
def test_long_lines_of_beginnings_are_looked_at_whole(filler: str) -> None:
    TABLE.match((filler * 2000)[:16384])  # would not come back within the test's time if it could run away


def test_the_literal_is_in_the_expression() -> None:
    def literal(pattern: patterns.Pattern) -> bool:
        plain = re.sub(r"\\(.)", r"\1", pattern.regex.pattern)
        return pattern.contains.strip() in plain or any(
            pattern.contains in line for name, expected, line in lines() if expected and name == pattern.name
        )

    assert [pattern.name for pattern in TABLE.patterns if not literal(pattern)] == []


def test_the_gate_lets_every_captured_line_through_that_the_table_knows() -> None:
    gate = TABLE.gate()
    with (FIXTURES / "log-lines" / "labelled.tsv").open(encoding="utf-8", newline="") as file:
        known = [line for code, _, line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if code != "-"]
    assert [line for line in known if not gate.search(line.encode())] == []
