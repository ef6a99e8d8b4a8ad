"""The table of codes against the vendors' own, and its rules of recurrence and of taking back."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectors import patterns
from detectors.rules.codes import meaning_of
from detectors.rules.table import Table, expanded, table
from trainwarden.records import LogEvent

MAP = Path(__file__).parent / "nvsentinel_action_map" / "xid_action.csv"
HEALTH_MAP = MAP.with_name("dcgm_fr_action.csv")
SAME = {
    "RESTART_APP": "RESTART_APP", "RESET_GPU": "RESET_GPU", "RESTART_BM": "REBOOT_NODE", "RESTART_VM": "REBOOT_NODE", "IGNORE": "NONE",
    "WORKFLOW_XID_48": "RESET_GPU", "WORKFLOW_NVLINK_ERR": "CHECK_NVLINK", "WORKFLOW_NVLINK5_ERR": "CHECK_NVLINK",
    "CHECK_MECHANICALS": "INSPECT", "UNEXPECTED_ERR_REPORT_ISSUE": "REPORT", "WORKFLOW_XID_45": "FOLLOW_OTHER",
    "FOLLOW_OTHER_XID": "FOLLOW_OTHER", "UPDATE_SWFW": "UPDATE", "CHECK_UVM": "INSPECT",
}  # fmt: skip


def vendor() -> Iterator[tuple[int, str, str]]:
    with MAP.open() as rows:
        for row in csv.DictReader(rows):
            yield int(row["xid"]), row["action"], row["severity"]


def test_every_xid_of_the_vendors_map_is_in_the_table_word_for_word() -> None:
    seen = 0
    for number, action, severity in vendor():
        rules = [rule for rule in table().rules if f"xid:{number}" in expanded(rule.code)]
        assert rules, number
        assert {(rule.vendor_action, rule.vendor_severity) for rule in rules} == {(action, severity)}, number
        seen += 1
    assert seen == 162


def test_every_disagreement_with_the_vendors_map_has_a_written_reason() -> None:
    for number, action, severity in vendor():
        for heard in ("warning", "critical"):
            rule = table().find(f"xid:{number}", heard)
            assert rule is not None
            same = rule.action == SAME[action] and (rule.verdict == "fatal_code") == (severity == "FATAL")
            assert same or rule.differs, (
                f"xid:{number} at {heard}: {rule.action}, {rule.verdict}; the map says {action}, {severity}"
            )


def test_a_reason_stands_only_where_something_differs() -> None:
    for rule in table().rules:
        if rule.differs:
            agrees = rule.action == SAME[rule.vendor_action] and (rule.verdict == "fatal_code") == (
                rule.vendor_severity == "FATAL"
            )
            assert not agrees, rule.code


def test_every_result_of_the_health_watch_is_in_the_table_word_for_word() -> None:
    names = {"NODE_REBOOT": "REBOOT_NODE", "REPORT_ISSUE": "REPORT", "IGNORE": "NONE", "RESET_GPU": "RESET_GPU"}
    with HEALTH_MAP.open() as rows:
        for row in csv.DictReader(rows):
            rule = table().find(f"dcgm:{row['dcgm_fr']}", "critical")
            assert rule is not None
            assert rule.vendor_action == row["action"]
            assert rule.action == names.get(row["action"], "INSPECT"), row
            assert (rule.verdict == "none") == (row["action"] == "IGNORE"), row


@pytest.mark.parametrize("number", [48, 54, 62, 64, 79, 95, 119, 120, 140, 143])
def test_what_everybody_drains_for_is_fatal(number: int) -> None:
    meaning = meaning_of(LogEvent(code=f"xid:{number}", severity="critical"))
    assert meaning is not None
    assert meaning.kind == "fatal_code"
    assert "remedy: " in meaning.clause


@pytest.mark.parametrize(
    ("code", "severity", "kind"),
    [
        ("xid:154", "critical", "fatal_code"), ("xid:154", "info", None), ("xid:63", "info", None), ("xid:63", "warning", "suspect_code"),
        ("xid:149", "critical", "fatal_code"), ("xid:165", "info", "suspect_code"), ("xid:400", "info", "suspect_code"),
        ("sxid:20034", "critical", "fatal_code"), ("sxid:11004", "warning", "suspect_code"), ("sxid:11022", "critical", "suspect_code"),
        ("sxid:99999", "critical", "fatal_code"), ("sxid:99999", "warning", "suspect_code"), ("cuda_ecc", "critical", "fatal_code"),
        ("pcie_error", "critical", "fatal_code"), ("pcie_error", "error", "suspect_code"), ("edac_uncorrected", "critical", "fatal_code"),
        ("edac_corrected", "info", None), ("fs_error", "critical", "fatal_code"), ("fs_error", "error", "suspect_code"),
        ("nic_dead", "critical", "fatal_code"), ("nccl_net_error", "critical", None), ("hccl:EI0002", "error", None),
        ("hccl:EJ0001", "error", "suspect_code"), ("npu:80E3A201", "warning", "fatal_code"), ("npu:8c1fa006", "warning", "fatal_code"),
        ("npu:80E21007", "error", None), ("npu:FFFFFFFF", "error", "suspect_code"), ("something_new", "critical", "fatal_code"),
        ("something_new", "info", None), ("something_new", "loud", "suspect_code"), ("nfs_not_responding", "critical", "suspect_code"),
    ],
)  # fmt: skip
def test_meaning(code: str, severity: str, kind: str | None) -> None:
    meaning = meaning_of(LogEvent(code=code, severity=severity))
    assert (meaning.kind if meaning else None) == kind


def test_every_code_that_the_collectors_know_is_in_the_table() -> None:
    known = set(table().codes())
    for pattern in patterns.load().patterns:
        name = pattern.code.partition(":")[0]
        assert name in known or f"{name}:*" in known or pattern.code in known, pattern.code


def test_an_accelerator_code_with_two_levels_has_the_graver_one() -> None:
    rule = table().find("npu:A2301001", "warning")
    assert rule is not None
    assert rule.action == "REPLACE"


def test_a_wrong_row_is_named() -> None:
    row = dict.fromkeys(
        ("meaning", "remedy", "recur_count", "stands", "vendor_action", "vendor_severity", "source", "differs"), ""
    )
    row |= {"code": "xid:1", "severity": "info", "verdict": "boom", "action": "NONE"}
    with pytest.raises(ValueError, match=r"codes.csv line 2 \(xid:1\): verdict is 'boom'"):
        Table([row], {})


def test_rows_are_complete() -> None:
    for rule in table().rules:
        assert rule.meaning, rule.code
        assert rule.remedy, rule.code
        assert rule.source, rule.code
        if rule.recurrence is not None:
            assert rule.recurrence.count > 1, rule.code
            assert rule.recurrence.by in ("event", "line", "job"), rule.code
