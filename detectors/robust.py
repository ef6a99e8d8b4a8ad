"""Robust statistics that treat NaN as absent, fast on many short series."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def median_of_known(values: NDArray[Any]) -> NDArray[Any]:
    """Median of each column over its known entries; NaN for a column without any.

    Unlike `numpy.nanmedian` it is silent about empty columns.

    Examples
    --------
    >>> median_of_known(np.array([[1.0, np.nan], [2.0, np.nan], [np.nan, np.nan]]))
    array([1.5, nan])
    """
    if not values.shape[0]:
        return np.full(values.shape[1], np.nan)
    ordered = np.sort(values, axis=0)
    count = len(ordered)
    if np.isfinite(ordered[-1]).all() and np.isfinite(ordered[0]).all():  # what is not known is sorted to the ends
        return np.asarray((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)
    known = np.isfinite(ordered).sum(axis=0)
    low, high = np.maximum((known - 1) // 2, 0), np.minimum(known // 2, count - 1)
    columns = np.arange(values.shape[1])
    return np.asarray(np.where(known > 0, (ordered[low, columns] + ordered[high, columns]) / 2, np.nan))
