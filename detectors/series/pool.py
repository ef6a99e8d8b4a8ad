"""The metrics of all nodes of a job as one moving residual model: what `ResidualModel` fits in one go, followed tick by tick.

Peers are pooled: each node has its own usual level and spread per metric, all share the components and scales. Per tick a bounded number of
nodes is scored, and only those teach; the eigenvectors are made anew now and then, by the detector's queue.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.series.residual import CAP, HALF_LIVES, WORST_SHARE, Subspaces, leading, pace, squash
from detectors.state import Array

F32 = NDArray[np.float32]
BANDS = len(HALF_LIVES) + 1
ROWS_PER_TICK = 256
"""Nodes scored per tick at most; a larger pool takes turns."""
_PACES = np.array([pace(half) for half in HALF_LIVES], dtype=np.float32)
_PLACE_PACE, _MEMORY_ROWS = 1.0 / 600, 20_000.0
_TAIL_SHARE, _LASTING = 0.02, 5.0
_WORST_OF_SIGMA = 2.6
_RELATIVE_FLOOR = 0.02
_SIGMA_FLOOR = 0.1
"""A tenth of a metric's usual spread is no news, however constant it was."""
_SD_OF_WORST, _SD_OF_TAIL = 2.33, 2.05
"""Standard deviations that a Gaussian passes with one and with two percent."""
_PASSED_NEEDED = 30
_NODE_ARRAYS = ("place", "spread", "seen", "known", "level", "lasting", "streak", "calm", "since_ns", "absent")


def _zeros(*shape: int) -> F32:
    return np.zeros(shape, dtype=np.float32)


class Left(NamedTuple):
    """What the components leave of some rows: how far each column is out (ranks × rows × columns), and how large all columns of a row are
    together, in their worst percents (ranks × rows)."""

    out: F32
    size: F32


class Pool(msgspec.Struct):
    """State of one pool; nodes are sorted, rows of all per-node arrays follow them.

    Attributes
    ----------
    place, spread, seen, known
        Usual level and spread per node and metric, ticks seen, and how often the metric was there.
    level
        Averages of the squashed metrics, per half-life.
    centre, covariance, weight
        Of the banded rows, and from how many rows they are.
    ratio
        Scale of each column's residual in standard deviations, per rank; tracked, because tails are not Gaussian.
    size_mean, size_var
        Of the logarithm of the score, per rank: its worst percent puts the ranks on one scale.
    log_mean, log_var, excess
        Of the logarithm of the whole score, and how far the two percent that pass its line pass it.
    """

    name: str
    features: list[str]
    nodes: list[str] = []
    place: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    spread: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    seen: Array = msgspec.field(default_factory=lambda: _zeros(0))
    known: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    level: Array = msgspec.field(default_factory=lambda: _zeros(0, 0, 0))
    lasting: Array = msgspec.field(default_factory=lambda: _zeros(0))
    streak: Array = msgspec.field(default_factory=lambda: _zeros(0))
    calm: Array = msgspec.field(default_factory=lambda: _zeros(0))
    since_ns: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    absent: Array = msgspec.field(default_factory=lambda: _zeros(0))
    centre: Array = msgspec.field(default_factory=lambda: _zeros(0))
    covariance: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    weight: float = 0.0
    vectors: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    ranks: list[int] = []
    sigma: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    ratio: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    size_mean: Array = msgspec.field(default_factory=lambda: _zeros(0))
    size_var: Array = msgspec.field(default_factory=lambda: _zeros(0))
    sized: float = 0.0
    log_mean: float = 0.0
    log_var: float = 1.0
    excess: float = 0.0
    passed: float = 0.0
    judged: float = 0.0
    tick: int = 0
    fitted: int = -1
    unused: int = 0

    @classmethod
    def of(cls, name: str, features: list[str]) -> Pool:
        """An empty pool."""
        wide = BANDS * len(features)
        return cls(name, features, place=_zeros(0, len(features)), spread=_zeros(0, len(features)), known=_zeros(0, len(features)),
                   level=_zeros(0, len(HALF_LIVES), len(features)), centre=_zeros(wide), covariance=_zeros(wide, wide))  # fmt: skip

    def follow(self, nodes: list[str], values: F32) -> tuple[NDArray[np.int64], F32]:
        """Take a tick of sorted `nodes` × features; rows whose turn it is, and their banded values."""
        rows = self._rows(nodes)
        self.tick += 1
        banded = self._banded(rows, values)
        turns = -(-len(self.nodes) // ROWS_PER_TICK)
        mine = np.flatnonzero((rows + self.tick) % turns == 0)
        return rows[mine], banded[mine] - self.centre

    def learn(self, banded: F32, left: Left | None = None) -> None:
        """Move centre, covariance and, once fitted, scales by `banded` rows that are believed healthy; `left` is what the components leave
        of these rows where that is known already."""
        count = len(banded)
        if not count:
            return
        bounded = banded
        if self.fitted >= 0:
            most = np.float32(4.0) * self._deviation()
            bounded = np.clip(banded, -most, most)
        self.weight += count
        gain = np.float32(max(count / self.weight, count / _MEMORY_ROWS))
        mean = bounded.mean(axis=0)
        self.covariance *= 1 - gain
        moved = bounded.T @ bounded
        moved *= gain / np.float32(count)
        apart = np.outer(mean, mean)
        apart *= gain * gain
        moved -= apart
        self.covariance += moved
        self.centre += gain * mean
        if self.fitted >= 0:
            self._follow_scales(self._left(banded) if left is None else left)

    def fit(self) -> None:
        """Components of the present covariance: the costly step, some ten milliseconds for 300 columns."""
        values, vectors, ranks = leading(self.covariance.astype(np.float64))
        energy = np.cumsum(values * vectors**2, axis=1)
        total = np.diag(self.covariance).astype(np.float64)
        left = np.stack([np.maximum(total - energy[:, rank - 1], _SIGMA_FLOOR**2) for rank in ranks])
        self.vectors, self.ranks, self.sigma = vectors.astype(np.float32), ranks, np.sqrt(left).astype(np.float32)
        if self.fitted < 0:
            self.ratio = np.full_like(self.sigma, _WORST_OF_SIGMA)
            self.size_mean, self.size_var = (
                np.zeros(len(ranks), dtype=np.float32),
                np.ones(len(ranks), dtype=np.float32),
            )
        self.fitted = self.tick

    @property
    def subspaces(self) -> Subspaces:
        """The model as it stands."""
        return Subspaces(self.vectors, self.ranks, self.sigma * self.ratio, self._usual())

    def _usual(self) -> NDArray[Any]:
        return np.asarray(np.exp(self.size_mean + _SD_OF_WORST * np.sqrt(self.size_var)))

    def judge(self, rows: NDArray[np.int64], banded: F32) -> tuple[F32, Left]:
        """Logarithm of the scores of `rows` (as `Subspaces.score` has them), and what the components leave of them."""
        left = self._left(banded)
        now = np.asarray((left.size / self._usual()[:, None]).mean(axis=0), np.float32)
        self.lasting[rows] += np.float32(pace(_LASTING)) * (now - self.lasting[rows])
        return np.asarray(np.log(np.maximum((now + self.lasting[rows]) / 2, 1e-4)), dtype=np.float32), left

    def _left(self, banded: F32) -> Left:
        """All ranks at once: a job has some ten nodes, and each call of numpy costs as much as these."""
        out = np.empty((len(self.ranks), *banded.shape), np.float32)
        for number, left in enumerate(self.subspaces.residuals(banded)):
            np.abs(left, out=out[number])
        size = out / (self.sigma * self.ratio)[:, None]
        np.square(np.minimum(size, np.float32(CAP), out=size), out=size)
        return Left(out, size.mean(axis=2))

    def apart(self, score: F32) -> F32:
        """Log scores without what lifts all nodes at this moment: the excess of their median over the usual."""
        common = float(np.median(score)) - self.log_mean if len(score) else 0.0
        return np.asarray(score - max(common, 0.0), dtype=np.float32)

    def limit(self, risk: float) -> float:
        """Log score that a healthy node passes with probability `risk`: exponential beyond the line that two percent pass."""
        deviation = float(np.sqrt(self.log_var))
        excess = self.excess if self.passed >= _PASSED_NEEDED else 0.4 * deviation
        return (
            self.log_mean
            + _SD_OF_TAIL * deviation
            + max(excess, 0.25 * deviation, 0.05) * float(np.log(_TAIL_SHARE / risk))
        )

    def follow_tail(self, whole: F32, score: F32, risk: float) -> None:
        """Track the distribution of log scores: their mean from the `whole` scores, the rest from those set apart. One beyond the limit
        counts as one at the limit."""
        if not len(score):
            return
        size = np.minimum(score, self.limit(risk))
        self.judged += len(size)
        gain = min(1.0, max(len(size) / 5000.0, len(size) / self.judged))
        self.log_var += gain * (float(((size - self.log_mean) ** 2).mean()) - self.log_var)
        self.log_mean += gain * (float(whole.mean()) - self.log_mean)
        line = self.log_mean + _SD_OF_TAIL * float(np.sqrt(self.log_var))
        above = size[size > line] - line
        if len(above):
            self.passed += len(above)
            self.excess += max(len(above) / self.passed, min(0.5, len(above) / 500.0)) * (
                float(above.mean()) - self.excess
            )

    def shares(self, banded: F32) -> F32:
        """Share of each feature in the score of one banded row."""
        each = self.subspaces.contributions(banded[None, :])[0].reshape(BANDS, -1).sum(axis=0)
        return np.asarray(each / max(float(each.sum()), 1e-9), dtype=np.float32)

    def _banded(self, rows: NDArray[np.int64], values: F32) -> F32:
        known = np.isfinite(values)
        young = known & (self.known[rows] == 0)
        self.place[rows] = np.where(young, values, self.place[rows])
        away = np.where(known, values - self.place[rows], 0.0).astype(np.float32)
        floor = np.maximum(_RELATIVE_FLOOR * np.abs(self.place[rows]), 1e-3)
        spread = np.maximum(self.spread[rows], floor)
        self._learn_place(rows, known, away, spread)
        squashed = squash(away / spread).astype(np.float32)
        level = self.level[rows]
        level += _PACES[None, :, None] * (squashed[:, None, :] - level)
        self.level[rows] = level
        levels = np.concatenate([squashed[:, None, :], level], axis=1)
        return np.concatenate([levels[:, :-1] - levels[:, 1:], levels[:, -1:]], axis=1).reshape(len(rows), -1)

    def _learn_place(self, rows: NDArray[np.int64], known: NDArray[np.bool_], away: F32, spread: F32) -> None:
        """Level and spread follow, by at most three spreads a tick, and not at all while the node is unusual."""
        healthy = known & (self.since_ns[rows] == 0)[:, None]
        gain = np.maximum(_PLACE_PACE, 1.0 / (self.known[rows] + 1.0)) * healthy
        bounded = np.clip(away, -3.0 * spread, 3.0 * spread)
        self.place[rows] += (gain * np.where(self.known[rows] < 30, away, bounded)).astype(np.float32)
        self.spread[rows] += (gain * (1.2533 * np.abs(bounded) - self.spread[rows]) * (self.known[rows] > 0)).astype(
            np.float32
        )
        self.known[rows] += healthy
        self.seen[rows] += 1

    def _deviation(self) -> F32:
        return np.asarray(np.sqrt(np.maximum(np.diag(self.covariance), 1e-6)))

    def _follow_scales(self, left: Left) -> None:
        count = left.size.shape[1]
        self.sized += count
        gain = min(0.05, count / 2000.0)
        share = (left.out > (self.sigma * self.ratio)[:, None]).mean(axis=1)
        self.ratio[:] = np.clip(self.ratio * np.exp(gain * 4.0 * (share - (1.0 - WORST_SHARE))), 1.5, 30.0)
        size = np.log(np.maximum(left.size, 1e-6))
        pull = min(1.0, max(count / 5000.0, count / self.sized))
        self.size_var += pull * (((size - self.size_mean[:, None]) ** 2).mean(axis=1) - self.size_var)
        self.size_mean += pull * (size.mean(axis=1) - self.size_mean)

    def _rows(self, nodes: list[str]) -> NDArray[np.int64]:
        if nodes != self.nodes:
            self._arrange(
                sorted({*nodes, *(n for n, gone in zip(self.nodes, self.absent.tolist(), strict=True) if gone < 600)})
            )
        place = {node: row for row, node in enumerate(self.nodes)}
        rows = np.array([place[node] for node in nodes], dtype=np.int64)
        self.absent += 1
        self.absent[rows] = 0
        return rows

    def _arrange(self, nodes: list[str]) -> None:
        if nodes == self.nodes:
            return
        old = {node: row for row, node in enumerate(self.nodes)}
        kept = [(new, old[node]) for new, node in enumerate(nodes) if node in old]
        to, source = (np.array([pair[i] for pair in kept], dtype=np.int64) for i in (0, 1))
        for name in _NODE_ARRAYS:
            before = getattr(self, name)
            after = np.zeros((len(nodes), *before.shape[1:]), dtype=before.dtype)
            after[to] = before[source]
            setattr(self, name, after)
        self.nodes = nodes
