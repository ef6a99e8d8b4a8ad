"""Every registered detector keeps the contract."""

from __future__ import annotations

import pytest

from detectors import contract
from detectors.base import Detector, registry

DETECTORS = registry().all()


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("detector", DETECTORS.values(), ids=DETECTORS)
def test_contract(detector: type[Detector], check: contract.Check) -> None:
    check(detector)


def test_a_detector_that_says_nothing_fails_the_contract() -> None:
    class Mute(DETECTORS["known_codes"]):  # type: ignore[misc,name-defined]
        name = "mute"

        def update(self, frame: object) -> list[object]:
            return []

    with pytest.raises(AssertionError, match="did not say fatal_code"):
        contract.fires_on_its_example(Mute)


def test_a_detector_with_hidden_state_fails_the_contract() -> None:
    class Forgetful(DETECTORS["straggler"]):  # type: ignore[misc,name-defined]
        name = "forgetful"

        def restore(self, payload: bytes) -> None:
            del payload

    with pytest.raises(AssertionError, match=r"differs after a restore|state after restores"):
        contract.snapshot_is_exact(Forgetful)
