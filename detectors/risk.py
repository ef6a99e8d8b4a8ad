"""How much false alarm the whole cluster may have, and how it is spent over detectors, series and time.

The operator's number is *false incidents per day for the whole cluster*. Expected counts add up whatever the dependence between series,
so that number is split evenly (Bonferroni's bound on the expected number of false rejections, Šidák 1967 for its probability; no
independence is assumed). Schemes that spend a false *discovery* rate online (LORD, Javanmard and Montanari 2018; SAFFRON, Ramdas et
al. 2018) are not used: in a healthy cluster every discovery is false, so they may speak with probability alpha once and for ever, and
what is left for a series after a day is nothing.

One series of one tick gets about 4e-11 of one false incident a day on 10,000 GPUs × 30 metrics, far beyond any tail that history can
support. Persistence makes it reachable: an excess must last `run_ticks` ticks, and the risk of one tick is then the root of it, corrected
for excesses that come in runs (`Clustering`). What no model foresees is caught by what has really been spoken (`Spending`).

Where it is held: `streams.budget` spends the purses (`Spending`) where incidents are opened, so that the bound does not hang on what
detectors believe of themselves. Their own risks are set by hand and stated per node and day.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainwarden.clock import NS_PER_S

DAY_S = 86400.0
DETECTOR_SHARES = {"threshold": 0.22, "series": 0.22, "steps": 0.24, "mesh": 0.15, "rules": 0.10, "relation": 0.07}
"""Parts of the budget by family of detectors; they add up to one."""


@dataclass(frozen=True)
class Line:
    """What a threshold must keep: an excess with probability `risk_per_tick` in one tick counts once it has lasted `run_ticks` ticks."""

    risk_per_tick: float
    run_ticks: int


def family_budget(family: str, false_incidents_per_day: float = 1.0) -> float:
    """False incidents per day that a family of detectors may have.

    Raises
    ------
    KeyError
        The family has no share.
    """
    return DETECTOR_SHARES[family] * false_incidents_per_day


def risk_per_tick(
    budget_per_day: float, series: int, interval_s: float = 1.0, run_ticks: int = 1, clustering: float = 0.0
) -> float:
    """Probability with which one healthy series may be beyond its line in one tick.

    Parameters
    ----------
    budget_per_day
        False incidents a day for all `series` together.
    series
        Live series that are tested each tick; 0 counts as 1.
    run_ticks
        Ticks that an excess must last before it counts.
    clustering
        Probability that an excess is followed by another (`Clustering.value`); 0 = no more often than by chance.

    Examples
    --------
    >>> f"{risk_per_tick(1.0, 300_000):.1e}"
    '3.9e-11'
    >>> f"{risk_per_tick(1.0, 300_000, run_ticks=5):.1e}"
    '8.3e-03'
    >>> f"{risk_per_tick(1.0, 300_000, run_ticks=10, clustering=0.2):.1e}"
    '7.5e-05'
    """
    run_risk = min(budget_per_day * interval_s / (DAY_S * max(series, 1)), 1.0)
    by_chance = float(run_risk ** (1.0 / run_ticks))
    if by_chance >= clustering or run_ticks == 1:
        return by_chance
    return min(run_risk / clustering ** (run_ticks - 1), clustering)


def line_for(budget_per_day: float, series: int, interval_s: float = 1.0, clustering: float = 0.0, supported_risk: float = 1e-3,
             most_ticks: int = 60) -> Line:  # fmt: skip
    """The shortest persistence with which the risk of one tick is no smaller than history supports.

    Parameters
    ----------
    supported_risk
        Smallest tail probability that the samples behind a threshold can tell: about ten divided by their number.
    most_ticks
        Persistence is never longer; then the risk is what it must be.

    Examples
    --------
    >>> line_for(1.0, 300_000).run_ticks
    4
    >>> line_for(1.0, 300_000, clustering=0.5).run_ticks
    26
    """
    for run_ticks in range(1, most_ticks):
        risk = risk_per_tick(budget_per_day, series, interval_s, run_ticks, clustering)
        if risk >= supported_risk:
            return Line(risk, run_ticks)
    return Line(risk_per_tick(budget_per_day, series, interval_s, most_ticks, clustering), most_ticks)


def tail_line(scores: NDArray[np.float64], risk: float, tail_share: float = 0.01) -> float:
    """The value that a score exceeds with probability `risk`, from scores pooled over alike series.

    Within the sample it is the quantile; beyond, the tail is taken to fall like a power (Hill's estimator over the highest `tail_share`),
    with three standard errors on the safe side: for lighter tails the line is too high, never too low.

    Parameters
    ----------
    scores
        Healthy scores ≥ 0, NaN = absent, any shape.

    Raises
    ------
    ValueError
        Fewer than 1,000 scores.
    """
    known = scores[np.isfinite(scores)]
    if known.size < 1000:
        raise ValueError(f"{known.size} scores do not tell a tail: expected at least 1000")
    ordered = np.sort(known)
    count = max(int(tail_share * known.size), 50)
    start, excess = float(ordered[-count - 1]), ordered[-count:]
    if risk * known.size >= 100:
        return float(ordered[-max(int(risk * known.size), 1)])
    start = max(start, 1e-12)
    shape = float(np.mean(np.log(np.maximum(excess, start) / start)))
    return float(start * (count / known.size / risk) ** (shape * (1.0 + 3.0 / math.sqrt(count))))


class Clustering(msgspec.Struct):
    """How often an excess is followed by another in the same series, pooled over series, with an upper bound while little was seen."""

    after_excess: float = 0.0
    followed: float = 0.0

    def see(self, before: NDArray[np.bool_], now: NDArray[np.bool_], memory: float = 1e5) -> None:
        """Two consecutive ticks of the same series; about `memory` excesses are remembered."""
        self.after_excess += float(before.sum())
        self.followed += float((before & now).sum())
        if self.after_excess > memory:
            self.followed *= memory / self.after_excess
            self.after_excess = memory

    @property
    def value(self) -> float:
        """Probability, two standard errors on the safe side; 0.5 while nothing is known."""
        share = (self.followed + 1.0) / (self.after_excess + 2.0)
        return (
            min(share + 2.0 * math.sqrt(share * (1.0 - share) / (self.after_excess + 2.0)), 0.99)
            if self.after_excess
            else 0.5
        )


class Spending(msgspec.Struct):
    """What was really spoken, against the budget: a purse that fills by `budget_per_day` and holds at most `capacity` opinions.

    Whatever the noise is like, no more than ``capacity + budget × days`` opinions are said. An opinion that proved true is given back,
    so that a day of real faults does not silence the detector.
    """

    budget_per_day: float
    capacity: float = 3.0
    purse: float = -1.0
    filled_ns: int = 0
    said: float = 0.0
    held: int = 0

    def admit(self, at_ns: int) -> bool:
        """Whether one more opinion may be said now; if not, it is counted in `held`."""
        self._fill(at_ns)
        if self.purse < 1.0:
            self.held += 1
            return False
        self.purse -= 1.0
        self.said += 1.0
        return True

    def confirm(self) -> None:
        """An opinion was true: it cost nothing."""
        self.purse = min(self.purse + 1.0, self.capacity)

    def factor(self, at_ns: int) -> float:
        """By how much risk must shrink: 1 while the purse is at least half full, falling to 0.01 as it empties."""
        self._fill(at_ns)
        return float(min(1.0, 10.0 ** (-2.0 * (1.0 - 2.0 * self.purse / self.capacity))))

    def _fill(self, at_ns: int) -> None:
        if self.purse < 0:
            self.purse, self.filled_ns = self.capacity, at_ns
        elapsed_s = max(0.0, (at_ns - self.filled_ns) / NS_PER_S)
        self.purse = min(self.purse + elapsed_s / DAY_S * self.budget_per_day, self.capacity)
        self.filled_ns = max(at_ns, self.filled_ns)


# --- what was promised ---------------------------------------------------------------------------------------------------------


def promised_per_day(rates_per_node_day: dict[str, float], nodes: int) -> float:
    """False incidents a day that the stated rates of detectors add up to on `nodes` nodes."""
    return sum(rates_per_node_day.values()) * nodes


def poisson_at_least(count: int, mean: float) -> float:
    """Probability of `count` or more events where `mean` are expected.

    Examples
    --------
    >>> round(poisson_at_least(1, 0.01), 5)
    0.00995
    >>> poisson_at_least(0, 0.0)
    1.0
    """
    if count <= 0:
        return 1.0
    if mean <= 0:
        return 0.0
    below = sum(math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(count))
    return max(0.0, 1.0 - below)


# --- calibration ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReliabilityBin:
    """Opinions of like confidence: how sure they were, how often they were right, and the 95 % interval of that (Wilson)."""

    low: float
    high: float
    count: int
    confidence: float
    right: float
    right_low: float
    right_high: float


def reliability(confidence: Sequence[float], right: Sequence[bool], bins: int = 10) -> list[ReliabilityBin]:
    """Reliability table; bins without an opinion are left out.

    Examples
    --------
    >>> [(b.count, b.right) for b in reliability([0.9, 0.9, 0.2], [True, False, False], bins=2)]
    [(1, 0.0), (2, 0.5)]
    """
    sure, truth = np.asarray(confidence, dtype=np.float64), np.asarray(right, dtype=np.bool_)
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.digitize(sure, edges[1:-1]), 0, bins - 1)
    return [
        _bin(edges[i], edges[i + 1], sure[place == i], truth[place == i]) for i in range(bins) if (place == i).any()
    ]


def brier(confidence: Sequence[float], right: Sequence[bool]) -> float:
    """Mean squared distance of confidence from outcome; 0 is perfect, 0.25 is a coin. NaN without opinions."""
    sure, truth = np.asarray(confidence, dtype=np.float64), np.asarray(right, dtype=np.float64)
    return float(np.mean((sure - truth) ** 2)) if sure.size else math.nan


def calibration_error(table: Sequence[ReliabilityBin]) -> float:
    """Mean distance of confidence from share right, weighted by count; NaN for an empty table."""
    total = sum(row.count for row in table)
    return sum(row.count * abs(row.confidence - row.right) for row in table) / total if total else math.nan


def _bin(low: float, high: float, sure: NDArray[np.float64], truth: NDArray[np.bool_]) -> ReliabilityBin:
    count, share = truth.size, float(truth.mean())
    centre, spread, scale = (
        share + 1.92 / count,
        1.96 * math.sqrt(share * (1 - share) / count + 0.9604 / count**2),
        1 + 3.8416 / count,
    )
    return ReliabilityBin(
        float(low), float(high), count, float(sure.mean()), share, (centre - spread) / scale, (centre + spread) / scale
    )
