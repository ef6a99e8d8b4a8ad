"""The residual model beats chance and a constant line on a real server, keeps time's arrow, and says which metric is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.detect.data import load
from benchmarks.detect.methods.ours_series_residual import OursSeriesResidual
from benchmarks.detect.metrics.vus import vus_pr
from detectors.series.residual import CAP, Bands, ResidualModel, leading, smooth, squash

F64 = NDArray[np.float64]


def server(rows: int, seed: int = 0) -> F64:
    """Six metrics that follow one load, with noise."""
    rng = np.random.default_rng(seed)
    load = 0.5 + 0.3 * np.sin(np.arange(rows) / 50) + 0.02 * rng.normal(size=rows)
    return np.asarray(load[:, None] * [1, 2, 3, 0.5, 1, 4] + 0.02 * rng.normal(size=(rows, 6)))


def fitted(seed: int = 0) -> ResidualModel:
    model = ResidualModel()
    model.fit(server(2000, seed))
    return model


def test_on_a_real_server_it_beats_chance_and_the_constant_line() -> None:
    series = load("asd", "omi-2")
    method = OursSeriesResidual()
    method.fit(series.series.train, 0)
    spans = series.labels.spans
    ours = vus_pr(method.score(series.series.test), spans, 20)
    line = np.abs(series.series.test - series.series.train.mean(axis=0)) / np.maximum(
        series.series.train.std(axis=0), 1e-3
    )
    chance = vus_pr(np.random.default_rng(0).random(len(series.series.test)), spans, 20)
    assert ours > 1.5 * vus_pr(line.max(axis=1), spans, 20)
    assert ours > 3 * chance


def test_a_broken_relation_scores_though_each_value_is_usual() -> None:
    model, test = fitted(), server(400, seed=1)
    test[200:220, 2] = test[0:20, 2][::-1] * 0 + server(2000)[:, 2].mean() + 0.5
    score = model.score(test)
    assert score[205:220].min() > np.quantile(score[:200], 0.99)


def test_a_score_needs_no_later_row() -> None:
    test = server(300, seed=2)
    whole, cut = fitted().score(test), fitted().score(test[:150])
    np.testing.assert_allclose(whole[:150], cut, rtol=1e-9)


def test_it_goes_on_where_it_stood() -> None:
    test, one, two = server(300, seed=2), fitted(), fitted()
    np.testing.assert_allclose(one.score(test), np.concatenate([two.score(test[:97]), two.score(test[97:])]), rtol=1e-9)


def test_scores_do_not_depend_on_units() -> None:
    scale, shift = np.array([1, 1e3, 1e-2, 5, 1, 1e6]), np.array([0, 5, 0, -3, 100, 0])
    model = ResidualModel()
    model.fit(server(2000) * scale * 100 + shift)
    plain = ResidualModel()
    plain.fit(server(2000) * 100)
    test = server(200, seed=3)
    np.testing.assert_allclose(model.score(test * scale * 100 + shift), plain.score(test * 100), rtol=0.05)


def test_the_metric_that_does_not_fit_is_named() -> None:
    model, test = fitted(), server(3, seed=4)
    test[2, 4] += 3.0
    shares = model.contributions(test)
    assert shares[2].argmax() == 4
    assert shares[2].sum() == pytest.approx(1.0)


def test_constant_metrics_and_idle_servers_are_no_news() -> None:
    train, test = server(500), server(100, seed=5)
    model = ResidualModel()
    model.fit(np.column_stack([train, np.full(500, 7.0)]))
    assert np.isfinite(model.score(np.column_stack([test, np.full(100, 9.0)]))).all()
    model.fit(np.full((500, 3), 2.0))
    assert (model.score(np.full((10, 3), 5.0)) == 0).all()


def test_one_sensor_gone_wild_is_capped() -> None:
    model, wild = fitted(), server(50, seed=6)
    wild[20:, 0] = 1e12
    assert model.subspaces is not None
    assert model.score(wild).max() <= CAP**2 / model.subspaces.usual.min()


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="19 rows"):
        ResidualModel().fit(server(19))


def test_bands_add_up_to_the_row() -> None:
    rows = server(50)
    bands = Bands.starting_at(rows[0]).split(rows).reshape(50, -1, 6)
    np.testing.assert_allclose(bands.sum(axis=1), rows, atol=1e-9)


def test_smoothing_halves_in_its_half_life() -> None:
    found = smooth(np.zeros((6, 1)), 3.0, np.array([8.0]))
    assert found[2, 0] == pytest.approx(4.0)
    assert found[5, 0] == pytest.approx(2.0)


def test_squash_is_odd_and_orderly() -> None:
    values = np.linspace(-100, 100, 201)
    assert (np.diff(squash(values)) > 0).all()
    np.testing.assert_allclose(squash(values), -squash(-values))


def test_some_column_is_always_left_unexplained() -> None:
    values, vectors, ranks = leading(np.eye(5))
    assert max(ranks) <= 3
    assert vectors.shape == (5, max(ranks))
    assert len(values) == max(ranks)
