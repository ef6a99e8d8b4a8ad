"""Captured nodes and pages as `trainwarden collect --once --root` sees them, and captured logs, against what was read and agreed.

`TRAINWARDEN_GOLDEN=write pytest tests/collectors/test_golden.py` writes the texts anew; the difference is to be read against the capture.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.collectors.golden import CAPTURES, LOGS, Capture, look, told, told_of_log
from tests.collectors.kit import FIXTURES

GOLDEN = FIXTURES / "golden"
HEAD = "# what the sources make of this capture; see tests/collectors/test_golden.py before changing it\n"
WRITE = os.environ.get("TRAINWARDEN_GOLDEN") == "write"


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: capture.name)
def test_a_captured_node_is_seen_as_was_agreed(capture: Capture, tmp_path: Path) -> None:
    agreed(capture.name, told(look(capture, tmp_path)))


@pytest.mark.parametrize("log", LOGS, ids=lambda log: Path(log).stem)
def test_a_captured_log_is_read_as_was_agreed(log: str) -> None:
    agreed(f"log-{Path(log).stem}", told_of_log(FIXTURES / log))


def test_every_golden_text_has_its_capture() -> None:
    names = {capture.name for capture in CAPTURES} | {f"log-{Path(log).stem}" for log in LOGS}
    assert {path.stem for path in GOLDEN.glob("*.txt")} == names


def agreed(name: str, seen: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if WRITE:
        path.write_text(HEAD + seen, encoding="utf-8")
    assert HEAD + seen == path.read_text(encoding="utf-8"), f"{path}: if the new one is right, write it (see above)"
