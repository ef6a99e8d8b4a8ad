"""Numbers out of foreign text never raise, and a detector fed with odd ones goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.mesh.pace import Pace, PaceLimits
from detectors.numbers import whole_number
from detectors.steps.exits import UNKNOWN_CODE, parse_exit
from trainwarden.records import LogEvent, StepRow


@given(st.text())
def test_any_text_is_a_number_or_none(text: str) -> None:
    assert isinstance(whole_number(text, -7), int)


@given(st.integers(-(10**17), 10**17))
def test_numbers_are_themselves(number: int) -> None:
    assert whole_number(str(number), -7) == number


@pytest.mark.parametrize("odd", ["²", "9" * 5000, "--1", "-", "", "1_000", "٣"])
def test_an_exit_with_odd_numbers_is_an_exit_of_which_little_is_known(odd: str) -> None:
    event = LogEvent(node="n0", code=f"worker_exit:{odd}", rank=3, attributes={"rank": odd})
    found = parse_exit(event, 1)
    assert found is not None
    assert (found.code, found.rank) == (UNKNOWN_CODE, 3)


@pytest.mark.parametrize("duration_ms", [float("inf"), float("nan"), 1e308])
def test_a_step_of_no_length_teaches_nothing(duration_ms: float) -> None:
    pace = Pace()
    pace.take([StepRow(1, "train", 0, duration_ms)], PaceLimits(1.5, 100.0, 30.0))
    assert pace.newest_ms == []
