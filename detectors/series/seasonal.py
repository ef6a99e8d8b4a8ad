"""Season and trend of slow series, and how far the next values may lie from them. Fits cost milliseconds to seconds: see `refit`.

Three models of one interface: a polynomial with the season of the hour (cheap, robust), STL by LOESS, and a structural state-space model
(both statsmodels). The spread about the fit follows its own recent size, as in GARCH: calm times have narrow bands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.robust import median_of_known

F64 = NDArray[np.float64]
_GAUSS_OF_MEDIAN = 1.4826


@dataclass
class Band:
    """Where the next values should lie: the expected ones and the spread about them, one per step ahead."""

    expected: F64
    spread: F64

    def score(self, values: F64) -> F64:
        """Distance of `values` from the expected in spreads; NaN stays NaN."""
        return np.asarray(np.abs(values - self.expected[: len(values)]) / self.spread[: len(values)])


@dataclass
class Volatility:
    """Size of residuals with memory: variance = (1 - persistence) × usual + persistence × recent, the recent an exponential average.

    A GARCH(1,1) whose weights are given and not fitted: no likelihood to get lost in, no explosion.
    """

    usual: float = 1.0
    recent: float = 1.0
    persistence: float = 0.5
    pace: float = 0.06

    @classmethod
    def of(cls, residual: F64) -> Volatility:
        """Learn from the residuals of a fit; each counts for at most four usual ones."""
        known = residual[np.isfinite(residual)]
        usual = max(float(_GAUSS_OF_MEDIAN * np.median(np.abs(known))) if len(known) else 0.0, 1e-9) ** 2
        made = cls(usual, usual)
        for value in np.minimum(known**2, 16.0 * usual).tolist():
            made.recent += made.pace * (value - made.recent)
        return made

    def spread(self, steps: int) -> F64:
        """Standard deviation 1..`steps` ahead: the recent part fades."""
        fade = self.persistence * (1.0 - self.pace) ** np.arange(steps)
        return np.asarray(np.sqrt(self.usual + fade * np.maximum(self.recent - self.usual, -0.5 * self.usual)))


class SeasonalModel(ABC):
    """Fits one series and says where it goes on. `cost_units` is about microseconds per point fitted."""

    name: ClassVar[str]
    cost_units: ClassVar[float]

    @abstractmethod
    def fit(self, values: F64, period: int) -> None:
        """Learn from `values`, NaN where absent, with a season of `period` points (0: none)."""

    @abstractmethod
    def ahead(self, steps: int) -> Band:
        """The next `steps` points."""


@dataclass
class Poly(SeasonalModel):
    """Polynomial of low degree plus the median season, by a few rounds of reweighted least squares (Huber)."""

    name: ClassVar[str] = "poly"
    cost_units: ClassVar[float] = 1.0
    degree: int = 1
    rounds: int = 4
    season: F64 = field(default_factory=lambda: np.zeros(1))
    weights: F64 = field(default_factory=lambda: np.zeros(1))
    volatility: Volatility = field(default_factory=Volatility)
    length: int = 0

    def fit(self, values: F64, period: int) -> None:
        self.length, self.season = len(values), np.zeros(max(1, period))
        known = np.isfinite(values)
        if known.sum() <= self.degree + 1:
            raise ValueError(
                f"a polynomial of degree {self.degree} was given {known.sum()} known points, it needs {self.degree + 2}"
            )
        for _ in range(self.rounds):
            self.weights = self._line(np.where(known, values - self.seasonal(np.arange(self.length)), np.nan), known)
            if period:
                self._learn_season(values - self._design(np.arange(self.length)) @ self.weights, period)
        detrended = values - self._design(np.arange(self.length)) @ self.weights
        self.volatility = Volatility.of(detrended - (season_without(detrended, period) if period else 0.0))

    def ahead(self, steps: int) -> Band:
        return Band(self.expected(np.arange(self.length, self.length + steps)), self.volatility.spread(steps))

    def expected(self, positions: NDArray[np.int64]) -> F64:
        """Trend and season at positions from the first fitted point."""
        return np.asarray(self._design(positions) @ self.weights + self.seasonal(positions))

    def _design(self, positions: NDArray[np.int64]) -> F64:
        return np.vander(positions / max(1, self.length), self.degree + 1, increasing=True)

    def seasonal(self, positions: NDArray[np.int64]) -> F64:
        """The season alone."""
        return np.asarray(self.season[positions % len(self.season)])

    def _line(self, values: F64, known: NDArray[np.bool_]) -> F64:
        design, target = self._design(np.arange(self.length))[known], values[known]
        weight: F64 = np.ones(len(target))
        solution: F64 = np.zeros(self.degree + 1)
        for _ in range(self.rounds):
            root = np.sqrt(weight)
            solution = np.asarray(
                np.linalg.lstsq(design * root[:, None], target * root, rcond=None)[0], dtype=np.float64
            )
            size = np.abs(target - design @ solution)
            weight = np.minimum(
                1.0, 1.5 * max(float(_GAUSS_OF_MEDIAN * np.median(size)), 1e-12) / np.maximum(size, 1e-12)
            )
        return np.asarray(solution)

    def _learn_season(self, detrended: F64, period: int) -> None:
        ordered = np.sort(by_phase(detrended, period), axis=0)
        known = np.isfinite(ordered).sum(axis=0)
        columns = np.arange(period)
        middle = (
            ordered[np.maximum((known - 1) // 2, 0), columns]
            + ordered[np.minimum(known // 2, len(ordered) - 1), columns]
        ) / 2
        season = np.where(known >= 2, middle, 0.0)
        self.season = season - season.mean()


@dataclass
class Stl(SeasonalModel):
    """Seasonal-trend decomposition by LOESS (statsmodels), robust; goes on with its last season and trend."""

    name: ClassVar[str] = "stl"
    cost_units: ClassVar[float] = 100.0
    last: F64 = field(default_factory=lambda: np.zeros(1))
    level: float = 0.0
    slope: float = 0.0
    volatility: Volatility = field(default_factory=Volatility)

    def fit(self, values: F64, period: int) -> None:
        from statsmodels.tsa.seasonal import STL

        if period < 2 or len(values) < 2 * period:
            raise ValueError(
                f"STL was given {len(values)} points with a season of {period}, it needs two seasons of two points at least"
            )
        found = STL(filled(values), period=period, robust=True).fit()
        trend = np.asarray(found.trend)
        self.last, self.level = np.asarray(found.seasonal)[-period:], float(trend[-1])
        self.slope = float(np.median(np.diff(trend[-period:])))
        self.volatility = Volatility.of(np.where(np.isfinite(values), np.asarray(found.resid), np.nan))

    def ahead(self, steps: int) -> Band:
        step = np.arange(steps)
        return Band(
            self.level + self.slope * (step + 1) + self.last[step % len(self.last)], self.volatility.spread(steps)
        )


@dataclass
class Structural(SeasonalModel):
    """Local linear trend with trigonometric season in state-space form (statsmodels UnobservedComponents, maximum likelihood)."""

    name: ClassVar[str] = "structural"
    cost_units: ClassVar[float] = 3000.0
    harmonics: int = 2
    result: Any = None

    def fit(self, values: F64, period: int) -> None:
        from statsmodels.tsa.statespace.structural import UnobservedComponents

        seasons = [{"period": period, "harmonics": min(self.harmonics, period // 2)}] if period >= 2 else None
        model = UnobservedComponents(values, level="lltrend", freq_seasonal=seasons)
        self.result = model.fit(disp=False, maxiter=50)

    def ahead(self, steps: int) -> Band:
        forecast = self.result.get_forecast(steps)
        return Band(np.asarray(forecast.predicted_mean), np.maximum(np.asarray(forecast.se_mean), 1e-9))


def by_phase(values: F64, period: int) -> F64:
    """`values` as seasons × phases, NaN behind the end."""
    full = np.full(-(-len(values) // period) * period, np.nan)
    full[: len(values)] = values
    return full.reshape(-1, period)


def season_without(detrended: F64, period: int) -> F64:
    """What the other seasons say of each point: the median of its phase without itself, 0 where there is no other.

    Of three points in a phase one is the median: measured against a season that contains it, noise seems half as large as it is.

    Examples
    --------
    >>> season_without(np.array([1.0, 2.0, 3.0, 5.0]), 2).tolist()
    [3.0, 5.0, 1.0, 2.0]
    """
    seasons = by_phase(detrended, period)
    others = [median_of_known(np.delete(seasons, row, axis=0)) for row in range(len(seasons))]
    return np.asarray(np.nan_to_num(np.concatenate(others))[: len(detrended)])


def filled(values: F64) -> F64:
    """`values` with linear interpolation across absent ones; raises `ValueError` when there is no value at all."""
    known = np.isfinite(values)
    if not known.any():
        raise ValueError("a seasonal fit was given a series without a single known value, it needs some")
    return np.asarray(np.interp(np.arange(len(values)), np.flatnonzero(known), values[known]))


MODELS: dict[str, type[SeasonalModel]] = {model.name: model for model in (Poly, Stl, Structural)}
