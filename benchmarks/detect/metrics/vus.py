"""VUS-PR: volume under the precision-recall surface over buffer widths, as TSB-AD and the VUS package define it.

Paparrizos et al., "Volume Under the Surface" (VLDB 2022). Every labelled span gets buffers of w/2 rows on both sides whose label
falls off as sqrt(1 - distance / w); recall is damped by the share of (merged) buffered spans touched at all; 250 thresholds by rank;
the average precision is averaged over w = 0..L. Only the order of evaluation differs from the published code: a row enters the
sums once, at the first threshold it reaches, so the whole surface costs L passes over the buffers and none over the series.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.detect.data import Spans
from benchmarks.detect.methods.base import F64

THRESHOLDS = 250
LAGS = 400
FIRST_LAG = 3
ACF_ROWS = 20_000
LONGEST_PERIOD = 300
FALLBACK_PERIOD = 125

I64 = NDArray[np.int64]


def vus_pr(scores: F64, spans: Spans, width: int, thresholds: int = THRESHOLDS) -> float:
    """Mean over buffer widths 0..`width` of the range-based average precision; NaN when nothing is labelled."""
    if not spans:
        return float("nan")
    cut = np.linspace(0, len(scores) - 1, thresholds).astype(int)
    lines = -np.sort(-scores)[cut]
    reached = np.searchsorted(-lines, -scores, side="left")
    alarms = np.cumsum(np.bincount(reached, minlength=thresholds + 1))[:thresholds]
    label = np.zeros(len(scores), bool)
    for start, end in spans:
        label[start : end + 1] = True
    hits = counted(reached[label], np.ones(int(label.sum())), thresholds)
    surface = [
        average_precision(reached, label, spans, hits, alarms.astype(float), buffer) for buffer in range(width + 1)
    ]
    return float(np.mean(surface))


def average_precision(
    reached: I64, label: NDArray[np.bool_], spans: Spans, hits: F64, alarms: F64, buffer: int
) -> float:
    """Range-based average precision with one buffer width."""
    rows, weights = buffer_weights(label, spans, buffer)
    soft = counted(reached[rows], weights, len(alarms))
    positives = hits + soft
    recall = np.minimum(positives / (label.sum() + soft / 2), 1.0) * touched(reached, spans, buffer, len(alarms))
    return float(np.sum(np.diff(recall, prepend=0.0) * positives / alarms))


def counted(reached: I64, weights: F64, thresholds: int) -> F64:
    """Sum of weights of the rows at or above each threshold."""
    return np.asarray(np.cumsum(np.bincount(reached, weights, minlength=thresholds + 1))[:thresholds], np.float64)


def buffer_weights(label: NDArray[np.bool_], spans: Spans, buffer: int) -> tuple[I64, F64]:
    """Rows in the buffers but in no span, and their soft label."""
    reach = np.arange(1, buffer // 2 + 1)
    if not len(reach):
        return np.empty(0, np.int64), np.empty(0)
    near = np.sqrt(1 - reach / buffer)
    edges = np.array(spans)
    rows = np.concatenate([(edges[:, 1:] + reach).ravel(), (edges[:, :1] - reach).ravel()])
    weights = np.tile(near, 2 * len(spans))
    inside = (rows >= 0) & (rows < len(label))
    rows, weights = rows[inside], weights[inside]
    free = ~label[rows]
    places, at = np.unique(rows[free], return_inverse=True)
    return places, np.minimum(np.bincount(at, weights[free]), 1.0)


def touched(reached: I64, spans: Spans, buffer: int, thresholds: int) -> F64:
    """Share of the buffered spans, overlapping ones merged, with a row at or above each threshold."""
    merged = merge(spans, buffer // 2, len(reached))
    first = np.array([reached[start : end + 1].min() for start, end in merged])
    return counted(first, np.full(len(first), 1 / len(first)), thresholds)


def merge(spans: Spans, reach: int, rows: int) -> list[tuple[int, int]]:
    """Spans widened by `reach` rows on both sides; those that then touch become one."""
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and merged[-1][1] + reach >= start - reach:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return [(max(start - reach, 0), min(end + reach, rows - 1)) for start, end in merged]


def period(values: F64) -> int:
    """Buffer width L as TSB-AD sets it: the lag (up to 303) of the highest local maximum of the autocorrelation, else 125."""
    correlation = autocorrelation(values[:ACF_ROWS])[FIRST_LAG : LAGS + 1]
    inner = correlation[1:-1]
    peaks = np.flatnonzero((inner > correlation[:-2]) & (inner > correlation[2:])) + 1
    if not len(peaks):
        return FALLBACK_PERIOD
    best = int(peaks[::-1][np.argmax(correlation[peaks][::-1])])
    return best + FIRST_LAG if FIRST_LAG <= best <= LONGEST_PERIOD else FALLBACK_PERIOD


def autocorrelation(values: F64) -> F64:
    """Biased sample autocorrelation at every lag; zeros for a constant."""
    centred = values - values.mean()
    size = 1 << (2 * len(values) - 1).bit_length()
    power = np.abs(np.fft.rfft(centred, size)) ** 2
    covariance = np.fft.irfft(power, size)[: len(values)]
    return covariance / covariance[0] if covariance[0] > 0 else np.zeros(len(values))
