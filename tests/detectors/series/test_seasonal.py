"""Seasonal models say where a series goes on."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from detectors.series.seasonal import MODELS, Poly, SeasonalModel, Volatility, filled


def day(count: int, period: int, seed: int = 0) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    time = np.arange(count)
    return np.asarray(10 + 0.02 * time + 3 * np.sin(2 * np.pi * time / period) + rng.normal(0, 0.2, count))


@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_a_season_and_a_trend_go_on(kind: type[SeasonalModel]) -> None:
    values = day(24 * 8, 24)
    model = kind()
    model.fit(values[:-24], 24)
    band = model.ahead(24)
    assert np.abs(band.expected - values[-24:]).mean() < 0.5, "far below the season's swing of three"
    assert (band.score(values[-24:]) < 5).mean() > 0.9
    assert (band.score(values[-24:] + 8.0) > 5).all()


def test_absent_values_and_gross_errors_do_not_bend_the_polynomial() -> None:
    values = day(24 * 8, 24)
    broken = values.copy()
    rng = np.random.default_rng(1)
    broken[rng.choice(len(values), 20, replace=False)] = np.nan
    broken[rng.choice(len(values), 8, replace=False)] = 500.0
    model = Poly()
    model.fit(broken, 24)
    assert np.abs(model.expected(np.arange(len(values))) - values).mean() < 0.5


def test_the_band_widens_after_a_storm_and_comes_back() -> None:
    rng = np.random.default_rng(2)
    calm = rng.normal(0, 1, 400)
    storm = np.concatenate([calm, rng.normal(0, 3.5, 40)])
    after, before = Volatility.of(storm).spread(200), Volatility.of(calm).spread(200)
    assert after[0] > 1.3 * before[0]
    assert after[-1] == pytest.approx(before[-1], rel=0.2)


def test_too_little_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="needs 3"):
        Poly().fit(np.array([1.0, np.nan]), 0)
    with pytest.raises(ValueError, match="two seasons"):
        MODELS["stl"]().fit(np.arange(10.0), 24)
    with pytest.raises(ValueError, match="single known value"):
        filled(np.full(3, np.nan))


def test_three_days_say_how_far_the_next_points_lie_from_them() -> None:
    rng = np.random.default_rng(4)
    ahead, stated = [], []
    for _ in range(10):
        values = rng.normal(size=4 * 288)
        model = Poly()
        model.fit(values[: 3 * 288], 288)
        band = model.ahead(288)
        ahead.append(float(np.std(values[3 * 288 :] - band.expected)))
        stated.append(float(band.spread.mean()))
    assert np.mean(stated) == pytest.approx(np.mean(ahead), rel=0.1)
