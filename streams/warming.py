"""How much of what the detectors follow they judge already, as gauges: whoever warms up says so, and silence is not taken for health."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from detectors.base import Detector
from trainwarden.clock import NS_PER_S
from trainwarden.selfmetrics import Metrics

log = logging.getLogger(__name__)

EVERY_NS = 10 * NS_PER_S


class Warming:
    """Sets `tw_judged_ratio` from what detectors say of themselves, every ten seconds of the frames' own time."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._next_ns = 0
        self._told: frozenset[tuple[str, str]] = frozenset()
        self._mute: set[str] = set()

    def look(self, now_ns: int, detectors: Mapping[str, Detector]) -> None:
        """Ask these detectors, unless they were asked just now; further back than that the clock was set."""
        if self._next_ns - EVERY_NS <= now_ns < self._next_ns:
            return
        self._next_ns = now_ns + EVERY_NS
        shares = {
            (name, part): judged / followed
            for name, detector in detectors.items()
            for part, (judged, followed) in self._asked(name, detector).items()
            if followed
        }
        if self._told - shares.keys():
            self._metrics.forget("tw_judged_ratio")
        self._told = frozenset(shares)
        for (name, part), share in shares.items():
            self._metrics.set("tw_judged_ratio", share, detector=name, part=part)

    def _asked(self, name: str, detector: Detector) -> dict[str, tuple[int, int]]:
        try:
            return detector.coverage()
        except Exception as error:  # noqa: BLE001 - foreign code: what it cannot say of itself is no reason to stop it
            self._metrics.count("tw_detector_errors_total", detector=name)
            if name not in self._mute:
                log.warning("detector %s cannot say what it judges: %r", name, error)
                self._mute.add(name)
            return {}
