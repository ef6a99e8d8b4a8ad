"""Every method that can run here keeps the contract of `Method`; those that call themselves online look at nothing that comes later."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.detect.methods import forecast_net
from benchmarks.detect.methods.base import F64, Method
from benchmarks.detect.methods.registry import MethodError, declared_in, discover, missing, pick, version

KNOWN = discover()
HERE = {name: method for name, method in KNOWN.items() if not missing(method)}
WIDE = sorted(name for name, method in HERE.items() if method.family in ("multi", "any"))
SINGLE = sorted(name for name, method in HERE.items() if method.family in ("uni", "any"))
ONLINE = sorted(name for name, method in HERE.items() if method.online and name != "random")
"""But for random numbers, which look at nothing."""


@pytest.fixture(autouse=True)
def short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here is the contract, not what a net has learnt."""
    monkeypatch.setattr(forecast_net, "STEPS", 10)


def rows(count: int, columns: int, seed: int) -> F64:
    """Daily waves of different phase with noise."""
    rng = np.random.default_rng(seed)
    phase = 2 * np.pi * (np.arange(count)[:, None] / 24 + rng.random(columns))
    return np.asarray(np.sin(phase) + rng.normal(0, 0.1, (count, columns)), np.float64)


def scored(method: type[Method], train: F64, test: F64) -> F64:
    one = method()
    one.fit(train.copy(), 0)
    return one.score(test.copy())


def columns_for(method: type[Method]) -> int:
    return 1 if method.family == "uni" else 4


def test_the_peers_the_benchmark_promises_are_there() -> None:
    promised = "pyod-pca pyod-ecod pyod-iforest pyod-knn river-hst adtk-level-shift adtk-persist adtk-seasonal stumpy-left prophet "
    promised += "libspot ads-evt-dspot rolling-mad ewma static-rule random sub-pca poly pca-tsb"
    assert set(promised.split()) <= set(KNOWN)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_declares_where_it_is_from(name: str) -> None:
    method = KNOWN[name]
    assert method.name == name
    assert method.family in ("uni", "multi", "any")
    assert len(method.paper) > 5
    assert method.ours == name.startswith("ours")


@pytest.mark.parametrize("name", WIDE)
def test_wide_rows_give_one_finite_score_each(name: str) -> None:
    train, test = rows(600, 4, 1), rows(200, 4, 2)
    got = scored(HERE[name], train, test)
    assert got.shape == (200,)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_column_gives_one_finite_score_each(name: str) -> None:
    got = scored(HERE[name], rows(600, 1, 1), rows(300, 1, 2))
    assert got.shape == (300,)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name", sorted(HERE))
def test_constant_columns_are_no_trouble(name: str) -> None:
    columns = columns_for(HERE[name])
    train, test = np.ones((400, columns)), np.ones((200, columns))
    train[:, 0], test[:, 0] = rows(400, 1, 3)[:, 0], rows(200, 1, 4)[:, 0]
    assert np.isfinite(scored(HERE[name], train, test)).all()


@pytest.mark.parametrize("name", ONLINE)
def test_an_online_score_does_not_change_when_the_future_is_cut_off(name: str) -> None:
    train, test = rows(600, columns_for(HERE[name]), 5), rows(240, columns_for(HERE[name]), 6)
    test[150:170] += 5.0
    whole, cut = scored(HERE[name], train, test), scored(HERE[name], train, test[:120])
    np.testing.assert_allclose(whole[:120], cut, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["static-rule", "zscore-max", "pca-tsb", "pca-residual", "sub-pca"])
def test_a_gross_outlier_ranks_first(name: str) -> None:
    columns = columns_for(HERE[name])
    train, test = rows(600, columns, 7), rows(300, columns, 8)
    test[200] += 30.0
    assert abs(int(np.argmax(scored(HERE[name], train, test))) - 200) <= 24


def test_the_version_changes_with_the_source_and_not_with_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    method = KNOWN["static-rule"]
    before = version(method)
    assert before == version(method)
    monkeypatch.setattr(method, "depends", ("benchmarks.detect.methods.windows",))
    assert version(method) != before


def test_unknown_methods_and_dependencies_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MethodError, match="no method is called 'magic': known are"):
        pick(KNOWN, ["magic"])
    monkeypatch.setattr(KNOWN["static-rule"], "depends", ("benchmarks.detect.nowhere",))
    with pytest.raises(MethodError, match=r"depends on 'benchmarks\.detect\.nowhere'"):
        version(KNOWN["static-rule"])


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOWN["static-rule"], "needs", ("no_such_package",))
    assert missing(KNOWN["static-rule"]) == ["no_such_package"]


def test_only_what_a_module_defines_itself_is_its_method() -> None:
    assert [one.name for one in declared_in("benchmarks.detect.methods.static_rule")] == ["static-rule"]
