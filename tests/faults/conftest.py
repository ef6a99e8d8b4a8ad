"""Fault tests. Those that hurt whole clusters are marked `faults`: `make test-faults` runs them, alone on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.faults.theatre")

QUICK = frozenset({"test_misuse.py"})
"""What `make test` runs of this folder, too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under this folder but the quick files is a fault test."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.path.name not in QUICK:
            item.add_marker(pytest.mark.faults)
