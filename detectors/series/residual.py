"""How far a row of metrics lies from what its own past spans: residuals of principal components over several time scales.

Each metric is placed on its usual level and squashed (a tenfold excursion counts more than a twofold one, but not five times more), then
split into bands: the change against the last minute, against the last minutes, and the level itself. Whatever the leading components of
these bands cannot rebuild is the residual. It is measured per band in units of its own worst percent in the past, and averaged over
several numbers of components, so that no single choice of rank decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

F64 = NDArray[np.float64]

HALF_LIVES = (1.0, 3.0, 10.0)
"""Half-lives, in rows, of the averages between which the bands lie."""
EXPLAINED = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
"""Shares of variance that the components kept explain; the score is the mean over them."""
WORST_SHARE = 0.99
CAP = 3.0
"""No single band counts for more than this many times its own worst percent: one broken sensor is not a broken server."""
_CONSTANT = 1e-6
_SPREAD_FLOOR = 1e-3


def squash(values: NDArray[Any]) -> F64:
    """Linear near zero, logarithmic far out, odd.

    Examples
    --------
    >>> squash(np.array([0.0, 0.1, 100.0])).round(3)
    array([0.   , 0.1  , 5.298])
    """
    return np.arcsinh(np.asarray(values, dtype=np.float64))


def pace(half_life: float) -> float:
    """Weight of the newest row in an average with this half-life (rows)."""
    return float(1.0 - 0.5 ** (1.0 / half_life))


def smooth(values: F64, half_life: float, start: F64) -> F64:
    """Causal exponential average along the first axis, continued from `start`, the average before the first row."""
    weight = pace(half_life)
    state = np.atleast_1d(start)[None, ...] * (1.0 - weight)
    done, _ = lfilter([weight], [1.0, weight - 1.0], values, axis=0, zi=state.reshape(1, *values.shape[1:]))
    return np.asarray(done)


@dataclass
class Bands:
    """Splits rows into differences of averages of growing half-life; `level` is the state, one average per half-life."""

    level: F64

    @classmethod
    def starting_at(cls, row: F64) -> Bands:
        """All averages at `row`."""
        return cls(np.repeat(row[None, :], len(HALF_LIVES), axis=0))

    def split(self, rows: F64) -> F64:
        """Bands of `rows` [T, F] → [T, (len(HALF_LIVES) + 1) * F]; moves the state past the last row."""
        levels = [rows, *(smooth(rows, half, self.level[i]) for i, half in enumerate(HALF_LIVES))]
        self.level = np.stack([level[-1] for level in levels[1:]])
        return np.hstack([fine - coarse for fine, coarse in itertools.pairwise(levels)] + [levels[-1]])


@dataclass
class Subspaces:
    """Leading components, several numbers of them, and how large what they leave unexplained usually gets.

    Attributes
    ----------
    vectors
        Columns are components, most important first.
    ranks
        Numbers of components, rising.
    worst, usual
        Per rank: scale of each column's residual, and the worst percent of the score in those scales.
    """

    vectors: F64
    ranks: list[int]
    worst: F64
    usual: F64

    def residuals(self, rows: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """The part of centred `rows` outside the components, rank after rank; each is one step from the one before."""
        weights, left, done = rows @ self.vectors, rows, 0
        for rank in self.ranks:
            left = left - weights[:, done:rank] @ self.vectors[:, done:rank].T
            done = rank
            yield left

    def contributions(self, rows: NDArray[Any]) -> F64:
        """Squared residual of each column in units of its worst percent, capped; mean over the ranks."""
        return np.asarray(np.mean([capped(left, self.worst[i]) for i, left in enumerate(self.residuals(rows))], axis=0))

    def score(self, rows: NDArray[Any]) -> F64:
        """Mean contribution over columns and ranks, 1 = the worst percent of the past."""
        each = [capped(left, self.worst[i]).mean(axis=1) / self.usual[i] for i, left in enumerate(self.residuals(rows))]
        return np.asarray(np.mean(each, axis=0))


def capped(residual: NDArray[Any], worst: NDArray[Any]) -> NDArray[Any]:
    """Squared residual in units of the worst percent, each at most `CAP` of them."""
    size = np.asarray(np.abs(residual) / worst)
    np.minimum(size, CAP, out=size)
    return np.asarray(np.square(size, out=size))


def worst_of(residual: F64) -> F64:
    """The scale of each column: its worst percent, at least a twentieth of its largest value."""
    size = np.abs(residual)
    return np.asarray(np.maximum(np.quantile(size, WORST_SHARE, axis=0), 0.05 * size.max(axis=0) + _CONSTANT))


def leading(covariance: NDArray[Any]) -> tuple[F64, F64, list[int]]:
    """Eigenvalues and eigenvectors, largest first, as many as the last share needs, and the rank for each share of variance; at least
    one column is always left unexplained."""
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    share = np.cumsum(values) / max(float(values.sum()), _CONSTANT)
    most = max(1, len(values) - 2)
    ranks = [min(int(np.searchsorted(share, part)) + 1, most) for part in EXPLAINED]
    return values[: ranks[-1]], np.ascontiguousarray(vectors[:, : ranks[-1]]), ranks


@dataclass
class ResidualModel:
    """Fit on the past, score what follows.

    Scores are causal; 1 is about the worst percent of the past. Rows without any metric that moved in the past score 0.

    Parameters
    ----------
    smoothing
        Half-life, in rows, of the average that is added to the score of the moment: most faults last.
    """

    smoothing: float = 5.0
    used: NDArray[np.bool_] = field(init=False)
    place: F64 = field(init=False)
    spread: F64 = field(init=False)
    centre: F64 = field(init=False)
    subspaces: Subspaces | None = field(init=False, default=None)
    bands: Bands = field(init=False)
    tail: float = field(init=False, default=0.0)

    def fit(self, train: F64) -> None:
        """Learn place, spread, components and scales of `train` [T, F], NaN-free.

        Raises
        ------
        ValueError
            When there are fewer than 20 rows.
        """
        if len(train) < 20:
            raise ValueError(f"a residual model was given {len(train)} rows to learn from, it needs at least 20")
        deviation = train.std(axis=0)
        quartiles = np.percentile(train, [25, 50, 75], axis=0)
        self.used, self.place = deviation > _CONSTANT, quartiles[1]
        robust = (quartiles[2] - quartiles[0]) / 1.35
        self.spread = np.maximum(np.maximum(robust, 0.3 * deviation), _SPREAD_FLOOR)
        self.subspaces = None
        if self.used.any():
            self._fit_subspaces(self._placed(train))

    def score(self, rows: F64) -> F64:
        """Scores of the `rows` [T, F] that follow those seen so far; goes on where the last call ended."""
        if self.subspaces is None or not len(rows):
            return np.zeros(len(rows))
        return self._smoothed(self.subspaces.score(self.bands.split(self._placed(rows)) - self.centre))

    def contributions(self, rows: F64) -> F64:
        """Share of each metric in the score of each of `rows`, judged as if they came next; the state does not move."""
        shares = np.zeros((len(rows), len(self.used)))
        if self.subspaces is not None and len(rows):
            each = self.subspaces.contributions(Bands(self.bands.level.copy()).split(self._placed(rows)) - self.centre)
            shares[:, self.used] = each.reshape(len(rows), len(HALF_LIVES) + 1, -1).sum(axis=1)
        return np.asarray(shares / np.maximum(shares.sum(axis=1, keepdims=True), _CONSTANT))

    def _fit_subspaces(self, placed: F64) -> None:
        self.bands = Bands.starting_at(placed[0])
        banded = self.bands.split(placed)
        self.centre = banded.mean(axis=0)
        banded -= self.centre
        _, vectors, ranks = leading(np.atleast_2d(np.cov(banded.T)))
        self.subspaces = Subspaces(vectors, ranks, np.ones((len(ranks), 1)), np.ones(len(ranks)))
        self.subspaces.worst = np.stack([worst_of(left) for left in self.subspaces.residuals(banded)])
        sizes = [
            capped(left, worst).mean(axis=1)
            for left, worst in zip(self.subspaces.residuals(banded), self.subspaces.worst, strict=True)
        ]
        self.subspaces.usual = np.maximum([np.quantile(size, WORST_SHARE) for size in sizes], _CONSTANT)
        self.tail = 0.0
        self._smoothed(self.subspaces.score(banded))

    def _placed(self, rows: F64) -> F64:
        return squash(((rows - self.place) / self.spread)[:, self.used])

    def _smoothed(self, raw: F64) -> F64:
        lasting = smooth(raw, self.smoothing, np.array([self.tail]))
        self.tail = float(lasting[-1])
        return np.asarray((raw + lasting) / 2.0)
