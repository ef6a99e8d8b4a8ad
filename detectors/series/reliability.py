"""How often a foretelling came true: an explicit table from what was seen to a probability."""

from __future__ import annotations

from detectors.series.watch import Law

NEAR, FAR = 0.1, 0.4
"""Limits of the bins, as (time to the limit) / (horizon)."""

RELIABILITY: dict[Law, tuple[float, float, float]] = {
    Law.RATE: (0.9, 0.8, 0.6),
    Law.TOTAL: (0.9, 0.8, 0.6),
    Law.TREND: (0.9, 0.7, 0.5),
}
"""Law → share of foretellings whose limit was reached within the horizon, by near, middle and far limit."""


def probability(law: Law, time_s: float, horizon_s: float) -> float:
    """Probability that the limit is reached within the horizon.

    Examples
    --------
    >>> probability(Law.TREND, 60.0, 21600.0) == RELIABILITY[Law.TREND][0]
    True
    """
    share = time_s / horizon_s
    return RELIABILITY[law][0 if share < NEAR else 1 if share < FAR else 2]
