"""What a node's relatives do, without the node itself: medians and spreads of all groups at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Ints = NDArray[np.int64]

SPREAD_LIMIT = 4.0


@dataclass(frozen=True)
class Groups:
    """A division of entities; those of group -1, and the only members of theirs, have no relatives."""

    rows: Ints
    group: Ints
    start: Ints
    size: Ints
    count: int

    @classmethod
    def of(cls, group: Ints) -> Groups:
        """From the group number of each entity."""
        counts = np.bincount(group[group >= 0], minlength=int(group.max(initial=-1)) + 1)
        rows = np.flatnonzero((group >= 0) & (counts[group] > 1)) if counts.size else np.zeros(0, dtype=np.int64)
        _, numbers, sizes = np.unique(group[rows], return_inverse=True, return_counts=True)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        return cls(
            rows,
            numbers.astype(np.int64),
            starts[numbers] if sizes.size else numbers,
            sizes[numbers] if sizes.size else numbers,
            len(group),
        )

    @property
    def others(self) -> F32:
        """Logarithm of 1 + number of relatives of each entity."""
        found = np.zeros(self.count, dtype=np.float32)
        found[self.rows] = np.log(self.size)
        return found

    def messages(self, values: F32) -> tuple[F32, F32]:
        """Median of each entity's relatives, and their mean distance from the group's median.

        Parameters
        ----------
        values
            channels × entities, no NaN.

        Examples
        --------
        >>> middle, spread = Groups.of(np.array([0, 0, 0, 1])).messages(np.array([[1.0, 2.0, 9.0, 5.0]], dtype=np.float32))
        >>> middle.tolist(), spread.tolist()
        ([[5.5, 5.0, 1.5, 0.0]], [[2.0, 2.5, 0.5, 0.0]])
        """
        middle, spread = np.zeros_like(values), np.zeros_like(values)
        if not self.rows.size:
            return middle, spread
        mine = values[:, self.rows]
        apart = float(np.abs(mine).max()) * 2.0 + 1.0
        order = np.argsort(mine.astype(np.float64) + apart * self.group, axis=1, kind="stable")
        ranked = np.take_along_axis(mine, order, axis=1)
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), axis=1)
        middle[:, self.rows] = self._median_of_others(ranked, place - self.start)
        spread[:, self.rows] = self._spread_of_others(mine, ranked)
        return middle, spread

    def _median_of_others(self, ranked: F32, place: Ints) -> F32:
        low, high = (self.size - 2) // 2, (self.size - 1) // 2
        below = np.take_along_axis(ranked, self.start + low + (low >= place), axis=1)
        above = np.take_along_axis(ranked, self.start + high + (high >= place), axis=1)
        return np.asarray(0.5 * (below + above), dtype=np.float32)

    def _spread_of_others(self, mine: F32, ranked: F32) -> F32:
        low, high = self.start + (self.size - 1) // 2, self.start + self.size // 2
        away = np.minimum(np.abs(mine - 0.5 * (ranked[:, low] + ranked[:, high])), SPREAD_LIMIT)
        totals = np.stack([np.bincount(self.group, weights=row) for row in away])
        return np.asarray((totals[:, self.group] - away) / (self.size - 1), dtype=np.float32)

    def sums(self, values: F32) -> F32:
        """Sum over each group, channels × groups, groups in ascending order of their number."""
        return np.stack([np.bincount(self.group, weights=row[self.rows]) for row in values]).astype(np.float32)
