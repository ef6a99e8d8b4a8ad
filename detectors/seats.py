"""Where things lie among rows that are known: quick where most lie as they did, as when one node of a thousand is absent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Pair = tuple[str, str]
_HOLE, _MOST_RUNS = 512, 64
"""Rows that are looked through for where both go on, and how often that is done before the rest is looked up one by one."""


def seats(asked: Sequence[Pair], known: Sequence[Pair]) -> NDArray[np.int64]:
    """Number of each of `asked` among `known`, -1 where it is new.

    To compare ten thousand names with themselves is quick, to look them up is not: so stretches are sought that both have.

    Examples
    --------
    >>> rows = [("a", "0"), ("a", "1"), ("b", "0"), ("c", "0")]
    >>> seats([("a", "0"), ("a", "1"), ("c", "0"), ("d", "0")], rows).tolist()
    [0, 1, 3, -1]
    """
    left, right = list(asked), list(known)
    pieces: list[NDArray[np.int64]] = []
    at = row = 0
    while at < len(left) and len(pieces) < _MOST_RUNS:
        try:
            row = right.index(left[at], row, row + _HOLE)
        except ValueError:
            break
        length = _run(left, at, right, row)
        pieces.append(np.arange(row, row + length))
        at, row = at + length, row + length
    if at < len(left):
        number = {entity: row for row, entity in enumerate(right)}
        pieces.append(np.array([number.get(entity, -1) for entity in left[at:]], dtype=np.int64))
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def _run(left: list[Pair], at: int, right: list[Pair], row: int) -> int:
    """How many entries from `at` and from `row` on are the same."""
    same, differs = 0, min(len(left) - at, len(right) - row)
    if left[at : at + differs] == right[row : row + differs]:
        return differs
    while differs - same > 1:
        middle = (same + differs) // 2
        if left[at + same : at + middle] == right[row + same : row + middle]:
            same = middle
        else:
            differs = middle
    return same
