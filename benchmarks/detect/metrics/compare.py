"""Is one method better than another on the same series? Paired bootstrap interval and Wilcoxon's signed-rank test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.detect.methods.base import F64

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Paired:
    """Mean of (ours - theirs) over the series, its 95 % bootstrap interval, and the two-sided p of the signed-rank test."""

    mean: float
    low: float
    high: float
    p: float
    series: int


def paired(ours: F64, theirs: F64, seed: int = 0) -> Paired:
    """Compare two methods series by series; both arrays in the same order, without NaN."""
    difference = ours - theirs
    draws = np.random.default_rng(seed).integers(0, len(difference), (RESAMPLES, len(difference)))
    means = difference[draws].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Paired(float(difference.mean()), float(low), float(high), signed_rank_p(difference), len(difference))


def signed_rank_p(difference: F64) -> float:
    """Two-sided p of Wilcoxon's test; 1 when every pair is equal."""
    from scipy.stats import wilcoxon

    return float(wilcoxon(difference).pvalue) if np.any(difference) else 1.0
