"""Season of one long series: the period found by autocorrelation on a budget, and what the same phase of past periods explains.

The expectation is the median over the last periods and the neighbouring phases, a non-local filter (the seasonal part of RobustSTL; Wen et
al., AAAI 2019, without its trend), so neither an anomaly of yesterday nor a shift by a sample leaves an echo.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
SHORTEST = 24
_LEAST_CORRELATION = 0.3
_SEARCHED, _SEARCH_EVERY, _CHUNK = 4000, 2, 100
_PERIODS, _NEIGHBOURS = 6, (-2, -1, 0, 1, 2)
_SCALED_OVER = 3000
_LEAST_SCALE_OF_RANGE = 0.05
_MAD_TO_SIGMA = 1.4826


def find_period(values: F64) -> int:
    """Period of a series in samples, 0 when it has none.

    The largest autocorrelation after its first fall below zero, of values clipped at three standard deviations; at most half the
    length, so that at least two periods support it.

    Examples
    --------
    >>> find_period(np.sin(np.arange(600) * 2 * np.pi / 48))
    48
    """
    spread = values.std()
    longest = len(values) // 2
    if not spread or longest <= SHORTEST:
        return 0
    correlation = autocorrelation(np.clip((values - values.mean()) / spread, -3, 3))[:longest]
    below = np.flatnonzero(correlation < 0)
    first = max(SHORTEST, int(below[0])) if len(below) else longest
    if first >= longest:
        return 0
    best = first + int(np.argmax(correlation[first:]))
    return best if correlation[best] >= _LEAST_CORRELATION else 0


def autocorrelation(values: F64) -> F64:
    """Unbiased autocorrelation at each lag, by FFT."""
    count = len(values)
    spectrum = np.fft.rfft(values, 2 * count)
    products = np.fft.irfft(spectrum * np.conj(spectrum))[:count]
    return np.asarray(products / (products[0] or 1.0) * count / (count - np.arange(count)))


def seasonal_distance(values: F64, known: int) -> F64:
    """Distance of each value after the first `known` from what its season explains, in its usual size.

    Online: the distance at row t depends on rows up to t only. The period is sought anew every 200 rows in the last 4,000; without one
    the median of the past takes its place.

    Parameters
    ----------
    values
        One series, equally spaced, no NaN.
    known
        Rows of history that are not scored, at least 1.

    Returns
    -------
    F64
        One distance (≥ 0) per row after `known`.
    """
    residual, out = np.zeros(len(values)), np.zeros(len(values))
    period = 0
    for number, start in enumerate(range(known, len(values), _CHUNK)):
        rows = np.arange(start, min(start + _CHUNK, len(values)))
        if number % _SEARCH_EVERY == 0:
            period = find_period(values[max(0, start - _SEARCHED) : start])
        if number == 0:
            residual[:known] = _first_residuals(values[:known], period)
        past = values[:start]
        expected = _past_periods(values, rows, period) if period else np.full(len(rows), np.median(past))
        residual[rows] = values[rows] - expected
        out[rows] = np.abs(residual[rows]) / _scale(residual[max(0, start - _SCALED_OVER) : start], past)
    return out[known:]


def _first_residuals(values: F64, period: int) -> F64:
    if not period:
        return np.asarray(values - np.median(values))
    return np.concatenate([np.zeros(period), values[period:] - values[:-period]])


def _past_periods(values: F64, rows: NDArray[np.int64], period: int) -> F64:
    """Median over the same phase (and its neighbours) of the last periods, from rows before the first of `rows` only."""
    start = rows[0]
    back = [
        rows - count * period + near for count in range(1, min(_PERIODS, start // period) + 1) for near in _NEIGHBOURS
    ]
    at = np.array(back)
    usable = (at >= 0) & (at < start)
    found = np.where(usable, values[np.clip(at, 0, start - 1)], np.nan)
    none = ~usable.any(axis=0)
    found[0, none] = np.median(values[:start])
    return np.asarray(np.nanmedian(found, axis=0))


def _scale(residual: F64, past: F64) -> float:
    """Usual size of a residual; at least a twentieth of the usual range of values."""
    size = np.abs(residual)
    usual = _MAD_TO_SIGMA * float(np.median(size)) or float(size.std()) or 1.0
    low, high = np.percentile(past, [5, 95])
    return max(usual, _LEAST_SCALE_OF_RANGE * float(high - low), 1e-9)
