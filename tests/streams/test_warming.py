"""What detectors say of their own warm-up, as gauges."""

from __future__ import annotations

from detectors.base import Detector, Frame
from streams.warming import EVERY_NS, Warming
from trainwarden.records import Verdict
from trainwarden.selfmetrics import Metrics


class Told(Detector):
    """Says what it is told to say."""

    name = "told"

    def __init__(self, parts: dict[str, tuple[int, int]] | None) -> None:
        super().__init__()
        self.parts, self.asked = parts, 0

    def update(self, frame: Frame) -> list[Verdict]:
        return []

    def snapshot(self) -> bytes:
        return b""

    def restore(self, payload: bytes) -> None:
        del payload

    def coverage(self) -> dict[str, tuple[int, int]]:
        self.asked += 1
        if self.parts is None:
            raise RuntimeError("lost count")
        return self.parts


def test_shares_are_gauges_and_what_is_over_is_dropped() -> None:
    metrics, detector = Metrics("worker"), Told({"gpu": (1, 4), "nic": (0, 0), "jobs": (0, 2)})
    warming = Warming(metrics)
    warming.look(0, {"told": detector})
    assert metrics.value("tw_judged_ratio", detector="told", part="gpu") == 0.25
    assert 'part="jobs"' in metrics.page()
    assert 'part="nic"' not in metrics.page(), "nothing of it is followed"
    detector.parts = {"gpu": (4, 4)}
    warming.look(EVERY_NS - 1, {"told": detector})
    assert detector.asked == 1, "not before ten seconds have passed"
    warming.look(EVERY_NS, {"told": detector})
    assert metrics.value("tw_judged_ratio", detector="told", part="gpu") == 1.0
    assert 'part="jobs"' not in metrics.page()
    warming.look(0, {"told": detector})
    assert detector.asked == 3, "a clock that was set back is followed"


def test_a_detector_that_cannot_say_is_counted_and_hides_nobody() -> None:
    metrics = Metrics("worker")
    Warming(metrics).look(0, {"broken": Told(None), "told": Told({"gpu": (2, 4)})})
    assert metrics.value("tw_detector_errors_total", detector="broken") == 1
    assert metrics.value("tw_judged_ratio", detector="told", part="gpu") == 0.5
