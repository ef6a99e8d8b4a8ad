"""What the codes of drivers and kernels mean."""

from __future__ import annotations

import pytest

from detectors.base import Frame
from detectors.rules.codes import CodeDetector, meaning_of, xid_actions
from detectors.synthetic import Scene, SyntheticCluster
from trainwarden.records import LogEvent
from trainwarden.topology import Topology


@pytest.mark.parametrize(
    ("code", "severity", "kind"),
    [
        ("xid:79", "critical", "fatal_code"), ("xid:48", "critical", "fatal_code"), ("xid:64", "critical", "fatal_code"),
        ("xid:95", "critical", "fatal_code"), ("xid:119", "critical", "fatal_code"), ("xid:74", "critical", "fatal_code"),
        ("xid:74", "warning", "suspect_code"), ("xid:149", "warning", "suspect_code"), ("xid:94", "warning", "suspect_code"),
        ("xid:13", "critical", "suspect_code"), ("xid:31", "warning", "suspect_code"), ("xid:43", "critical", "suspect_code"),
        ("xid:45", "warning", "suspect_code"), ("xid:32", "critical", "suspect_code"), ("xid:9999", "warning", "suspect_code"),
        ("kernel_panic", "critical", "fatal_code"), ("mce", "critical", "fatal_code"), ("mce", "warning", "suspect_code"),
        ("oom_kill", "critical", "suspect_code"), ("edac_corrected", "info", None), ("nccl_timeout", "error", None),
        ("worker_exit:-9", "critical", None), ("save_ok", "info", None), ("save_failed", "error", "save_failed"), ("", "critical", None),
        ("xid:", "critical", None),
    ],
)  # fmt: skip
def test_meaning(code: str, severity: str, kind: str | None) -> None:
    meaning = meaning_of(LogEvent(code=code, severity=severity))
    assert (meaning.kind if meaning else None) == kind


def test_no_application_code_isolates_whatever_its_severity() -> None:
    for number, action in xid_actions().items():
        if action in ("RESTART_APP", "IGNORE") or number in (13, 31, 43, 45):
            meaning = meaning_of(LogEvent(code=f"xid:{number}", severity="critical"))
            assert meaning is not None
            assert meaning.kind == "suspect_code", number


def test_a_storm_of_one_code_is_said_once_a_minute_for_each_device() -> None:
    storm = {second: [(2, "xid:79", {"pci": f"0000:{second % 2}b:00"}, -1)] for second in range(5, 50)}
    detector = CodeDetector()
    frames = SyntheticCluster(seed=1).frames(50, lambda second: Scene(log_events=storm.get(second, [])))
    verdicts = [v for frame in frames for v in detector.update(frame)]
    assert [v.kind for v in verdicts] == ["fatal_code"] * 2
    assert {v.entity.name for v in verdicts} == {"n2"}
    assert {v.job for v in verdicts} == {"synthetic"}


def test_memory_of_what_was_said_is_bounded() -> None:
    detector = CodeDetector()
    for number in range(6000):
        event = LogEvent(node=f"n{number}", code="xid:79", severity="critical", observed_at_ns=number)
        detector.update(Frame(number, (), (), (event,), Topology()))
    assert len(detector.snapshot()) < 4096 * 40


def test_a_refused_save_means_nothing_by_itself() -> None:
    assert meaning_of(LogEvent(code="save_refused", severity="warning")) is None
