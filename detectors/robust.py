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
    if _ends_known(ordered, 0):
        return np.asarray((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)
    known = np.isfinite(ordered).sum(axis=0)
    low, high = np.maximum((known - 1) // 2, 0), np.minimum(known // 2, count - 1)
    columns = np.arange(values.shape[1])
    return np.asarray(np.where(known > 0, (ordered[low, columns] + ordered[high, columns]) / 2, np.nan))


def medians_of_known(values: NDArray[Any]) -> NDArray[Any]:
    """`median_of_known` of each of several groups of as many rows: groups × rows × columns, at least one row, to groups × columns.

    Examples
    --------
    >>> medians_of_known(np.array([[[1.0, np.nan], [2.0, 3.0]], [[np.nan, 5.0], [np.nan, 7.0]]]))
    array([[1.5, 3. ],
           [nan, 6. ]])
    """
    ordered = np.sort(values, axis=1)
    count = ordered.shape[1]
    if _ends_known(ordered, 1):
        return np.asarray((ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2)
    known = np.isfinite(ordered).sum(axis=1, keepdims=True)
    low, high = np.maximum((known - 1) // 2, 0), np.minimum(known // 2, count - 1)
    middle = (np.take_along_axis(ordered, low, axis=1) + np.take_along_axis(ordered, high, axis=1)) / 2
    return np.asarray(np.where(known > 0, middle, np.nan)[:, 0])


def _ends_known(ordered: NDArray[Any], axis: int) -> bool:
    """Whether sorted values are all known: what is not is sorted to the ends."""
    return bool(np.isfinite(ordered.take(-1, axis)).all() and np.isfinite(ordered.take(0, axis)).all())
