"""The cost benchmark measures every step detector (its figures are not judged here: machines differ)."""

from __future__ import annotations

import math

from benchmarks import detect_cost_steps


def test_every_detector_of_the_family_is_measured() -> None:
    found = detect_cost_steps.measure(ranks=128, ticks=4, warm_ticks=4)
    names = {f"{kind.name}_ms" for kind in detect_cost_steps.detectors()}
    assert (
        {"straggler_ms", "hang_ms", "corruption_ms", "imbalance_ms", "loss_spike_ms", "checkpoint_stall_ms"}
        <= names
        <= set(found)
    )
    assert all(math.isfinite(value) and value >= 0 for value in found.values())
    assert found["all_ms"] > 0


def test_the_large_job_is_healthy() -> None:
    detectors = [kind() for kind in detect_cost_steps.detectors()]
    frames = list(detect_cost_steps.frames(ranks=256, ticks=60))
    assert [v.text for frame in frames for detector in detectors for v in detector.update(frame)] == []
