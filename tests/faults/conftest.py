"""Helpers with assertions say what they found."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.faults.theatre")
