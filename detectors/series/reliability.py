"""How often a foretelling came true: an explicit table from what was seen to a probability."""

from __future__ import annotations

from detectors.series.watch import Law

NEAR, FAR = 0.1, 0.4
"""Limits of the bins, as (time to the limit) / (horizon)."""

RELIABILITY: dict[Law, tuple[float, float, float]] = {
    Law.RATE: (0.85, 0.45, 0.25),
    Law.TOTAL: (0.85, 0.45, 0.25),
    Law.TREND: (0.85, 0.62, 0.65),
}
"""Law → share of foretellings whose limit was reached within the horizon, by near, middle and far limit.

Origin: simulated fleets of 32 nodes (`benchmarks/foretell.py`, seeds 0-2 and 40-44), in which a third of all trends stalls before its
limit; 76 foretellings, one pseudo-observation of each outcome added where there were few. TOTAL is taken like RATE. A real fleet whose
trends stall more or less often needs its own table: fit it from what its verdicts came to."""


def probability(law: Law, time_s: float, horizon_s: float) -> float:
    """Probability that the limit is reached within the horizon.

    Examples
    --------
    >>> probability(Law.TREND, 60.0, 21600.0) == RELIABILITY[Law.TREND][0]
    True
    """
    share = time_s / horizon_s
    return RELIABILITY[law][0 if share < NEAR else 1 if share < FAR else 2]
