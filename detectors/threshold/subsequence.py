"""How unlike the past a window of one long series is: PCA of windows, learnt as it goes.

Windows are held against the principal components of all windows before them, each direction in units of its own spread, so that small
directions (new shapes) count as much as large ones. This is Sub-PCA as TSB-AD scores it (sum of squared projections over eigenvalues;
Aggarwal, "Outlier analysis", 2017), made online: the second moments of windows are summed as they end, and the components are drawn anew
every hundred samples, so memory and time per sample are constant.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

F64 = NDArray[np.float64]
SHORTEST, LONGEST = 10, 100
_CHUNK = 100
_LEAST_SHARE = 1e-3


class WindowModel:
    """Running mean and covariance of windows of `width` samples, and distances from them."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = 0
        self.total = np.zeros(width)
        self.products = np.zeros((width, width))

    def learn(self, windows: F64) -> None:
        """Take windows in, [n, width]."""
        self.count += len(windows)
        self.total += windows.sum(axis=0)
        self.products += windows.T @ windows

    def distance(self, windows: F64) -> F64:
        """Root mean square of a window's projections, each in units of its component's spread: about 1 for a usual window."""
        mean = self.total / max(self.count, 1)
        covariance = self.products / max(self.count, 1) - np.outer(mean, mean)
        spread = np.sqrt(np.maximum(np.diag(covariance), 0.0)) + 1e-9
        sizes, directions = np.linalg.eigh(covariance / np.outer(spread, spread))
        sizes = np.maximum(sizes, _LEAST_SHARE * max(float(sizes[-1]), 1e-9))
        projected = ((windows - mean) / spread) @ directions
        return np.asarray(np.sqrt((projected**2 / sizes).mean(axis=1)))


def window_distance(values: F64, known: int, width: int) -> F64:
    """Distance of the window that ends at each row after the first `known` from all windows before it.

    Online up to chunks: what a row is held against ends at the last full hundred rows before it.

    Parameters
    ----------
    values
        One series, equally spaced, no NaN.
    known
        Rows of history, at least `width` + 1.
    width
        Samples per window.
    """
    middle, size = float(np.mean(values[:known])), float(np.std(values[:known])) or 1.0
    windows = sliding_window_view((values - middle) / size, width)
    model, out = WindowModel(width), np.zeros(len(values))
    learnt = 0
    for start in range(known, len(values), _CHUNK):
        ended = start - width + 1
        model.learn(windows[learnt:ended])
        learnt = ended
        scored = windows[ended : ended + _CHUNK]
        out[start : start + len(scored)] = model.distance(scored)
    return out[known:]
