"""Making the lines cheaper must not change what they say: opinions on a seeded stream with faults, gaps and departures, as before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.detect_cost import Cluster
from detectors.base import AlignedTick, Detector, FamilyMatrix, Frame
from detectors.threshold.dynamic import ThresholdDetector
from detectors.threshold.stale import StaleSeriesDetector

NODES, TICKS, YOUNG = 12, 420, 60
OPINIONS = {"dynamic_threshold": (72, "8bdab80b9258f1cf"), "stale_series": (10, "1eef55b0cfa2f1bb")}
"""Number and hash of (kind, entity, onset, end, clears, detector's reading to three digits)."""


def _bent(matrix: FamilyMatrix, number: int, rng: np.random.Generator) -> FamilyMatrix:
    """The same with what may happen to series: gaps, columns never reported, outliers, shifts, frozen values, a job that stops."""
    values = matrix.values.copy()
    rows, columns = values.shape
    values[rng.random(values.shape) < 0.002] = np.nan
    if matrix.family != "process":
        values[:, 2 % columns] = np.nan
    if matrix.family == "gpu":
        values[:, 3] = number * 10.0 + np.arange(rows)
        values[6, 3] -= 3000.0 if number > 350 else 0.0
        values[7, 4:8] = 1.25 if number > 200 else values[7, 4:8]
    if number % 60 > 35:
        values[number // 60 * 5 % rows] *= np.float32(1.7)
    if number > 240:
        values[2 % rows, columns // 2] *= np.float32(1.08)
    if 260 < number < 300:
        values[3 % rows, -1] = 7.0
    if number > 280 and matrix.family == "host":
        values[4, 5] = 0.43
    if 330 < number < 360:
        values *= np.float32(0.4)
    if matrix.family == "process" and 300 < number < 390:
        values[:, 6] = number // 30 % 3
    kept = slice(None) if not 100 < number < 130 else slice(0, rows * 3 // 4)
    return FamilyMatrix(matrix.family, matrix.entities[kept], matrix.metrics, values[kept])


def _frames() -> Iterator[Frame]:
    rng = np.random.default_rng(7)
    for number, frame in enumerate(Cluster(NODES, seed=3).frames(TICKS)):
        tick: AlignedTick = frame.ticks[0]
        families = {
            name: _bent(matrix, number, rng) if number > YOUNG else matrix for name, matrix in tick.families.items()
        }
        yield replace(frame, ticks=(replace(tick, families=families),), steps=())


def _told(detectors: list[Detector]) -> dict[str, tuple[int, str]]:
    said: dict[str, list[str]] = {detector.name: [] for detector in detectors}
    for frame in _frames():
        for detector in detectors:
            said[detector.name] += [
                f"{v.kind} {v.entity} {v.onset_at_ns} {v.window_end_ns} {v.clears} {v.score:.3g}"
                for v in detector.update(frame)
            ]
    return {name: (len(rows), hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]) for name, rows in said.items()}


def test_opinions_are_what_they_were() -> None:
    assert _told([ThresholdDetector(), StaleSeriesDetector()]) == OPINIONS
