"""Scores of one long series, with more effort per series than the live lines can spend on half a million.

Two uses of the same two distances (from the season, and from the shapes of past windows):

* `event_scores`: one report per event, as early as it stands out. Distances are turned into tail probabilities by the live `Lines`, so
  that one threshold fits all series; after a report only what is less likely still is reported again.
* `region_scores`: how unusual the last stretch is as a whole, for ranking stretches against each other.

Live, `dynamic_threshold` uses `Lines` alone on every series: half a million of them cost less a tick than one window model of each would.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from detectors.threshold.lines import Lines, LineSettings
from detectors.threshold.season import find_period, seasonal_distance
from detectors.threshold.subsequence import LONGEST, SHORTEST, window_distance

F64 = NDArray[np.float64]
_STRETCH_ROWS = 200
_FAR = 20.0
_SLOW = 0.002
_WARM_ROWS = 50
_FLOORS = np.array([0.01, 0.05, 0.05], np.float32)
_WEIGHTS = np.array([0.15, 0.5, 0.5])
"""Of the tail scores of the value itself, of its distance from the season, and of both distances."""


def distances(values: F64, known: int) -> tuple[F64, F64]:
    """Distance from the season and from past windows of each row after the first `known` (see there)."""
    period = find_period(values[:known]) or LONGEST
    width = int(np.clip(period, SHORTEST, min(LONGEST, max(known // 4, SHORTEST))))
    if known <= width:
        raise ValueError(f"{known} rows of history are given, at least {width + 1} are needed to know a usual window")
    return seasonal_distance(values, known), window_distance(values, known, width)


def region_scores(values: F64, known: int) -> F64:
    """How unusual the last 200 rows are, for each row after the first `known`."""
    season, shape = distances(values, known)
    return trailing_mean(np.minimum(season, _FAR) + np.minimum(shape, _FAR), _STRETCH_ROWS)


def event_scores(values: F64, known: int) -> F64:
    """How unlikely each row after the first `known` is, 0 where something as unlikely was reported within half a history."""
    season, shape = (np.log1p(distance) for distance in distances(values, known))
    low, high = np.percentile(values[:known], [5, 95])
    size = float(high - low) or float(np.std(values[:known])) or 1.0
    views = np.full((len(values), 3), np.nan)
    views[:, 0] = values / size
    views[known:, 1], views[known:, 2] = season, season + shape
    unlikely = tail_scores(views, _FLOORS, upper_only=np.array([False, True, True]))[known:]
    return not_yet_reported(season + shape + unlikely @ _WEIGHTS, max(known // 2, 1))


def tail_scores(views: F64, floor: NDArray[np.float32], upper_only: NDArray[np.bool_]) -> F64:
    """−log10 of the tail probability of each value given those before it, by `Lines` with slow forgetting; 0 while there is no line.

    Parameters
    ----------
    views
        Rows × series, NaN = missing.
    floor, upper_only
        Per series: its least spread, and whether low values score 0.
    """
    lines = Lines(
        1,
        views.shape[1],
        LineSettings(warm_ticks=_WARM_ROWS, forgetting=_SLOW, risk=1e-6, least_height=0.0),
        floor=floor,
    )
    out = np.zeros(views.shape)
    for number, value in enumerate(views.astype(np.float32)):
        low = upper_only & (value <= lines.state.places.place[0, 0])
        scores = lines.step(value[None], dense=True).scores
        if scores is not None:
            out[number] = np.where(low, 0.0, np.nan_to_num(scores[0]))
    return out


def trailing_mean(values: F64, rows: int) -> F64:
    """Mean of the last `rows` values at each row (of all there are, at the beginning)."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - rows, 0)
    return np.asarray((sums[end] - sums[start]) / (end - start))


def not_yet_reported(scores: F64, rows: int) -> F64:
    """Scores that are higher than all of the `rows` before them, 0 elsewhere.

    Examples
    --------
    >>> not_yet_reported(np.array([1.0, 3.0, 2.0, 3.0, 4.0]), 2).tolist()
    [1.0, 3.0, 0.0, 0.0, 4.0]
    """
    before = np.concatenate([np.zeros(rows), scores])
    highest = sliding_window_view(before, rows)[: len(scores)].max(axis=1)
    return np.asarray(np.where(scores > highest, scores, 0.0))
