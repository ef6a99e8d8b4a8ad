"""Distance of each rank from the median of its peers, all ranks at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainwarden.topology import JobLayout

Floats = NDArray[np.float64]
Groups = list[NDArray[np.int64]]
"""Rank numbers of each group of peers."""


def excess_over_peers(values: Floats) -> Floats:
    """Each column's distance from the median of the *other* columns, row by row; NaN counts as absent.

    Parameters
    ----------
    values
        steps × ranks, NaN where unknown.

    Examples
    --------
    >>> excess_over_peers(np.array([[1.0, 1.0, 2.0, 9.0]]))
    array([[-1., -1.,  1.,  8.]])
    """
    result = np.full_like(values, np.nan)
    if values.shape[1] < 2:
        return result
    partial = np.isnan(values).any(axis=1)
    if not partial.all():
        result[~partial] = values[~partial] - _median_without_self(values[~partial])
    for row in np.flatnonzero(partial):
        known = np.isfinite(values[row])
        if known.sum() >= 2:
            result[row, known] = values[row, known] - _median_without_self(values[row, known][None, :])[0]
    return result


def excess_in_groups(values: Floats, groups: Groups) -> Floats:
    """`excess_over_peers` within each group of columns; columns in no group stay NaN."""
    if len(groups) == 1 and len(groups[0]) == values.shape[1]:
        return excess_over_peers(values)
    result = np.full_like(values, np.nan)
    for members in groups:
        result[:, members] = excess_over_peers(values[:, members])
    return result


def _median_without_self(values: Floats) -> Floats:
    """Median of the other columns. Only the order statistics around the middle are needed, so nothing is sorted in full."""
    count = values.shape[1]
    middle = (count - 1) // 2
    low, high = max(middle - 1, 0), min(middle + 1, count - 1)
    ordered = np.partition(values, sorted({low, middle, high}), axis=1)
    below, at, above = ordered[:, [low]], ordered[:, [middle]], ordered[:, [high]]
    if count % 2 == 0:
        return np.where(values <= at, above, at)
    return np.where(values < at, (at + above) / 2, np.where(values > at, (below + at) / 2, (below + above) / 2))


def is_pipelined(layout: JobLayout | None) -> bool:
    """Whether the job is known to have more than one stage."""
    parallel = layout.parallel if layout is not None else None
    return parallel is not None and parallel.stages > 1


def peer_groups(layout: JobLayout | None, nodes: list[str]) -> tuple[Groups, bool]:
    """Groups of peers among the ranks of a job, and whether anybody said that they do the same work.

    Peers on one node cannot tell a slow node, so the members of groups without two nodes are compared with each other; ranks are told apart
    by their usual place there.

    Parameters
    ----------
    nodes
        Node of each rank, "" where unknown.
    """
    everybody = np.arange(len(nodes), dtype=np.int64)
    parallel = layout.parallel if layout is not None else None
    if parallel is None or len(parallel.places) != len(nodes):
        return [everybody], False
    numbers = np.array(parallel.peer_groups(), dtype=np.int64)
    groups: Groups = []
    leftover: Groups = []
    for number in range(int(numbers.max()) + 1):
        members = np.flatnonzero(numbers == number)
        spread = len({nodes[rank] for rank in members.tolist()}) > 1
        (groups if spread else leftover).append(members)
    if leftover:
        groups.append(np.sort(np.concatenate(leftover)))
    return groups, not leftover
