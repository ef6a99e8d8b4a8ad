"""What a step in a series does to the band that is fitted over it, with and without `detectors.series.change.levelled`.

    python -m benchmarks.levels [--series 60] [--seed 5]

Series of five-minute points with the season of the day (or six hours, which have none), noise that follows itself, and a step some hours or
days before the end; the last two hours are what the fit must foresee. Shown, in standard deviations of the noise: how far the foreseen lies
from what came (`error`), how far the band says it will (`spread`), each for a plain fit and for one of the levelled series; and in how many
of the series without a step one was seen. All of it is drawn from `--seed`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.series.change import levelled
from detectors.series.seasonal import Poly

F64 = NDArray[np.float64]
DAY, AHEAD, HOUR = 288, 24, 12
FOLLOWS = (0.0, 0.5, 0.9)
"""Correlation from point to point."""


@dataclass(frozen=True)
class Case:
    """One kind of series: points, height of the step and of the season, and how much it rises from end to end."""

    name: str
    points: int = 3 * DAY
    step: float = 0.0
    season: float = 0.0
    rise: float = 0.0

    def draw(self, rng: np.random.Generator, follow: float) -> F64:
        """The points, and those to foresee behind them."""
        count = self.points + AHEAD
        values = noise(rng, count, follow) + np.linspace(0.0, self.rise, count)
        values[: self.points - rng.integers(3 * HOUR, 2 * self.points // 3)] -= self.step * rng.choice([-1, 1])
        return values + self.season * np.sin(2 * np.pi * np.arange(count) / DAY)


CASES = (
    Case("nothing, three days"), Case("nothing, six hours", 6 * HOUR), Case("a season of 5", season=5.0), Case("a rise of 10", rise=10.0),
    Case("a step of 3", step=3.0), Case("a step of 6", step=6.0), Case("a step of 6 in a season of 5", step=6.0, season=5.0),
    Case("a step of 6 in six hours", 6 * HOUR, step=6.0),
)  # fmt: skip


def noise(rng: np.random.Generator, count: int, follow: float) -> F64:
    """Noise of deviation 1 whose neighbours are correlated."""
    values = rng.normal(size=count + DAY)
    for at in range(1, len(values)):
        values[at] = follow * values[at - 1] + np.sqrt(1 - follow**2) * values[at]
    return np.asarray(values[DAY:])


def foreseen(values: F64, prepare: Callable[[F64], F64]) -> tuple[float, float]:
    """Mean error and stated spread of the points ahead."""
    model = Poly()
    model.fit(prepare(values[:-AHEAD]), period_of(values))
    band = model.ahead(AHEAD)
    return float(np.abs(band.expected - values[-AHEAD:]).mean()), float(band.spread.mean())


def period_of(values: F64) -> int:
    """The season that a series of this length may have, as `seasonal_band` sees it."""
    return DAY if len(values) - AHEAD >= 2 * DAY else 0


def prepared(values: F64) -> F64:
    """As `seasonal_band` does it."""
    rough = Poly()
    rough.fit(values, DAY if len(values) >= 2 * DAY else 0)
    return levelled(values, rough.seasonal(np.arange(len(values))))


def row(case: Case, follow: float, count: int, seed: int) -> str:
    """One line of the table."""
    rng = np.random.default_rng(seed)
    drawn = [case.draw(rng, follow) for _ in range(count)]
    plain = np.mean([foreseen(values, lambda known: known) for values in drawn], axis=0)
    moved = np.mean([foreseen(values, prepared) for values in drawn], axis=0)
    seen = np.mean([bool((prepared(values[:-AHEAD]) != values[:-AHEAD]).any()) for values in drawn])
    return (
        f"| {case.name} | {follow:g} | {plain[0]:.2f} · {plain[1]:.2f} | {moved[0]:.2f} · {moved[1]:.2f} | {seen:.2f} |"
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=60)
    parser.add_argument("--seed", type=int, default=5)
    chosen = parser.parse_args()
    print(
        "| series | follows itself | plain: error · spread | levelled: error · spread | a step seen in |\n| --- | --- | --- | --- | --- |"
    )
    for case in CASES:
        for follow in FOLLOWS:
            print(row(case, follow, chosen.series, chosen.seed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
