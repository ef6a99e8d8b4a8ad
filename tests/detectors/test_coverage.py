"""Detectors that warm up say how far they are, and the same after a restart."""

from __future__ import annotations

import pytest

from detectors.base import Detector, registry
from detectors.contract import healthy, run

WARMING = [kind for kind in registry().all().values() if kind.coverage is not Detector.coverage]
WARM_IN_TWO_MINUTES = {"dynamic_threshold", "mesh_links", "straggler", "imbalance"}


def test_who_has_a_warm_up() -> None:
    assert {kind.name for kind in WARMING} >= WARM_IN_TWO_MINUTES | {
        "series_residual",
        "seasonal_band",
        "foretell",
        "loss_spike",
    }


@pytest.mark.parametrize("kind", WARMING, ids=lambda kind: kind.name)
def test_nothing_is_judged_at_first_and_the_rest_is_told(kind: type[Detector]) -> None:
    frames, detector = healthy(seconds=120), kind()
    assert sum(followed for _, followed in detector.coverage().values()) == 0
    run(detector, frames[:6])
    assert sum(judged for judged, _ in detector.coverage().values()) == 0
    run(detector, frames[6:])
    told = detector.coverage()
    assert all(0 <= judged <= followed for judged, followed in told.values())
    if kind.name in WARM_IN_TWO_MINUTES:
        assert all(judged == followed > 0 for judged, followed in told.values()), told
    restored = kind()
    restored.restore(detector.snapshot())
    assert restored.coverage() == told
